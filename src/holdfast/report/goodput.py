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
                   used with several replicas: a restarted one catches up from another. Also the steps of such attempts
                   of a program without a Session: they were training if the next attempt loaded a checkpoint

Times are clipped to be in order, so a clock that is set back shortens a category but never makes it negative. If steps
end after RunFinished, the account ends with the last of them. Sums are whole microseconds, so the categories add up
exactly. ETTR is training / total. Each replica has its own account; the run's account is their mean. status_reducer.py
keeps a ledger for each replica in the run's status.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum, auto

from msgspec import Struct, field
from msgspec.structs import replace

from holdfast.events import AttemptStarted, NodesStarted, RanksStarted, RecoveryDecided, StepCommitted


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


class Account(Struct, frozen=True, kw_only=True):
    """Seconds by category; categories without time are omitted."""

    parts: Mapping[TimeCategory, float]
    total_s: float
    steps: int
    """Steps committed, from the lowest number to the highest; repeated and unlogged steps count once."""
    recomputed_steps: int

    @property
    def ettr(self) -> float | None:
        """Effective training time ratio, 0 to 1; None if the run reports no steps or has no duration.

        If it is not known whether attempts repeated steps, the least that it can be.
        """
        return self._share(TimeCategory.TRAINING)

    @property
    def most_ettr(self) -> float | None:
        """The most that the ETTR can be; as `ettr` if the program has a Session."""
        return self._share(TimeCategory.TRAINING, TimeCategory.MAYBE_RECOMPUTING)

    def _share(self, *parts: TimeCategory) -> float | None:
        if self.total_s <= 0 or self.steps == 0:
            return None
        return sum(self.parts.get(part, 0.0) for part in parts) / self.total_s


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


_WAITING: Mapping[_Activity, TimeCategory] = {
    _Activity.STARTING: TimeCategory.STARTING,
    _Activity.STARTING_RANKS: TimeCategory.STARTING,
    _Activity.RECOVERING: TimeCategory.RECOVERING,
    _Activity.RECOVERING_RANKS: TimeCategory.RECOVERING,
    _Activity.STOPPING: TimeCategory.STOPPING,
}
"""The category of time without a step."""
_RANKS_RUN = {
    _Activity.STARTING: _Activity.STARTING_RANKS,
    _Activity.RECOVERING: _Activity.RECOVERING_RANKS,
}
"""What a replica does once its ranks run."""


