"""Renders all objects of a run, in the order of their creation, and as commented YAML."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

from holdfast.job.targets import Workload
from holdfast.launch.kubernetes.manifests import controller_objects, run_objects, tree_objects
from holdfast.launch.kubernetes.manifests.disruption_budget import disruption_budget
from holdfast.launch.kubernetes.manifests.jobset import jobset
from holdfast.launch.kubernetes.manifests.leaderworkerset import leaderworkerset
from holdfast.launch.kubernetes.manifests.mpijob import mpijob
from holdfast.launch.kubernetes.manifests.network_policies import network_policies
from holdfast.launch.kubernetes.manifests.pod_group import pod_group
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
    Workload.LEADERWORKERSET: leaderworkerset,
}
"""The function that renders the owner object of each kind."""


class RunManifests(Struct, frozen=True, kw_only=True):
    """The objects of one run."""

    prerequisites: tuple[Mapping[str, YamlValue], ...]
    """Objects that must exist before the owner."""
    owner: Mapping[str, YamlValue]
    """The run's owner object: deleting it deletes the others."""
    owned: tuple[Mapping[str, YamlValue], ...]
    head: tuple[str, ...]
    """Comments on all of them."""

    @property
    def objects(self) -> list[dict[str, Any]]:
        """All objects as plain data, in the order of their creation."""
        return [to_plain(each) for each in (*self.prerequisites, self.owner, *self.owned)]

    @property
    def text(self) -> str:
        """All objects as commented YAML."""
        return to_yaml((*self.prerequisites, self.owner, *self.owned), head=self.head)


def render(ctx: RenderContext) -> RunManifests:
    """Render the objects that the start of a run creates; sends nothing."""
    if ctx.target.agent:
        owned = (
            *run_objects.key_secrets(ctx),
            run_objects.job_config_map(ctx),
            *run_objects.rbac(ctx),
            *network_policies(ctx),
            *controller_objects.first_pod_marker(ctx),
            controller_objects.service(ctx),
            controller_objects.replicaset(ctx),
            *controller_objects.pod_monitor(ctx),
            *controller_objects.tls_route(ctx),
        )
    else:
        owned = (*run_objects.job_secrets(ctx), run_objects.job_config_map(ctx), *network_policies(ctx))
    owned = (*run_objects.fabric_claim(ctx), *owned, *disruption_budget(ctx), *pod_group(ctx))
    controlled_here = ctx.target.agent and not ctx.target.multikueue
    before = [*run_objects.volume_claim(ctx), *([run_objects.quarantine(ctx)] if controlled_here else [])]
    if ctx.workload is Workload.TRAINJOB:
        before.append(training_runtime(ctx))
    owner = OWNER_RENDERERS[ctx.workload](ctx)
    head = (
        f"{PLACEHOLDER_ID} is a placeholder for the last six characters of the run's id.",
        f"The {owner['kind']} owns the objects after it: deleting it deletes the run.",
    )
    return RunManifests(prerequisites=tuple(before), owner=owner, owned=owned, head=head)


def render_tree(ctx: RenderContext, compressed_code: bytes) -> RunManifests:
    """Render the objects of a run that others apply, the run's object last; sends nothing.

    What outlives the run, a claim and the quarantine, is not among them: who deletes the tree would delete it.
    """
    objects = [
        run_objects.job_config_map(ctx),
        *network_policies(ctx),
        *run_objects.fabric_claim(ctx),
        *disruption_budget(ctx),
        *pod_group(ctx),
    ]
    if ctx.target.agent:
        objects += [
            *tree_objects.code_config_map(ctx, compressed_code),
            tree_objects.empty_secret(ctx),
            *run_objects.rbac(ctx),
            *tree_objects.key_role(ctx),
            *controller_objects.first_pod_marker(ctx),
            controller_objects.service(ctx),
            controller_objects.replicaset(ctx),
            *controller_objects.pod_monitor(ctx),
            *controller_objects.tls_route(ctx),
        ]
    if ctx.workload is Workload.TRAINJOB:
        objects.append(training_runtime(ctx))
    head = (
        f"The run {ctx.names.name}: `kubectl apply --server-side` starts it, `kubectl delete` removes all of it.",
        "A changed job is another run: render it with another id.",
    )
    return RunManifests(prerequisites=tuple(objects), owner=OWNER_RENDERERS[ctx.workload](ctx), owned=(), head=head)
