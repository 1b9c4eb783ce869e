"""Owns what a run without agents looks like from outside: from its object and its pods to events of its log.

Pure. What starts such a run again, and how often, is its operator's to say; here it is only told.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.events import (
    AnyEvent,
    AttemptStarted,
    ExitReason,
    NodeRequested,
    Outcome,
    RankExited,
    RanksStarted,
    RankState,
)
from holdfast.job.run_spec import RunSpec
from holdfast.job.spec import Launch
from holdfast.job.targets import Workload
from holdfast.launch.kubernetes.incluster.kubernetes_backend import NODE_LABELS, NodeLabels
from holdfast.launch.kubernetes.manifests.mpijob import LAUNCHER
from holdfast.launch.kubernetes.object_names import NODE

KubeObject = Mapping[str, Any]
_INDEX = NodeLabels(label="batch.kubernetes.io/job-completion-index")
COMMAND_NODE_LABELS: Mapping[Workload, NodeLabels] = {**NODE_LABELS, Workload.JOBSET: _INDEX, Workload.TRAINJOB: _INDEX}
"""How pods that run a command of the user's say which node they are: without agents one Job has them all."""
RESTART_LABEL = "jobset.sigs.k8s.io/restart-attempt"
"""The label that says how often a JobSet was made anew before this pod."""
SUCCESS_CONDITIONS = {"Complete": Outcome.SUCCEEDED, "Completed": Outcome.SUCCEEDED, "Succeeded": Outcome.SUCCEEDED}
"""What the kinds of object call their good end; all call the other one `FailedAttempt`."""


@dataclass(frozen=True, kw_only=True)
class PodCommand:
    """The job's command in one pod, in one life of its container."""

    pod: str
    node: int
    attempt: int
    started: bool
    exit_code: int | None = None
    """What it exited with."""


def command_part(workload: Workload) -> str:
    """Which pods run the command: of an MPIJob one speaks for all."""
    return LAUNCHER if workload is Workload.MPIJOB else NODE


def pod_commands(pods: Sequence[KubeObject], workload: Workload) -> Iterator[PodCommand]:
    """What the pods of that part run, as the API server gives them."""
    for pod in pods:
        labels: Mapping[str, str] = pod["metadata"].get("labels", {})
        node = 0 if workload is Workload.MPIJOB else COMMAND_NODE_LABELS[workload].node(labels)
        remade = labels.get(RESTART_LABEL, "0")
        if node is None or not (remade.isascii() and remade.isdecimal()):
            continue  # somebody else's pod, that has labels of ours
        for container in pod.get("status", {}).get("containerStatuses", ())[:1]:
            state = container.get("state", {})
            yield PodCommand(
                pod=pod["metadata"]["name"],
                node=node,
                attempt=int(remade) + container.get("restartCount", 0),
                started=not state.get("waiting"),
                exit_code=state["terminated"]["exitCode"] if "terminated" in state else None,
            )


def first_rank(accepted: RunSpec, node: int) -> int:
    """The first rank of a node, in whose file lies what its command writes."""
    job = accepted.job
    return node if job.launch is Launch.PER_RANK else node * job.local_world_size


def initial_events(accepted: RunSpec, run: str) -> Iterator[AnyEvent]:
    """How a run's log begins."""
    yield accepted.created_event(run)
    for node in range(accepted.job.nodes.max):
        yield NodeRequested(at=accepted.created_at, node=node, generation=0)


def new_events(
    seen: Sequence[PodCommand], accepted: RunSpec, known: Sequence[AnyEvent], *, now: float
) -> Iterator[AnyEvent]:
    """What is seen and is not in the log yet: an attempt begins as soon as any of its commands has."""
    attempts = {event.attempt for event in known if isinstance(event, AttemptStarted)}
    ranks = {(event.attempt, event.node) for event in known if isinstance(event, RanksStarted)}
    exits = {(event.attempt, event.node) for event in known if isinstance(event, RankExited)}
    for one in sorted((each for each in seen if each.started), key=lambda each: (each.attempt, each.node)):
        number, here = first_rank(accepted, one.node), (one.attempt, one.node)
        if one.attempt not in attempts:
            attempts.add(one.attempt)
            yield AttemptStarted(
                at=now,
                replica=0,
                attempt=one.attempt,
                world_size=accepted.job.world_size,
                master_addr="",
                master_port=0,
                nodes=tuple(range(accepted.job.nodes.max)),
            )
        if here not in ranks:
            yield RanksStarted(
                at=now, node=one.node, replica=0, attempt=one.attempt, ranks=(RankState(rank=number, pid=0),)
            )
        if one.exit_code is not None and here not in exits:
            yield RankExited(
                at=now,
                node=one.node,
                replica=0,
                attempt=one.attempt,
                rank=number,
                reason=ExitReason.CODE,
                code=one.exit_code,
            )


def run_end(owner: KubeObject) -> tuple[Outcome, str] | None:
    """How the run's object says that it ended, and in which words; None while it goes on."""
    for condition in owner.get("status", {}).get("conditions", ()):
        outcome = Outcome.FAILED if condition["type"] == "Failed" else SUCCESS_CONDITIONS.get(condition["type"])
        if outcome and condition["status"] == "True":
            return outcome, condition.get("message") or condition.get("reason", "")
    return None


def exit_code(known: Sequence[AnyEvent]) -> int:
    """Of a run that failed: that of the command that failed first in its last attempt; 1 where none is known."""
    failed = [event for event in known if isinstance(event, RankExited) and event.code]
    last = max((event.attempt for event in failed), default=0)
    return next((event.code for event in failed if event.attempt == last), 1)
