"""Owns what a run's own log says of how it failed, as facts beside those of its ranks' words.

The controller has seen which rank's process ended first and how; what ranks wrote says why. Refuses to own that seeing
(control/blame.py) and the reading of the log (events/log.py).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from holdfast.diagnose.fact import Fact, Who
from holdfast.diagnose.rules import RULES
from holdfast.diagnose.rules.row import Sureness
from holdfast.diagnose.rules.run import FOR_FINDING
from holdfast.events import AnyEvent, DrillDone, RecoveryDecided

DRILL_S = 30.0
"""A failure within so many seconds after a drill is taken for the drill's."""

_NODE = re.compile(r"node\d+")


@dataclass(frozen=True, kw_only=True)
class Failed:
    """The attempt that failed last, and what the run's log says of it."""

    replica: int
    attempt: int
    rank: int | None
    facts: tuple[Fact, ...]


def last_failure(events: Sequence[AnyEvent], source: str) -> Failed | None:
    """The last failure that the log tells of; None for a run in which nothing failed."""
    decided = next((event for event in reversed(events) if isinstance(event, RecoveryDecided)), None)
    if decided is None:
        return None
    finding = decided.finding
    node = _NODE.search(finding.where)
    who = Who(rank=decided.first_rank, node=node[0] if node else None)
    rule = RULES.get(FOR_FINDING.get(finding.code, f"run-{finding.code}"), RULES["run-failure"])
    what = finding.what
    if (drill := _drill(events, decided.failed_at)) is not None:
        rule = replace(rule, sure=Sureness.CERTAIN, remedy=("nothing: that is what was asked for",))
        what = f"{what}; a drill did it on purpose: {drill.action} {drill.target}"
    text = "; ".join((what, *finding.evidence[:3]))
    values = {"what": what, "rank": str(decided.first_rank)}
    facts = [Fact(rule=rule, source=source, line=0, text=text, who=who, at=decided.failed_at, values=values)]
    return Failed(replica=decided.replica, attempt=decided.attempt, rank=decided.first_rank, facts=tuple(facts))


def _drill(events: Sequence[AnyEvent], failed_at: float) -> DrillDone | None:
    """The drill that a failure is taken for: the last one done shortly before."""
    drill = next((event for event in reversed(events) if isinstance(event, DrillDone)), None)
    return drill if drill is not None and -1.0 <= failed_at - drill.at <= DRILL_S else None