class ReplicaLedger(Struct, frozen=True, kw_only=True):
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
    step_clock: bool = False
    """Whether its program has no Session, so that steps are numbered from 1 in each attempt."""
    step_attempt: int = -1
    """The attempt of the last committed step."""
    clocked_before: int = 0
    """Training time in attempts before that one, if it has no Session."""

    def spend_until(self, moment: int, part: TimeCategory) -> ReplicaLedger:
        """Assign the time up to a moment to a category; a moment in the past changes nothing."""
        if moment <= self.cursor:
            return self
        return replace(self, cursor=moment, spent=_plus(self.spent, part, moment - self.cursor))

    def wait_until(self, moment: int, in_step: TimeCategory | None = None) -> ReplicaLedger:
        """Assign the time up to a moment to the current activity; `in_step` is the category of a step in progress."""
        if self.activity is _Activity.STEPPING:
            redone = self.step < self.highest_step
            return self.spend_until(moment, in_step or (TimeCategory.RECOMPUTING if redone else TimeCategory.TRAINING))
        part = _WAITING[self.activity]
        if self.activity not in _RANKS_RUN.values() or moment <= self.cursor:
            return self.spend_until(moment, part)
        return replace(self, cursor=moment, unreported=_plus(self.unreported, part, moment - self.cursor))

    def attempt_started(self, event: AttemptStarted) -> ReplicaLedger:
        """If the replica was running and nothing failed, this is a scale-up."""
        after, at = self, microseconds(event.at)
        if self.activity is _Activity.STEPPING:
            after = self.spend_until(at, TimeCategory.RECOVERING)
            after = replace(after, activity=_Activity.RECOVERING, failed_attempt=event.attempt - 1)
        elif self.activity in _RANKS_RUN.values():
            after = self.wait_until(at)
        return replace(after, maybe_recomputed=sum(after.unreported.values()))

    def ranks_started(self, event: RanksStarted | NodesStarted) -> ReplicaLedger:
        activity = _RANKS_RUN.get(self.activity)
        if event.attempt <= self.failed_attempt or activity is None:
            return self
        return replace(self.wait_until(microseconds(event.at)), activity=activity)

    def step_committed(self, event: StepCommitted) -> ReplicaLedger:
        if event.attempt <= self.failed_attempt:
            return self
        again = event.step_clock and event.attempt != self.step_attempt
        redone = not event.step_clock and event.step <= self.highest_step
        work = TimeCategory.RECOMPUTING if redone else TimeCategory.TRAINING
        started, ended = microseconds(event.started), microseconds(event.ended)
        worked_until = ended - max(0, microseconds(event.checkpoint_s))
        after = self.wait_until(started, work).spend_until(worked_until, work)
        after = after.spend_until(ended, TimeCategory.CHECKPOINTING)
        return replace(
            after,
            activity=after.activity if after.activity is _Activity.STOPPING else _Activity.STEPPING,
            lowest_step=event.first if self.lowest_step is None or again else min(self.lowest_step, event.first),
            highest_step=event.step if event.step_clock else max(self.highest_step, event.step),
            step=event.step,
            step_clock=event.step_clock,
            step_attempt=event.attempt,
            clocked_before=self.spent.get(TimeCategory.TRAINING, 0) if again else self.clocked_before,
            recomputed_steps=self.recomputed_steps + event.steps * redone,
        )

    def recovery_decided(self, event: RecoveryDecided) -> ReplicaLedger:
        decided = microseconds(event.at)
        lost = TimeCategory.RECOVERING if event.finding.code in _BETWEEN_STEPS else TimeCategory.RECOMPUTING
        after = self.wait_until(min(microseconds(event.failed_at), decided), lost)
        after = after.spend_until(decided, TimeCategory.DETECTING)
        return replace(
            after,
            activity=after.activity if after.activity is _Activity.STOPPING else _Activity.RECOVERING,
            failed_attempt=max(self.failed_attempt, event.attempt),
        )

    def shutdown_decided(self, at: float) -> ReplicaLedger:
        """From here on the replica is stopping; a running one since its last step."""
        after = self if self.activity is _Activity.STEPPING else self.wait_until(microseconds(at))
        return replace(after, activity=_Activity.STOPPING)

    def account(self, *, alone: bool) -> Account:
        """The account so far; `alone`: the run's only replica."""
        parts = dict(self.spent)
        for part, spent in self.unreported.items():
            known = TimeCategory.RUNNING if self.lowest_step is None else part
            parts[known] = parts.get(known, 0) + spent
        if alone and self.lowest_step is None and self.maybe_recomputed:
            parts[TimeCategory.MAYBE_RECOMPUTING] = self.maybe_recomputed
            parts[TimeCategory.RUNNING] -= self.maybe_recomputed
        if alone and self.step_clock and self.clocked_before:
            parts[TimeCategory.MAYBE_RECOMPUTING] = self.clocked_before
            parts[TimeCategory.TRAINING] -= self.clocked_before
        return Account(
            parts={part: parts[part] / 1e6 for part in TimeCategory if parts.get(part)},
            total_s=sum(parts.values()) / 1e6,
            steps=0 if self.lowest_step is None else self.highest_step - self.lowest_step + 1,
            recomputed_steps=self.recomputed_steps,
        )


def mean_account(accounts: Sequence[Account]) -> Account:
    """The run's account: the mean over its replicas."""
    number = len(accounts)
    sums = {part: sum(account.parts.get(part, 0.0) for account in accounts) for part in TimeCategory}
    return Account(
        parts={part: spent / number for part, spent in sums.items() if spent > 0},
        total_s=sum(account.total_s for account in accounts) / max(1, number),
        steps=max((account.steps for account in accounts), default=0),
        recomputed_steps=max((account.recomputed_steps for account in accounts), default=0),
    )


def microseconds(seconds: float) -> int:
    """Rounded to a whole number."""
    return round(seconds * 1e6)


def _plus(book: Mapping[TimeCategory, int], part: TimeCategory, spent: int) -> dict[TimeCategory, int]:
    return {**book, part: book.get(part, 0) + spent}
