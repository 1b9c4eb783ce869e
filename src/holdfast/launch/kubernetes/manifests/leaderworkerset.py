"""Renders a run as a LeaderWorkerSet of one group: node 0 is its leader, and the other nodes are its workers."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.job.targets import Workload
from holdfast.launch.kubernetes.manifests.agent_container import agent_container
from holdfast.launch.kubernetes.manifests.jobset import NODE_INDEX, owner
from holdfast.launch.kubernetes.manifests.pod_template import pod_template
from holdfast.launch.kubernetes.manifests.render_context import RenderContext
from holdfast.launch.kubernetes.manifests.yaml_writer import Commented, YamlValue
from holdfast.launch.kubernetes.object_names import NODE
from holdfast.launch.kubernetes.workload_catalog import CATALOG


def leaderworkerset(ctx: RenderContext) -> Mapping[str, YamlValue]:
    """The LeaderWorkerSet of a run; a tree leaves out the scale, or applying it again would start a finished run."""
    label = CATALOG[Workload.LEADERWORKERSET].node_labels.label
    index: YamlValue = {"fieldRef": {"fieldPath": f"metadata.labels['{label}']"}}
    scale = Commented(
        1, "One group. The controller scales it to 0 when the run is over, as its pods restart whenever they exit."
    )
    return owner(
        ctx,
        {
            "replicas": None if ctx.accepted.from_tree else scale,
            "leaderWorkerTemplate": {
                "size": Commented(ctx.job.nodes.max, "All nodes: Kueue admits each group by itself."),
                "restartPolicy": Commented(
                    "None", "A lost worker is replaced alone; the workers are deleted with a lost leader anyway."
                ),
                "workerTemplate": pod_template(ctx, agent_container(ctx, NODE, index=NODE_INDEX, index_from=index)),
            },
        },
    )
