"""Reads from a run's own event log how it failed, as facts that complement the ranks' own logs.

The controller records which rank's process ended first and how; the ranks' logs show why. control/root_cause.py finds
the first rank, and events/log.py reads the log.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct, field
from msgspec.structs import replace

from holdfast.diagnose.fact import Fact, ProcessRef
from holdfast.diagnose.failure_classes import Confidence
from holdfast.diagnose.log_chunk import LogChunk, LogSource
from holdfast.diagnose.rules import RULES
from holdfast.diagnose.rules.rule import Role, Rule
from holdfast.diagnose.rules.run_events import FOR_FINDING
from holdfast.diagnose.structured.flight_recorder import FlightDump
from holdfast.diagnose.structured.flight_summary import from_summary
from holdfast.events import (
    AnyEvent,
    AttemptStarted,
    FaultInjected,
    FindingRaised,
    RankExited,
    RankHung,
    RecoveryDecided,
    ShutdownDecided,
    StacksCompared,
)
from holdfast.findings import Finding, replica_suffix
from holdfast.job.fault_attribution import (
    InjectedFaults,
    format_fault,
    injected_cause,
    node_of,
    remedy_for,
    unattributed_after,
)

_SELF_INFLICTED = re.compile(r"ended by SIG(?:ABRT|SEGV|BUS|FPE|ILL|TRAP|SYS)\b")
"""Signals that a process raises itself: no other process sent them."""


class FailedAttempt(Struct, frozen=True, kw_only=True):
    """The last failed attempt, as the run's event log describes it."""

    replica: int
    attempt: int
    world_size: int
    """Ranks of that attempt."""
    rank: int | None
    log_rank: int | None = None
    """The rank whose file has the output of `rank`, where they differ: its launcher's first rank."""
    event: AnyEvent
    """Set where the log says it."""
    fact: Fact
    drill: FaultInjected | None = None
    """The drill that caused it, if any."""
    exited_early: tuple[Fact, ...] = ()
    """Ranks that had ended with exit code 0 while others were running."""
    stacks: tuple[str, ...] = ()
    """Files with the stacks of its running ranks."""
    flight_dumps: tuple[str, ...] = ()
    """Files with the dumps of their flight recorders."""
    summaries: tuple[FlightDump, ...] = ()
    """What their agents reported of those dumps."""
    compared: StacksCompared | None = None
    """What the stacks of its ranks showed together."""
    nodes: Mapping[int, str] = field(default_factory=dict[int, str])
    """The node of each of its ranks that reported."""


def last_failure(events: Sequence[AnyEvent], source: str) -> FailedAttempt | None:
    """The last failure in the log; None for a run in which nothing failed."""
    decided = next((event for event in reversed(events) if isinstance(event, RecoveryDecided)), None)
    if decided is not None:
        at, rank, finding = decided.failed_at, decided.first_failed_rank, decided.finding
        wrote = rank if decided.log_owner_rank is None else decided.log_owner_rank
        drill = _drill(events, decided)
        started = _attempt_started(events, decided.replica, decided.attempt)
        before = decided.replica * started.world_size if started else 0
        fact = _fact(finding, source, at, rank, drill, log_rank=None if wrote is None else before + wrote)
        hangs = [
            event
            for event in events
            if isinstance(event, RankHung)
            and (event.replica, event.attempt) == (decided.replica, decided.attempt)
            and (not event.unless_others_work or event.at >= decided.failed_at)  # no earlier wait
        ]
        return FailedAttempt(
            replica=decided.replica,
            attempt=decided.attempt,
            world_size=started.world_size if started else 0,
            rank=rank,
            log_rank=decided.log_owner_rank,
            event=decided,
            fact=fact,
            drill=drill,
            exited_early=tuple(_early_exits(events, decided, source)),
            stacks=tuple(event.stacks for event in hangs if event.stacks and event.process_state != "T"),
            flight_dumps=tuple(file for event in hangs for file in event.flight_dumps),
            summaries=tuple(from_summary(event.rank, event.collectives) for event in hangs if event.collectives),
            compared=next(
                (
                    event
                    for event in reversed(events)
                    if isinstance(event, StacksCompared)
                    and event.rounds == 1
                    and (event.replica, event.attempt) == (decided.replica, decided.attempt)
                ),
                None,
            ),
            nodes={
                event.rank: f"node{event.node}"
                for event in events
                if isinstance(event, RankHung | RankExited)
                and (event.replica, event.attempt) == (decided.replica, decided.attempt)
            },
        )
    noticed = next((event for event in reversed(events) if _finding(event) is not None), None)
    finding = _finding(noticed) if noticed else None
    if noticed is None or finding is None or _rule(finding).role is not Role.CAUSE:
        return None
    started = _attempt_started(events, 0)
    drill = _drill(events, noticed)
    fact = _fact(finding, source, noticed.at, None, drill)
    attempt, world_size = (started.attempt, started.world_size) if started else (0, 0)
    return FailedAttempt(
        replica=0, attempt=attempt, world_size=world_size, rank=None, event=noticed, fact=fact, drill=drill
    )


