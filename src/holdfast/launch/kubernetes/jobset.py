"""Owns a run as a JobSet: with an agent one Job for each node, without one Job for all of them."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.launch.kubernetes.agent import agent
from holdfast.launch.kubernetes.command import command, place_in_jobset
from holdfast.launch.kubernetes.desk import KEPT_S
from holdfast.launch.kubernetes.manifest import Because, Node
from holdfast.launch.kubernetes.names import NODE, QUEUE_LABEL
from holdfast.launch.kubernetes.pod import Occupant, template
from holdfast.launch.kubernetes.submission import Submission

NODE_INDEX = "$(HOLDFAST_NODE_INDEX)"

COUNTED_ELSEWHERE = "recovery.max_restarts is counted by the controller; two counts would fight."
NO_RESTARTS: Node = {
    "maxRestarts": Because(0, "A JobSet restarts all of its nodes; holdfast restarts ranks, and counts them.")
}
NEVER_TOO_OFTEN = 2**31 - 1
AT_ONCE = Because(
    "TerminatingOrFailed",
    "The pod of a dead machine never finishes terminating, and is replaced all the same. A pod failure policy would "
    "forbid this.",
)
MEETING: Node = {
    "enableDNSHostnames": True,
    "publishNotReadyAddresses": Because(True, "Ranks meet before their pods count as ready."),
}


def jobset(asked: Submission) -> Mapping[str, Node]:
    """The JobSet of a run."""
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": owner_metadata(asked),
        "spec": {
            "suspend": suspended(asked),
            "network": MEETING,
            "ttlSecondsAfterFinished": Because(KEPT_S, "A day to look at it; then it goes with all that it owns."),
            **(_supervised(asked) if asked.profile.agent else _alone(asked)),
        },
    }


def owner_metadata(asked: Submission) -> Node:
    """Name and labels of the object that stands for the run: what owns the others, and what a queue admits."""
    labels = asked.names.labels()
    if asked.queue:
        labels |= {QUEUE_LABEL: asked.queue}
    return {"name": asked.names.name, "namespace": asked.profile.namespace, "labels": labels}


def suspended(asked: Submission) -> Node:
    """A run in a queue waits until there is room for the whole of it."""
    return Because(True, "Kueue starts it, once the whole gang has room.") if asked.queue else None


def _supervised(asked: Submission) -> Mapping[str, Node]:
    """A Job for each node, none of which gives up; what is restarted, and how often, is the controller's to say."""
    index: Node = {"fieldRef": {"fieldPath": "metadata.labels['jobset.sigs.k8s.io/job-index']"}}
    occupant = agent(asked, NODE, index=NODE_INDEX, index_from=index)
    job = {
        "parallelism": 1,
        "completions": 1,
        "completionMode": "Indexed",
        "backoffLimit": Because(NEVER_TOO_OFTEN, COUNTED_ELSEWHERE),
        "podReplacementPolicy": AT_ONCE,
        "template": template(asked, occupant, restart="Never"),
    }
    nodes = Because(
        asked.job.nodes.max,
        "One Job for each node: pods of one Job would share the pause before a failed one is replaced, which doubles "
        "with every failure.",
    )
    return {
        "failurePolicy": NO_RESTARTS,
        "replicatedJobs": [{"name": NODE, "replicas": nodes, "template": {"spec": job}}],
    }


def _alone(asked: Submission) -> Mapping[str, Node]:
    """One Job of all nodes, which JobSet makes anew as a whole when a pod fails."""
    occupant = command(asked, NODE, place=place_in_jobset(asked, pet=True))
    return {
        "failurePolicy": restarts(asked),
        "replicatedJobs": [{"name": NODE, "replicas": 1, "template": {"spec": all_or_none(asked, occupant)}}],
    }


def restarts(asked: Submission) -> Node:
    """How a JobSet without a controller of ours restarts: as a whole, as often as the job says."""
    return {
        "maxRestarts": asked.job.recovery.max_restarts,
        "restartStrategy": Because("BlockingRecreate", "No rank of a new attempt may meet one of the last."),
        "rules": [
            Because(
                {
                    "name": "disrupted",
                    "action": "RestartJobSetAndIgnoreMaxRestarts",
                    "onJobFailureReasons": ["PodFailurePolicy"],
                },
                "A drain or a preemption is not the job's fault, and does not count.",
            )
        ],
    }


def all_or_none(asked: Submission, occupant: Occupant) -> Mapping[str, Node]:
    """A Job of all nodes that fails as soon as one of them does."""
    disrupted: Node = {"type": "DisruptionTarget", "status": "True"}
    return {
        "parallelism": asked.job.nodes.max,
        "completions": asked.job.nodes.max,
        "completionMode": "Indexed",
        "backoffLimit": Because(0, "A pod that is replaced alone meets ranks that wait for its former self."),
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onPodConditions": [disrupted]}]},
        "template": template(asked, occupant, restart="Never"),
    }
