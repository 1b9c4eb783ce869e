"""Goodput accounting: assigns every second from a run's first event to its last to exactly one category.

    starting       from RunCreated to the start of the first step
    training       steps committed for the first time, and the loop's work between them
    checkpointing  `checkpoint_s` of every step
    detecting      from RecoveryDecided.failed_at to RecoveryDecided.at
    recovering     from there to the start of the next attempt's first step; a recovery that fails is recovering until
                   it fails, then detecting, then recovering again. In a scale-up without a failure, from the last step
    recomputing    steps that had been committed before, and the part of a step between the last commit and the
                   failure, which will be repeated; ranks stopped by a signal end between steps
    stopping       from the last step, or else from ShutdownDecided, to RunFinished
    running        for a replica that never reports a step: from the start of its ranks to their end
    possibly recomputing  the same for attempts before the last: a program that loads no checkpoint repeated it. Not
                   used with several replicas: a restarted one catches up from another

Times are clipped to be in order, so a clock that is set back shortens a category but never makes it negative. If steps
end after RunFinished, the account ends with the last of them. Sums are whole microseconds, so the categories add up
exactly. ETTR is training / total. Each replica has its own account; the run's account is their mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum, auto
from typing import Any

from holdfast.events import (
    AnyEvent,
    AttemptStarted,
    NodesStarted,
    RanksStarted,
    RecoveryDecided,
    RunCreated,
    RunFinished,
    ShutdownDecided,
    StepCommitted,
)


class TimeCategory(StrEnum):
    """What a second was spent on."""

    STARTING = "starting"
    RUNNING = "running"
    MAYBE_RECOMPUTING = "possibly recomputing"
    TRAINING = "training"
    CHECKPOINTING = "checkpointing"
    DETECTING = "detecting"
    RECOVERING = "recovering"
    RECOMPUTING = "recomputing"
    STOPPING = "stopping"


@dataclass(frozen=True, kw_only=True)
class Account:
    """Seconds by category; categories without time are omitted."""

    parts: Mapping[TimeCategory, float]
    total_s: float
    steps: int
    """Steps committed, from the lowest number to the highest; repeated and unlogged steps count once."""
    recomputed_steps: int

    @property
    def ettr(self) -> float | None:
        """Effective training time ratio, 0 to 1; None if the run reports no steps or has no duration."""
        if self.total_s <= 0 or self.steps == 0:
            return None
        return self.parts.get(TimeCategory.TRAINING, 0.0) / self.total_s


_BETWEEN_STEPS = frozenset({"rank-terminated-externally", "node-preempted"})
"""Finding codes of failures before which all ranks finish the current step and save."""


class _Activity(StrEnum):
    """What a replica does between two of its events."""

    STARTING = auto()
    STARTING_RANKS = auto()
    """The first ranks run without a committed step: starting, or a job that reports no steps."""
    STEPPING = auto()
    RECOVERING = auto()
    RECOVERING_RANKS = auto()
    STOPPING = auto()


_RANKS = frozenset({_Activity.STARTING_RANKS, _Activity.RECOVERING_RANKS})


@dataclass(frozen=True, kw_only=True)
class _ReplicaLedger:
    """One replica's ledger; times in microseconds."""

    cursor: int
    """Time before this is accounted for."""
    activity: _Activity = _Activity.STARTING
    failed_attempt: int = -1
    lowest_step: int | None = None
    highest_step: int = -1
    step: int = -1
    """The last committed step."""
    recomputed_steps: int = 0
    spent: Mapping[TimeCategory, int] = field(default_factory=dict[TimeCategory, int])
    unreported: Mapping[TimeCategory, int] = field(default_factory=dict[TimeCategory, int])
    """Time in which ranks ran without a step, by the category that applies if steps follow."""
    maybe_recomputed: int = 0
    """How much of it belongs to attempts before the last."""

    def spend_until(self, moment: int, part: TimeCategory, *, unreported: bool = False) -> _ReplicaLedger:
        """Assign the time up to a moment to a category; a moment in the past changes nothing."""
        if moment <= self.cursor:
            return self
        book = self.unreported if unreported else self.spent
        after = {**book, part: book.get(part, 0) + moment - self.cursor}
        if unreported:
            return replace(self, cursor=moment, unreported=after)
        return replace(self, cursor=moment, spent=after)

    def spend_waiting_until(self, moment: int) -> _ReplicaLedger:
        """Assign the time up to a moment to the current activity; a step in progress counts as its later category."""
        match self.activity:
            case _Activity.STARTING:
                return self.spend_until(moment, TimeCategory.STARTING)
            case _Activity.STARTING_RANKS:
                return self.spend_until(moment, TimeCategory.STARTING, unreported=True)
            case _Activity.STEPPING:
                return self.spend_until(
                    moment, TimeCategory.RECOMPUTING if self.step < self.highest_step else TimeCategory.TRAINING
                )
            case _Activity.RECOVERING:
                return self.spend_until(moment, TimeCategory.RECOVERING)
            case _Activity.RECOVERING_RANKS:
                return self.spend_until(moment, TimeCategory.RECOVERING, unreported=True)
            case _Activity.STOPPING:
                return self.spend_until(moment, TimeCategory.STOPPING)

    def by_category(self, *, alone: bool) -> dict[TimeCategory, int]:
        """Microseconds by category; called once it is known whether there are steps. `alone`: the only replica."""
        parts = dict(self.spent)
        for part, spent in self.unreported.items():
            known = TimeCategory.RUNNING if self.lowest_step is None else part
            parts[known] = parts.get(known, 0) + spent
        if alone and self.lowest_step is None and self.maybe_recomputed:
            parts[TimeCategory.MAYBE_RECOMPUTING] = self.maybe_recomputed
            parts[TimeCategory.RUNNING] -= self.maybe_recomputed
        return parts


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """The fold's state; `Ledger()` is a run without events."""

    created: int | None = None
    finished: bool = False
    replica_ledgers: Mapping[int, _ReplicaLedger] = field(default_factory=dict[int, _ReplicaLedger])

    def replica_ledger(self, replica: int) -> _ReplicaLedger:
        return self.replica_ledgers.get(replica) or _ReplicaLedger(cursor=self.created or 0)

    def replica_accounts(self, now: float | None = None) -> dict[int, Account]:
        """Each replica's account; `now` (Unix seconds) ends the account of an unfinished run."""
        if self.created is None:
            return {}
        columns = self.replica_ledgers or {0: _ReplicaLedger(cursor=self.created)}
        if not self.finished and now is not None:
            columns = {index: column.spend_waiting_until(_microseconds(now)) for index, column in columns.items()}
        return {index: _account(column, alone=len(columns) == 1) for index, column in columns.items()}

    def run_account(self, now: float | None = None) -> Account:
        """The run's account: the mean over its replicas."""
        accounts = list(self.replica_accounts(now).values())
        if not accounts:
            return Account(parts={}, total_s=0.0, steps=0, recomputed_steps=0)
        number = len(accounts)
        sums = {part: sum(account.parts.get(part, 0.0) for account in accounts) for part in TimeCategory}
        return Account(
            parts={part: spent / number for part, spent in sums.items() if spent > 0},
            total_s=sum(account.total_s for account in accounts) / number,
            steps=max(account.steps for account in accounts),
            recomputed_steps=max(account.recomputed_steps for account in accounts),
        )


