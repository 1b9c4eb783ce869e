"""Owns a run as a PyTorchJob of training-operator's, which tells each pod its place (MASTER_*, RANK, PET_*)."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.launch.kubernetes.incluster.exec_commands import RETENTION_S
from holdfast.launch.kubernetes.manifests.agent_container import agent_container
from holdfast.launch.kubernetes.manifests.command_container import command_container
from holdfast.launch.kubernetes.manifests.jobset import owner_metadata, suspended
from holdfast.launch.kubernetes.manifests.pod_template import pod_template
from holdfast.launch.kubernetes.manifests.render_context import RenderContext
from holdfast.launch.kubernetes.manifests.yaml_writer import Commented, YamlValue

CONTAINER = "pytorch"
"""The operator knows its container by this name."""


def pytorchjob(ctx: RenderContext) -> Mapping[str, YamlValue]:
    """The PyTorchJob of a run."""
    job, workers = ctx.job, ctx.job.nodes.max - 1
    replicas: dict[str, YamlValue] = {"Master": _replica(ctx, 1)}
    if workers:
        replicas["Worker"] = _replica(ctx, workers)
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": owner_metadata(ctx),
        "spec": {
            "nprocPerNode": Commented(str(job.local_world_size), "Text, because it may also be `gpu`."),
            "runPolicy": {
                "suspend": suspended(ctx),
                "cleanPodPolicy": Commented("Running", "A run that is over leaves no pod that goes on."),
                "ttlSecondsAfterFinished": Commented(
                    RETENTION_S, "A day to look at it; then it goes with all that it owns."
                ),
                "backoffLimit": None
                if ctx.target.agent
                else Commented(job.recovery.max_restarts, "Restarts of single containers, of all nodes together."),
            },
            "pytorchReplicaSpecs": replicas,
        },
    }


def _replica(ctx: RenderContext, count: int) -> YamlValue:
    supervised = ctx.target.agent
    # The operator numbers nodes over both groups, and writes the number into RANK.
    occupant = agent_container(ctx, CONTAINER, index="$(RANK)") if supervised else command_container(ctx, CONTAINER)
    why = (
        "An agent that ends is started again in its pod; how often ranks are is counted by the controller."
        if supervised
        else "Only the container that failed is started again: the others wait for it, or fail in their turn."
    )
    return {
        "replicas": count,
        "restartPolicy": Commented("OnFailure", why),
        "template": pod_template(ctx, occupant),
    }
