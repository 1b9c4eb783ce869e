"""Renders a run's PodDisruptionBudget: how many of its nodes a drain may evict at a time.

Evictions of a single replica are not limited by default: any of them stops all ranks, which save first, so that each
further one at the same time costs nothing, and each later one costs another restart.
"""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.job.targets import Evictions
from holdfast.launch.kubernetes.manifests.render_context import RenderContext
from holdfast.launch.kubernetes.manifests.yaml_writer import Commented, YamlValue
from holdfast.launch.kubernetes.object_names import NODE


def disruption_budget(ctx: RenderContext) -> list[Mapping[str, YamlValue]]:
    """The budget of the run's nodes, if its target limits evictions."""
    nodes, replicas = ctx.job.nodes.max, ctx.job.recovery.replicas
    evictable, why = {
        Evictions.ANY: (nodes, ""),
        Evictions.REPLICA: (nodes // replicas, "A drain evicts one replica at a time; the others commit steps."),
        Evictions.NONE: (0, "A drain waits until the run ends."),
    }[ctx.target.evictions]
    if evictable == nodes:
        return []
    return [
        ctx.manifest(
            "policy/v1",
            "PodDisruptionBudget",
            ctx.names.name,
            spec={
                # A percentage, or maxUnavailable, would need a scale subresource, which Jobs do not have.
                "minAvailable": Commented(nodes - evictable, why),
                "selector": ctx.names.selector(NODE),
                "unhealthyPodEvictionPolicy": Commented("AlwaysAllow", "A node that does not run blocks no drain."),
            },
        )
    ]
