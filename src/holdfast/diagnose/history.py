"""Owns what a run's own log says of how it failed, as facts beside those of its ranks' words.

The controller has seen which rank's process ended first and how; what ranks wrote says why. Refuses to own that seeing
(control/blame.py) and the reading of the log (events/log.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from holdfast.diagnose.classes import Class
from holdfast.diagnose.fact import Fact, Who
from holdfast.diagnose.rules import RULES
from holdfast.diagnose.rules.row import Role, Rule, Sureness
from holdfast.diagnose.rules.run import FOR_FINDING
from holdfast.events import (
    AnyEvent,
    AttemptStarted,
    DrillAction,
    DrillDone,
    DrillTarget,
    FindingRaised,
    RankExit,
    RankExited,
    RankHung,
    RecoveryDecided,
    StopDecided,
)
from holdfast.findings import Finding

DRILL_S = 30.0
"""A failure within so many seconds after a drill of what failed is taken for the drill's."""

_NODE = re.compile(r"\bnode\d+")
_BY_ITSELF = re.compile(r"ended by SIG(?:ABRT|SEGV|BUS|FPE|ILL|TRAP|SYS)\b")
"""Signals that a process brings upon itself: nobody sent them."""
_PARTS_OF_NODES = (
    DrillTarget.RANK,
    DrillTarget.COLLECTIVE,
    DrillTarget.NODE,
    DrillTarget.AGENT,
    DrillTarget.MEMORY,
)
_DISKS = (DrillTarget.RUN_FOLDER, DrillTarget.CHECKPOINTS)
_HARMLESS = (DrillAction.SKEW, DrillAction.RETURN, DrillAction.SLOW)


@dataclass(frozen=True, kw_only=True)
class Failed:
    """The attempt that failed last, and what the run's log says of it."""

    replica: int
    attempt: int
    world_size: int
    """Ranks of that attempt."""
    rank: int | None
    event: AnyEvent
    """Where the log says so."""
    fact: Fact
    early: tuple[Fact, ...] = ()
    """Ranks that had ended by themselves and well while others were at work."""
    stacks: tuple[str, ...] = ()
    """Files that hold where its ranks stood, of those that were at work."""


def last_failure(events: Sequence[AnyEvent], source: str) -> Failed | None:
    """The last failure that the log tells of; None for a run in which nothing failed."""
    decided = next((event for event in reversed(events) if isinstance(event, RecoveryDecided)), None)
    if decided is not None:
        at, rank, finding = decided.failed_at, decided.first_rank, decided.finding
        fact = _fact(finding, source, at, rank, _drill(events, finding, at))
        started = _started(events, decided.replica, decided.attempt)
        return Failed(
            replica=decided.replica,
            attempt=decided.attempt,
            world_size=started.world_size if started else 0,
            rank=rank,
            event=decided,
            fact=fact,
            early=tuple(_early(events, decided, source)),
            stacks=tuple(
                event.stacks
                for event in events
                if isinstance(event, RankHung)
                and (event.replica, event.attempt) == (decided.replica, decided.attempt)
                and event.stacks
                and event.process_state != "T"
            ),
        )
    noticed = next((event for event in reversed(events) if _finding(event) is not None), None)
    finding = _finding(noticed) if noticed else None
    if noticed is None or finding is None or _rule(finding).role is not Role.PRIMARY:
        return None
    started = _started(events, 0)
    fact = _fact(finding, source, noticed.at, None, _drill(events, finding, noticed.at))
    attempt, world_size = (started.attempt, started.world_size) if started else (0, 0)
    return Failed(replica=0, attempt=attempt, world_size=world_size, rank=None, event=noticed, fact=fact)


def _started(events: Sequence[AnyEvent], replica: int, attempt: int | None = None) -> AttemptStarted | None:
    """The start of a replica's attempt; of its last one where none is named."""
    starts = (event for event in reversed(events) if isinstance(event, AttemptStarted) and event.replica == replica)
    return next((start for start in starts if attempt in (None, start.attempt)), None)


def _early(events: Sequence[AnyEvent], decided: RecoveryDecided, source: str) -> Iterator[Fact]:
    """What is said of the ranks of an attempt that ended well before it failed."""
    for event in events:
        if not isinstance(event, RankExited) or (event.replica, event.attempt) != (decided.replica, decided.attempt):
            continue
        if event.how is RankExit.CODE and event.code == 0 and not event.stopped and event.at < decided.failed_at:
            what = f"rank {event.rank} on node{event.node} was done, with exit code 0, while others were at work"
            who = Who(rank=event.rank, node=f"node{event.node}")
            rule, values = RULES["run-rank-left-early"], {"what": what}
            yield Fact(rule=rule, source=source, line=0, text=what, who=who, at=event.at, values=values)


def _finding(event: AnyEvent) -> Finding | None:
    """What ended a run, or what it waits for, where no attempt failed."""
    return event.finding if isinstance(event, StopDecided | FindingRaised) else None


def _fact(finding: Finding, source: str, at: float, rank: int | None, drill: DrillDone | None) -> Fact:
    rule, what = _rule(finding), finding.what
    if drill is not None:
        rule = replace(rule, sure=Sureness.CERTAIN, remedy=("nothing: that is what was asked for",))
        what = f"{what}; a drill did it on purpose: {drill.action} {drill.target}"
    text = "; ".join((what, *finding.evidence[:3]))
    values = {"what": what, "rank": str(rank)}
    return Fact(
        rule=rule, source=source, line=0, text=text, who=Who(rank=rank, node=_node(finding)), at=at, values=values
    )


def _node(finding: Finding) -> str | None:
    found = _NODE.search(finding.what) or _NODE.search(finding.where)
    return found[0] if found else None


def _rule(finding: Finding) -> Rule:
    if _BY_ITSELF.search(finding.what):
        return RULES["run-rank-crashed"]
    return RULES.get(FOR_FINDING.get(finding.code, f"run-{finding.code}"), RULES["run-failure"])


def _drill(events: Sequence[AnyEvent], finding: Finding, failed_at: float) -> DrillDone | None:
    """The drill that a failure is taken for: the last one done shortly before, to what failed."""
    drill = next((event for event in reversed(events) if isinstance(event, DrillDone)), None)
    if drill is None or drill.action in _HARMLESS or not -1.0 <= failed_at - drill.at <= DRILL_S:
        return None
    of_node = drill.target in _PARTS_OF_NODES and _node(finding) == f"node{drill.node}"
    of_disk = drill.target in _DISKS and Class.STORAGE in _rule(finding).classes
    return drill if of_node or of_disk else None
