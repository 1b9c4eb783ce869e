"""Renders a run as a PyTorchJob of training-operator, which sets MASTER_*, RANK and PET_* in each pod."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.job.targets import Workload
from holdfast.launch.kubernetes.manifests.agent_container import agent_container
from holdfast.launch.kubernetes.manifests.command_container import command_container
from holdfast.launch.kubernetes.manifests.jobset import owner, suspended, time_to_live
from holdfast.launch.kubernetes.manifests.pod_template import pod_template
from holdfast.launch.kubernetes.manifests.render_context import RenderContext
from holdfast.launch.kubernetes.manifests.yaml_writer import Commented, YamlValue
from holdfast.launch.kubernetes.object_names import NODE
from holdfast.launch.kubernetes.workload_catalog import CATALOG

CONTAINER = CATALOG[Workload.PYTORCHJOB].container
"""The operator requires this container name."""


def pytorchjob(ctx: RenderContext) -> Mapping[str, YamlValue]:
    """The PyTorchJob of a run."""
    job, workers = ctx.job, ctx.job.nodes.max - 1
    replicas: dict[str, YamlValue] = {"Master": _replica(ctx, 1)}
    if workers:
        replicas["Worker"] = _replica(ctx, workers)
    return owner(
        ctx,
        {
            "nprocPerNode": Commented(str(job.local_world_size), "A string, because `gpu` is valid too."),
            "runPolicy": {
                "suspend": suspended(ctx),
                "cleanPodPolicy": Commented("Running", "Deletes pods that still run when the run is over."),
                "ttlSecondsAfterFinished": time_to_live(ctx),
                "backoffLimit": None
                if ctx.target.agent
                else Commented(job.recovery.max_restarts, "Container restarts, summed over all nodes."),
            },
            "pytorchReplicaSpecs": replicas,
        },
    )


def _replica(ctx: RenderContext, count: int) -> YamlValue:
    supervised = ctx.target.agent
    # The operator numbers nodes across both groups, and sets RANK to the number.
    occupant = agent_container(ctx, CONTAINER, index="$(RANK)") if supervised else command_container(ctx, CONTAINER)
    why = (
        "The kubelet restarts an agent that exits; the controller counts restarts of ranks."
        if supervised
        else "Only the failed container restarts: the others wait for it, or fail too."
    )
    return {
        "replicas": count,
        "restartPolicy": Commented("OnFailure", why),
        "template": pod_template(ctx, occupant, placement_group=NODE if ctx.job.nodes.max > 1 else None),
    }
