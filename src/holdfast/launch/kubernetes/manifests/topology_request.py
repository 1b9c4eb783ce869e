"""Renders a job's placement as the request for Kueue's topology-aware scheduling."""

from __future__ import annotations

from holdfast.job.spec import PlacementMode
from holdfast.launch.kubernetes.manifests.render_context import RenderContext
from holdfast.launch.kubernetes.manifests.yaml_writer import Commented, YamlValue

_PREFIX = "kueue.x-k8s.io/podset"
GROUP = f"{_PREFIX}-group-name"

_REASONS = {
    PlacementMode.REQUIRED: "Kueue waits until one domain of this level has room for all nodes.",
    PlacementMode.PREFERRED: "Kueue takes as few domains of this level as possible.",
}


def topology_request(ctx: RenderContext, *, group: str | None = None) -> dict[str, YamlValue]:
    """The annotations of a node's pod; pod sets with the same `group` are placed together."""
    placement = ctx.job.placement
    if placement is None or ctx.queue is None:
        return {}
    annotations: dict[str, YamlValue] = {
        f"{_PREFIX}-{placement.mode}-topology": Commented(
            ctx.topology_label(placement.level), _REASONS[placement.mode]
        ),
        GROUP: group,
    }
    if slices := placement.slices:
        annotations |= {
            f"{_PREFIX}-slice-required-topology": Commented(
                ctx.topology_label(slices.level), f"Each {slices.nodes} neighbours are in one domain of this level."
            ),
            f"{_PREFIX}-slice-size": str(slices.nodes),
        }
    return annotations
