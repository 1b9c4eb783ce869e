"""Renders a run's PodGroup, by which the scheduler of Kubernetes places all nodes of a run or none."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.launch.kubernetes.manifests.render_context import RenderContext
from holdfast.launch.kubernetes.manifests.yaml_writer import Commented, YamlValue

GROUP, VERSION = "scheduling.k8s.io", "v1beta1"


def pod_group(ctx: RenderContext) -> list[Mapping[str, YamlValue]]:
    """The group of the run's nodes, if its target asks for one; a pod waits until its group exists."""
    if not ctx.target.pod_group:
        return []
    disrupted = "all" if ctx.job.recovery.replicas == 1 else "single"
    return [
        ctx.manifest(
            f"{GROUP}/{VERSION}",
            "PodGroup",
            ctx.names.name,
            spec={
                "schedulingPolicy": {
                    "gang": {"minCount": Commented(ctx.job.nodes.max, "All nodes are placed together, or none.")}
                },
                "disruptionMode": {disrupted: Commented({}, _DISRUPTED[disrupted])},
                "priorityClassName": ctx.target.priority_class,
            },
        )
    ]


def scheduling_group(ctx: RenderContext) -> YamlValue:
    """A node's reference to the group."""
    return {"podGroupName": ctx.names.name} if ctx.target.pod_group else None


_DISRUPTED: Mapping[str, str] = {
    "all": "Preemption takes all nodes or none: the rest of a gang would wait.",
    "single": "Preemption may take the nodes of one replica: the others commit steps.",
}
