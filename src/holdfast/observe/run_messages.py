"""What to tell people about a run: messages that follow from its events, at most one of a kind in a while. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

from holdfast import events
from holdfast.events import AnyEvent, Outcome
from holdfast.job.notify import Occasion
from holdfast.report.formatting import duration, percentage
from holdfast.report.run_status import RunStatus
from holdfast.report.status_reducer import update_status

QUIET_S = 300.0
"""Seconds after a message in which no other of its kind is sent; the end of a run is always sent."""
_LAST = (Occasion.FAILED, Occasion.FINISHED)


class Message(Struct, frozen=True, kw_only=True):
    """One message."""

    run: str
    job: str
    occasion: Occasion
    at: float
    """Unix seconds."""
    text: str
    code: str = ""
    """Code of the finding that caused it, for `holdfast explain`."""
    left_out: int = 0
    """Messages of this kind that were not sent since the last one."""

    @property
    def sentence(self) -> str:
        """All of it in one line."""
        more = f" ({self.left_out} more like this were not sent)" if self.left_out else ""
        return f"{self.run}: {self.text}{more}"


class RunMessages:
    """The messages of one run."""

    def __init__(self, run: str) -> None:
        self._status = RunStatus(run=run)
        self._sent_at: dict[Occasion, float] = {}
        self._left_out: dict[Occasion, int] = {}

    def add(self, event: AnyEvent) -> Message | None:
        """Add the next event; the message that it causes."""
        before, self._status = self._status, update_status(self._status, event)
        rule = _RULES.get(type(event))
        found = rule(event, before, self._status) if rule else None
        if found is None:
            return None
        occasion, text, code = found
        if occasion not in _LAST and event.at - self._sent_at.get(occasion, -QUIET_S) < QUIET_S:
            self._left_out[occasion] = self._left_out.get(occasion, 0) + 1
            return None
        self._sent_at[occasion] = event.at
        return Message(
            run=self._status.run,
            job=self._status.job,
            occasion=occasion,
            at=event.at,
            text=text,
            code=code,
            left_out=self._left_out.pop(occasion, 0),
        )


_Found = tuple[Occasion, str, str] | None


def _finished(event: events.RunFinished, before: RunStatus, after: RunStatus) -> _Found:
    account = after.account()
    ettr = "" if account.ettr is None else f", ETTR {percentage(account.ettr)}"
    because = f": {after.reason}" if after.reason else ""
    text = f"{event.outcome.value} after {duration(account.total_s)}{ettr}{because}"
    failed = event.outcome is Outcome.FAILED
    end = before.history.end
    return (Occasion.FAILED if failed else Occasion.FINISHED), text, end.code if failed and end else ""


def _stepped(event: events.StepCommitted, before: RunStatus, after: RunStatus) -> _Found:
    known = before.replicas.get(event.replica)
    if known is None or not known.recovering or after.replicas[event.replica].recovering:
        return None
    of_replica = [each for each in after.history.recoveries if each.replica == event.replica]
    if not of_replica:
        return None
    last = of_replica[-1]
    took = "" if last.until_step_s is None else f" {duration(last.until_step_s)} after the failure"
    return Occasion.RECOVERED, f"recovered{took}: {last.finding.what}", last.finding.code


def _resized(event: events.WorldSizeChanged, _before: RunStatus, _after: RunStatus) -> _Found:
    if not event.missing_nodes:
        return None
    because = f": {event.reason}" if event.reason else ""
    return Occasion.DEGRADED, f"continues with {event.world_size} of {event.full_world_size} ranks{because}", ""


def _hung(event: events.RankHung | events.RanksHung, _before: RunStatus, _after: RunStatus) -> _Found:
    if event.unless_others_work:
        return None
    if isinstance(event, events.RankHung):
        text = f"rank {event.rank} on node{event.node} hangs: no step for {duration(event.waited_s)}"
        return Occasion.STALLED, text, "rank-hung"
    return Occasion.STALLED, "many ranks hang", "rank-hung"


_RULES: Mapping[type[AnyEvent], Callable[[Any, RunStatus, RunStatus], _Found]] = {
    events.RunFinished: _finished,
    events.StepCommitted: _stepped,
    events.WorldSizeChanged: _resized,
    events.RankHung: _hung,
    events.RanksHung: _hung,
}
