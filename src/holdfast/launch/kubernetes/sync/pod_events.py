"""Derives the events of a run without agents from its object and its pods.

Pure. The operator decides whether such a run restarts; this module only records restarts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct

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
from holdfast.launch.kubernetes.client.api_paths import KubeObject
from holdfast.launch.kubernetes.manifests.mpijob import LAUNCHER
from holdfast.launch.kubernetes.object_names import CANCELLED_REASON, NODE
from holdfast.launch.kubernetes.workload_catalog import CATALOG

RESTART_LABEL = "jobset.sigs.k8s.io/restart-attempt"
"""The label with the number of the JobSet's restarts before this pod."""
END_CONDITIONS = {
    "Failed": Outcome.FAILED,
    "Complete": Outcome.SUCCEEDED,
    "Completed": Outcome.SUCCEEDED,
    "Succeeded": Outcome.SUCCEEDED,
}
"""Condition types of a run that is over; for failure all kinds use `Failed`."""
COMMAND_CONTAINERS = frozenset({LAUNCHER} | {kind.container for kind in CATALOG.values()})
"""Names of containers that run the command; the kubelet lists a pod's containers by name, sidecars included."""


class PodCommand(Struct, frozen=True, kw_only=True):
    """The job's command in one run of a pod's container."""

    pod: str
    node: int
    attempt: int
    container: str
    started: bool
    exit_code: int | None = None
    """Exit code of the container; None while it runs."""


def command_part(workload: Workload) -> str:
    """The part label of pods that run the command; for an MPIJob the launcher."""
    return LAUNCHER if workload is Workload.MPIJOB else NODE


def pod_commands(pods: Sequence[KubeObject], workload: Workload) -> Iterator[PodCommand]:
    """The commands of these pods."""
    numbering = CATALOG[workload].command_labels or CATALOG[workload].node_labels
    for pod in pods:
        labels: Mapping[str, str] = pod["metadata"].get("labels", {})
        node = 0 if workload is Workload.MPIJOB else numbering.node(labels)
        remade = labels.get(RESTART_LABEL, "0")
        if node is None or not (remade.isascii() and remade.isdecimal()):
            continue  # a foreign pod with the run's labels
        for container in pod.get("status", {}).get("containerStatuses", ()):
            if container.get("name", "") not in COMMAND_CONTAINERS:
                continue  # a sidecar
            state = container.get("state", {})
            yield PodCommand(
                pod=pod["metadata"]["name"],
                node=node,
                container=container["name"],
                attempt=int(remade) + container.get("restartCount", 0),
                started=not state.get("waiting"),
                exit_code=state["terminated"]["exitCode"] if "terminated" in state else None,
            )


def first_rank(accepted: RunSpec, node: int) -> int:
    """The first rank of a node; its log file has the command's output."""
    job = accepted.job
    return node if job.launch is Launch.PER_RANK else node * job.local_world_size


def initial_events(accepted: RunSpec, run: str) -> Iterator[AnyEvent]:
    """The first events of a run's log."""
    yield accepted.created_event(run)
    for node in range(accepted.job.nodes.max):
        yield NodeRequested(at=accepted.created_at, node=node, generation=0)


def new_events(
    seen: Sequence[PodCommand], accepted: RunSpec, known: Sequence[AnyEvent], *, now: float
) -> Iterator[AnyEvent]:
    """Events that are not in the log yet; an attempt starts with the first of its commands."""
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
    """Outcome and message from the run's object; None while the run is active."""
    ended = end_condition(owner)
    if ended is None:
        return None
    reason = ended.get("reason", "")
    outcome = Outcome.CANCELLED if reason == CANCELLED_REASON else END_CONDITIONS[ended["type"]]
    return outcome, ended.get("message") or reason


def end_condition(owner: KubeObject) -> Mapping[str, str] | None:
    """The condition that ends the run; None while the run is active."""
    conditions = owner.get("status", {}).get("conditions", ())
    return next((each for each in conditions if each["type"] in END_CONDITIONS and each["status"] == "True"), None)


def exit_code(known: Sequence[AnyEvent]) -> int:
    """Exit code of a failed run: that of the first failed command in its last attempt; 1 if unknown."""
    failed = [event for event in known if isinstance(event, RankExited) and event.code]
    last = max((event.attempt for event in failed), default=0)
    return next((event.code for event in failed if event.attempt == last), 1)
