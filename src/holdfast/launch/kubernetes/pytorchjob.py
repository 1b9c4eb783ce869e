"""Owns a run as a PyTorchJob of training-operator's, which tells each pod its place (MASTER_*, RANK, PET_*)."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.launch.kubernetes.agent import agent
from holdfast.launch.kubernetes.command import command
from holdfast.launch.kubernetes.desk import KEPT_S
from holdfast.launch.kubernetes.jobset import owner_metadata, suspended
from holdfast.launch.kubernetes.manifest import Because, Node
from holdfast.launch.kubernetes.pod import template
from holdfast.launch.kubernetes.submission import Submission

CONTAINER = "pytorch"
"""The operator knows its container by this name."""


def pytorchjob(asked: Submission) -> Mapping[str, Node]:
    """The PyTorchJob of a run."""
    job, workers = asked.job, asked.job.nodes.max - 1
    replicas: dict[str, Node] = {"Master": _replica(asked, 1)}
    if workers:
        replicas["Worker"] = _replica(asked, workers)
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": owner_metadata(asked),
        "spec": {
            "nprocPerNode": Because(str(job.local_world_size), "Text, because it may also be `gpu`."),
            "runPolicy": {
                "suspend": suspended(asked),
                "cleanPodPolicy": Because("Running", "A run that is over leaves no pod that goes on."),
                "ttlSecondsAfterFinished": Because(KEPT_S, "A day to look at it; then it goes with all that it owns."),
                "backoffLimit": None
                if asked.profile.agent
                else Because(job.recovery.max_restarts, "Restarts of single containers, of all nodes together."),
            },
            "pytorchReplicaSpecs": replicas,
        },
    }


def _replica(asked: Submission, count: int) -> Node:
    supervised = asked.profile.agent
    # The operator numbers nodes over both groups, and writes the number into RANK.
    occupant = agent(asked, CONTAINER, index="$(RANK)") if supervised else command(asked, CONTAINER)
    why = (
        "An agent that ends is started again in its pod; how often ranks are is counted by the controller."
        if supervised
        else "Only the container that failed is started again: the others wait for it, or fail in their turn."
    )
    return {
        "replicas": count,
        "restartPolicy": Because("OnFailure", why),
        "template": template(asked, occupant),
    }
