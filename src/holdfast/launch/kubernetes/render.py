"""Owns what is sent for a run: all of its objects, in the order they are made, and the text that shows them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.job.profile import Workload
from holdfast.launch.kubernetes import access, controller
from holdfast.launch.kubernetes.jobset import jobset
from holdfast.launch.kubernetes.manifest import Node, plain, to_yaml
from holdfast.launch.kubernetes.mpijob import mpijob
from holdfast.launch.kubernetes.names import UNKNOWN_ID
from holdfast.launch.kubernetes.pytorchjob import pytorchjob
from holdfast.launch.kubernetes.submission import Submission
from holdfast.launch.kubernetes.trainjob import runtime, trainjob

Kind = Callable[[Submission], Mapping[str, Node]]

KINDS: Mapping[Workload, Kind] = {
    Workload.JOBSET: jobset,
    Workload.TRAINJOB: trainjob,
    Workload.PYTORCHJOB: pytorchjob,
    Workload.MPIJOB: mpijob,
}
"""What makes the object that stands for a run, by its kind."""


@dataclass(frozen=True, kw_only=True)
class Rendering:
    """The objects of one run."""

    before: tuple[Mapping[str, Node], ...]
    """What must be there first."""
    owner: Mapping[str, Node]
    """What stands for the run: whoever removes it removes the rest."""
    owned: tuple[Mapping[str, Node], ...]

    @property
    def objects(self) -> list[dict[str, Any]]:
        """All of them as plain data, in the order they are sent."""
        return [plain(each) for each in (*self.before, self.owner, *self.owned)]

    @property
    def text(self) -> str:
        """All of them as YAML with its reasons."""
        owner = plain(self.owner)
        head = (
            f"{UNKNOWN_ID} stands for the six characters that the run's id ends in.",
            f"The {owner['kind']} owns what comes after it: removing it removes the run.",
        )
        return to_yaml((*self.before, self.owner, *self.owned), head=head)


def render(asked: Submission) -> Rendering:
    """What would be sent; nothing is."""
    if asked.profile.agent:
        owned = (
            *access.keys(asked),
            access.description(asked),
            *access.rbac(asked),
            access.network_policy(asked),
            *controller.mark(asked),
            controller.service(asked),
            controller.replicaset(asked),
        )
    else:
        owned = (*access.job_secrets(asked), access.network_policy(asked))
    before = access.claim(asked)
    if asked.workload is Workload.TRAINJOB:
        before.append(runtime(asked))
    return Rendering(before=tuple(before), owner=KINDS[asked.workload](asked), owned=owned)
