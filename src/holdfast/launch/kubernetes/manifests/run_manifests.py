"""Owns what is sent for a run: all of its objects, in the order they are made, and the text that shows them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.job.targets import Workload
from holdfast.launch.kubernetes.manifests import controller_objects, run_objects
from holdfast.launch.kubernetes.manifests.jobset import jobset
from holdfast.launch.kubernetes.manifests.mpijob import mpijob
from holdfast.launch.kubernetes.manifests.pytorchjob import pytorchjob
from holdfast.launch.kubernetes.manifests.render_context import RenderContext
from holdfast.launch.kubernetes.manifests.trainjob import training_runtime, trainjob
from holdfast.launch.kubernetes.manifests.yaml_writer import YamlValue, to_plain, to_yaml
from holdfast.launch.kubernetes.object_names import PLACEHOLDER_ID

OwnerRenderer = Callable[[RenderContext], Mapping[str, YamlValue]]

OWNER_RENDERERS: Mapping[Workload, OwnerRenderer] = {
    Workload.JOBSET: jobset,
    Workload.TRAINJOB: trainjob,
    Workload.PYTORCHJOB: pytorchjob,
    Workload.MPIJOB: mpijob,
}
"""What makes the object that stands for a run, by its kind."""


@dataclass(frozen=True, kw_only=True)
class RunManifests:
    """The objects of one run."""

    prerequisites: tuple[Mapping[str, YamlValue], ...]
    """What must be there first."""
    owner: Mapping[str, YamlValue]
    """What stands for the run: whoever removes it removes the rest."""
    owned: tuple[Mapping[str, YamlValue], ...]

    @property
    def objects(self) -> list[dict[str, Any]]:
        """All of them as plain data, in the order they are sent."""
        return [to_plain(each) for each in (*self.prerequisites, self.owner, *self.owned)]

    @property
    def text(self) -> str:
        """All of them as YAML with its reasons."""
        owner = to_plain(self.owner)
        head = (
            f"{PLACEHOLDER_ID} stands for the six characters that the run's id ends in.",
            f"The {owner['kind']} owns what comes after it: removing it removes the run.",
        )
        return to_yaml((*self.prerequisites, self.owner, *self.owned), head=head)


def render(ctx: RenderContext) -> RunManifests:
    """What would be sent; nothing is."""
    if ctx.target.agent:
        owned = (
            *run_objects.key_secrets(ctx),
            run_objects.job_config_map(ctx),
            *run_objects.rbac(ctx),
            run_objects.network_policy(ctx),
            *controller_objects.first_pod_marker(ctx),
            controller_objects.service(ctx),
            controller_objects.replicaset(ctx),
        )
    else:
        owned = (*run_objects.job_secrets(ctx), run_objects.network_policy(ctx))
    before = run_objects.volume_claim(ctx)
    if ctx.workload is Workload.TRAINJOB:
        before.append(training_runtime(ctx))
    return RunManifests(prerequisites=tuple(before), owner=OWNER_RENDERERS[ctx.workload](ctx), owned=owned)