def quoted_warnings(exits: Iterable[tuple[int, RankExited]], source: str) -> Iterator[LogChunk]:
    """NCCL's lines that the ends of ranks quote, each with its line in the event log."""
    for line, event in exits:
        who = LogSource(name=source, rank=event.rank, node=f"node{event.node}", replica=event.replica)
        for text in event.evidence.split("; "):
            if " NCCL " in text:
                yield LogChunk(source=who, first_line=line, data=f"{text}\n".encode())


def _attempt_started(events: Sequence[AnyEvent], replica: int, attempt: int | None = None) -> AttemptStarted | None:
    """The start of a replica's attempt; of its last attempt where none is named."""
    starts = (event for event in reversed(events) if isinstance(event, AttemptStarted) and event.replica == replica)
    return next((start for start in starts if attempt in (None, start.attempt)), None)


def _early_exits(events: Sequence[AnyEvent], decided: RecoveryDecided, source: str) -> Iterator[Fact]:
    """The events about ranks of an attempt that exited with code 0 before it failed."""
    for event in events:
        if not isinstance(event, RankExited) or (event.replica, event.attempt) != (decided.replica, decided.attempt):
            continue
        if not (event.failed or event.stopped) and event.at < decided.failed_at:
            yield early_exit_fact(event, source)


def early_exit_fact(event: RankExited, source: str) -> Fact:
    """The fact for a rank that exited with code 0 while others were running."""
    rank = f"rank {event.rank}{replica_suffix(event.replica)} on node{event.node}"
    what = f"{rank} had exited with code 0 while others were running"
    who = ProcessRef(rank=event.rank, node=f"node{event.node}")
    rule, values = RULES["run-rank-left-early"], {"what": what}
    return Fact(rule=rule, source=source, line=0, text=what, process=who, at=event.at, values=values)


def _finding(event: AnyEvent) -> Finding | None:
    """What ended a run, or what it waits for, where no attempt failed."""
    return event.finding if isinstance(event, ShutdownDecided | FindingRaised) else None


def _fact(
    finding: Finding,
    source: str,
    at: float,
    rank: int | None,
    drill: FaultInjected | None,
    *,
    log_rank: int | None = None,
) -> Fact:
    """The fact for a finding about a rank; `log_owner_rank` is the rank whose output `holdfast logs` shows."""
    rule, what = _rule(finding), finding.what
    if finding.code == "program-not-started" and finding.remedy:
        rule = replace(rule, remedy=(finding.remedy,))  # the operating system's error decides
    if drill is not None:
        rule = replace(rule, confidence=Confidence.CERTAIN, remedy=(remedy_for(drill),))
        what = f"{what}; {format_fault(drill)}"
    text = "; ".join(finding.evidence[:3]) or what
    values = {"what": what, "rank": "" if log_rank is None else str(log_rank)}
    return Fact(
        rule=rule,
        source=source,
        line=0,
        text=text,
        process=ProcessRef(rank=rank, node=node_of(finding)),
        at=at,
        values=values,
    )


def _rule(finding: Finding) -> Rule:
    if _SELF_INFLICTED.search(finding.what):
        return RULES["run-rank-crashed"]
    return RULES.get(FOR_FINDING.get(finding.code, f"run-{finding.code}"), RULES["run-failure"])


def _drill(events: Sequence[AnyEvent], failure: AnyEvent) -> FaultInjected | None:
    """The drill that caused a failure."""
    drills: InjectedFaults = ()
    for event in events:
        if event is failure:
            return injected_cause(drills, event)
        drills = unattributed_after(drills, event)
    return None
