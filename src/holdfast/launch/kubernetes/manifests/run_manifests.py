"""Renders all objects of a run, in the order of their creation, and as commented YAML."""

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
"""The function that renders the owner object of each kind."""


@dataclass(frozen=True, kw_only=True)
class RunManifests:
    """The objects of one run."""

    prerequisites: tuple[Mapping[str, YamlValue], ...]
    """Objects that must exist before the owner."""
    owner: Mapping[str, YamlValue]
    """The run's owner object: deleting it deletes the others."""
    owned: tuple[Mapping[str, YamlValue], ...]

    @property
    def objects(self) -> list[dict[str, Any]]:
        """All objects as plain data, in the order of their creation."""
        return [to_plain(each) for each in (*self.prerequisites, self.owner, *self.owned)]

    @property
    def text(self) -> str:
        """All objects as commented YAML."""
        owner = to_plain(self.owner)
        head = (
            f"{PLACEHOLDER_ID} is a placeholder for the last six characters of the run's id.",
            f"The {owner['kind']} owns the objects after it: deleting it deletes the run.",
        )
        return to_yaml((*self.prerequisites, self.owner, *self.owned), head=head)


def render(ctx: RenderContext) -> RunManifests:
    """Render the objects of a run; sends nothing."""
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
        owned = (*run_objects.job_secrets(ctx), run_objects.job_config_map(ctx), run_objects.network_policy(ctx))
    owned = (*run_objects.fabric_claim(ctx), *owned)
    before = [*run_objects.volume_claim(ctx), *([run_objects.quarantine(ctx)] if ctx.target.agent else [])]
    if ctx.workload is Workload.TRAINJOB:
        before.append(training_runtime(ctx))
    return RunManifests(prerequisites=tuple(before), owner=OWNER_RENDERERS[ctx.workload](ctx), owned=owned)
