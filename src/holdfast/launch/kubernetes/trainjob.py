"""Owns a run as a TrainJob of Kubeflow Trainer's, with a runtime of its own that holds all but its size."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.launch.kubernetes.agent import agent
from holdfast.launch.kubernetes.command import command, place_in_jobset
from holdfast.launch.kubernetes.jobset import (
    AT_ONCE,
    COUNTED_ELSEWHERE,
    MEETING,
    NEVER_TOO_OFTEN,
    NO_RESTARTS,
    NODE_INDEX,
    all_or_none,
    owner_metadata,
    restarts,
    suspended,
)
from holdfast.launch.kubernetes.manifest import Because, Node
from holdfast.launch.kubernetes.names import NODE
from holdfast.launch.kubernetes.pod import template
from holdfast.launch.kubernetes.submission import Submission

API = "trainer.kubeflow.org/v1alpha1"


def runtime(asked: Submission) -> Mapping[str, Node]:
    """What the TrainJob's JobSet is made from; it must be there before the TrainJob."""
    names, nodes = asked.names, asked.job.nodes.max
    supervised = asked.profile.agent
    policy, job = (NO_RESTARTS, _supervised(asked)) if supervised else (restarts(asked), _alone(asked))
    return {
        "apiVersion": API,
        "kind": "TrainingRuntime",
        "metadata": {"name": names.name, "namespace": asked.profile.namespace, "labels": names.labels()},
        "spec": {
            "mlPolicy": {
                "numNodes": nodes,
                "torch": None if supervised else Because({}, "Has Trainer tell torchrun its node's place (PET_*)."),
            },
            "template": {
                "spec": Because(
                    {
                        "network": MEETING,
                        "failurePolicy": policy,
                        "replicatedJobs": [
                            {
                                "name": Because(NODE, "Trainer knows its nodes by this name and this label."),
                                "template": {
                                    "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
                                    "spec": job,
                                },
                            }
                        ],
                    },
                    "No time to live: Trainer would make a JobSet that has gone once more.",
                )
            },
        },
    }


def trainjob(asked: Submission) -> Mapping[str, Node]:
    """The TrainJob of a run."""
    names, job = asked.names, asked.job
    trainer: Node = {"numNodes": job.nodes.max, "numProcPerNode": job.local_world_size}
    return {
        "apiVersion": API,
        "kind": "TrainJob",
        "metadata": owner_metadata(asked),
        "spec": {
            "suspend": suspended(asked),
            "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": names.name},
            "trainer": None if asked.profile.agent else trainer,
        },
    }


def _supervised(asked: Submission) -> Mapping[str, Node]:
    index: Node = {"fieldRef": {"fieldPath": "metadata.labels['batch.kubernetes.io/job-completion-index']"}}
    return {
        "completionMode": "Indexed",
        "backoffLimitPerIndex": Because(NEVER_TOO_OFTEN, COUNTED_ELSEWHERE),
        "podReplacementPolicy": AT_ONCE,
        "template": template(asked, agent(asked, NODE, index=NODE_INDEX, index_from=index), restart="Never"),
    }


def _alone(asked: Submission) -> Mapping[str, Node]:
    return all_or_none(asked, command(asked, NODE, place=place_in_jobset(asked, pet=False)))