def _account(column: _ReplicaLedger, *, alone: bool) -> Account:
    parts = column.by_category(alone=alone)
    return Account(
        parts={part: parts[part] / 1e6 for part in TimeCategory if parts.get(part)},
        total_s=sum(parts.values()) / 1e6,
        steps=0 if column.lowest_step is None else column.highest_step - column.lowest_step + 1,
        recomputed_steps=column.recomputed_steps,
    )


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)


def update_ledger(ledger: Ledger, event: AnyEvent) -> Ledger:
    """Apply one event; events without effect on time leave the ledger unchanged."""
    handler = _TABLE.get(type(event))
    return handler(ledger, event) if handler else ledger


def account_of(events: Iterable[AnyEvent], now: float | None = None) -> Account:
    """The account of these events, up to `now` if the run has not finished."""
    ledger = Ledger()
    for event in events:
        ledger = update_ledger(ledger, event)
    return ledger.run_account(now)


def _created(ledger: Ledger, event: RunCreated) -> Ledger:
    return replace(ledger, created=_microseconds(event.at)) if ledger.created is None else ledger


def _attempt_started(ledger: Ledger, event: AttemptStarted) -> Ledger:
    """Add the replica; if it was running and nothing failed, this is a scale-up."""
    column = ledger.replica_ledger(event.replica)
    if column.activity is _Activity.STEPPING:
        column = column.spend_until(_microseconds(event.at), TimeCategory.RECOVERING)
        column = replace(column, activity=_Activity.RECOVERING, failed_attempt=event.attempt - 1)
    if column.activity in _RANKS:
        column = column.spend_waiting_until(_microseconds(event.at))
    column = replace(column, maybe_recomputed=sum(column.unreported.values()))
    return _with(ledger, event.replica, column)


