"""Renders a run's PodGroup, by which a scheduler places all nodes of a run or none: that of Kubernetes, or Volcano."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.job.spec import PlacementMode
from holdfast.job.targets import GangScheduler
from holdfast.launch.kubernetes.manifests.render_context import RenderContext
from holdfast.launch.kubernetes.manifests.yaml_writer import Commented, YamlValue
from holdfast.launch.kubernetes.object_names import VOLCANO_GROUP

GROUPS: Mapping[GangScheduler, tuple[str, str]] = {
    GangScheduler.KUBERNETES: ("scheduling.k8s.io", "v1beta1"),
    GangScheduler.VOLCANO: ("scheduling.volcano.sh", "v1beta1"),
}
"""The API group and version of each scheduler's PodGroups."""


def pod_group(ctx: RenderContext) -> list[Mapping[str, YamlValue]]:
    """The group of the run's nodes, if its target asks for one; a pod waits until its group exists."""
    scheduler = ctx.target.pod_group
    if scheduler is None:
        return []
    least = Commented(ctx.job.nodes.max, "All nodes are placed together, or none.")
    disrupted = "all" if ctx.job.recovery.replicas == 1 else "single"
    spec: Mapping[GangScheduler, Mapping[str, YamlValue]] = {
        GangScheduler.KUBERNETES: {
            "schedulingPolicy": {"gang": {"minCount": least}},
            "disruptionMode": {disrupted: Commented({}, _DISRUPTED[disrupted])},
        },
        GangScheduler.VOLCANO: {
            "minMember": least,
            "queue": ctx.target.volcano_queue,
            "networkTopology": _network_topology(ctx),
        },
    }
    own = {**spec[scheduler], "priorityClassName": ctx.target.priority_class}
    return [ctx.manifest("/".join(GROUPS[scheduler]), "PodGroup", ctx.names.name, spec=own)]


def _network_topology(ctx: RenderContext) -> YamlValue:
    """The job's placement as a request to Volcano, unless Kueue places the nodes."""
    placement = ctx.job.placement
    if placement is None or not ctx.placed_by_volcano:
        return None
    return {
        "mode": _TOPOLOGY_MODES[placement.mode],
        "highestTierName": Commented(
            ctx.topology_label(placement.level), "Volcano names a tier of its HyperNodes after their label."
        ),
    }


_TOPOLOGY_MODES: Mapping[PlacementMode, YamlValue] = {
    PlacementMode.REQUIRED: Commented("hard", "Volcano waits until one HyperNode of this tier has room for all nodes."),
    PlacementMode.PREFERRED: Commented("soft", "Volcano takes HyperNodes of as low a tier as possible."),
}


def scheduling_group(ctx: RenderContext) -> YamlValue:
    """A node's reference to the group of Kubernetes' own scheduler."""
    return {"podGroupName": ctx.names.name} if ctx.target.pod_group is GangScheduler.KUBERNETES else None


def group_annotations(ctx: RenderContext) -> dict[str, YamlValue]:
    """A node's reference to the group of Volcano."""
    is_volcano = ctx.target.pod_group is GangScheduler.VOLCANO
    return {VOLCANO_GROUP: ctx.names.name} if is_volcano else {}


def scheduler_name(ctx: RenderContext) -> str | None:
    """The scheduler of a node, if it is not the default one."""
    by_group = "volcano" if ctx.target.pod_group is GangScheduler.VOLCANO else None
    return ctx.target.pod.scheduler or by_group


_DISRUPTED: Mapping[str, str] = {
    "all": "Preemption takes all nodes or none: the rest of a gang would wait.",
    "single": "Preemption may take the nodes of one replica: the others commit steps.",
}
