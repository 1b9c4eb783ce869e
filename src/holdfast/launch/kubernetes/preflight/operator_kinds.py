"""The kinds of objects that a run needs and that operators bring. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from holdfast.job.targets import GangScheduler
from holdfast.launch.kubernetes.client.api_paths import KUEUE, KUEUE_VERSION
from holdfast.launch.kubernetes.manifests import controller_objects, pod_group
from holdfast.launch.kubernetes.manifests.render_context import RenderContext
from holdfast.launch.kubernetes.workload_catalog import CATALOG


class OperatorKind(NamedTuple):
    """A kind of object that an operator brings."""

    group: str
    version: str
    resource: str
    field: str
    """The field of the target because of which a run needs it."""
    remedy: str = "Install its operator"
    """What else than changing that field helps."""


_GANG_REMEDIES = {
    GangScheduler.KUBERNETES: "Have Kubernetes 1.37 or later serve it with the feature gate GenericWorkload",
    GangScheduler.VOLCANO: "Install Volcano",
}
POD_GROUPS: Mapping[GangScheduler, OperatorKind] = {
    scheduler: OperatorKind(*pod_group.GROUPS[scheduler], "podgroups", "pod_group", remedy)
    for scheduler, remedy in _GANG_REMEDIES.items()
}
HYPERNODES = OperatorKind("topology.volcano.sh", "v1alpha1", "hypernodes", "placement", "Install Volcano 1.14 or later")
PODMONITORS = OperatorKind("monitoring.coreos.com", "v1", "podmonitors", "pod_monitor")
TLS_ROUTES = OperatorKind(
    controller_objects.GATEWAY_GROUP,
    controller_objects.GATEWAY_VERSION,
    "tlsroutes",
    "controller.gateway",
    "Install Gateway API 1.5 or later, and a controller for it",
)


def operator_kinds(ctx: RenderContext) -> list[OperatorKind]:
    """The kinds that a run needs besides Kubernetes' own."""
    kind = CATALOG[ctx.workload]
    gateway = ctx.target.controller.gateway if ctx.target.agent else None
    return [
        OperatorKind(kind.group, kind.version, kind.resource, "workload"),
        *([OperatorKind(KUEUE, KUEUE_VERSION, "localqueues", "queue")] if ctx.queue else ()),
        *([POD_GROUPS[ctx.target.pod_group]] if ctx.target.pod_group else ()),
        *([HYPERNODES] if ctx.placed_by_volcano else ()),
        *([PODMONITORS] if ctx.target.pod_monitor else ()),
        *([TLS_ROUTES] if gateway else ()),
    ]