def _ranks_started(ledger: Ledger, event: RanksStarted | NodesStarted) -> Ledger:
    column = ledger.replica_ledger(event.replica)
    if event.attempt <= column.failed_attempt:
        return ledger
    match column.activity:
        case _Activity.STARTING:
            mode = _Activity.STARTING_RANKS
        case _Activity.RECOVERING:
            mode = _Activity.RECOVERING_RANKS
        case _:
            return ledger
    return _with(ledger, event.replica, replace(column.spend_waiting_until(_microseconds(event.at)), activity=mode))


def _step_committed(ledger: Ledger, event: StepCommitted) -> Ledger:
    column = ledger.replica_ledger(event.replica)
    if event.attempt <= column.failed_attempt:
        return ledger
    redone = event.step <= column.highest_step
    work = TimeCategory.RECOMPUTING if redone else TimeCategory.TRAINING
    started, ended = _microseconds(event.started), _microseconds(event.ended)
    column = (
        column.spend_until(started, work)
        if column.activity is _Activity.STEPPING
        else column.spend_waiting_until(started)
    )
    worked_until = ended - max(0, _microseconds(event.checkpoint_s))
    column = column.spend_until(worked_until, work).spend_until(ended, TimeCategory.CHECKPOINTING)
    column = replace(
        column,
        activity=_Activity.STOPPING if column.activity is _Activity.STOPPING else _Activity.STEPPING,
        lowest_step=event.first if column.lowest_step is None else min(column.lowest_step, event.first),
        highest_step=max(column.highest_step, event.step),
        step=event.step,
        recomputed_steps=column.recomputed_steps + event.steps * redone,
    )
    return _with(ledger, event.replica, column)


def _recovery_decided(ledger: Ledger, event: RecoveryDecided) -> Ledger:
    column = ledger.replica_ledger(event.replica)
    decided = _microseconds(event.at)
    failed = min(_microseconds(event.failed_at), decided)
    lost = TimeCategory.RECOVERING if event.finding.code in _BETWEEN_STEPS else TimeCategory.RECOMPUTING
    column = (
        column.spend_until(failed, lost)
        if column.activity is _Activity.STEPPING
        else column.spend_waiting_until(failed)
    )
    column = column.spend_until(decided, TimeCategory.DETECTING)
    mode = _Activity.STOPPING if column.activity is _Activity.STOPPING else _Activity.RECOVERING
    failed_attempt = max(column.failed_attempt, event.attempt)
    return _with(ledger, event.replica, replace(column, activity=mode, failed_attempt=failed_attempt))


def _shutdown_decided(ledger: Ledger, event: ShutdownDecided) -> Ledger:
    """From here on replicas are stopping; a running one since its last step."""
    at = _microseconds(event.at)
    for index, column in (ledger.replica_ledgers or {0: ledger.replica_ledger(0)}).items():
        waited = column if column.activity is _Activity.STEPPING else column.spend_waiting_until(at)
        ledger = _with(ledger, index, replace(waited, activity=_Activity.STOPPING))
    return ledger


def _finished(ledger: Ledger, event: RunFinished) -> Ledger:
    ledger = _shutdown_decided(ledger, ShutdownDecided(at=event.at, outcome=event.outcome, reason="", exit_code=0))
    at = _microseconds(event.at)
    return replace(
        ledger,
        finished=True,
        replica_ledgers={index: one.spend_waiting_until(at) for index, one in ledger.replica_ledgers.items()},
    )


def _with(ledger: Ledger, replica: int, column: _ReplicaLedger) -> Ledger:
    return replace(ledger, replica_ledgers={**ledger.replica_ledgers, replica: column})


_TABLE: dict[type[AnyEvent], Callable[[Ledger, Any], Ledger]] = {
    RunCreated: _created,
    AttemptStarted: _attempt_started,
    RanksStarted: _ranks_started,
    NodesStarted: _ranks_started,
    StepCommitted: _step_committed,
    RecoveryDecided: _recovery_decided,
    ShutdownDecided: _shutdown_decided,
    RunFinished: _finished,
}
