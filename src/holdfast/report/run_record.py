"""What a report shows of a run, collected in one pass over its events, bounded for a run of any length. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from typing import Any

from msgspec import Struct, field

from holdfast import events
from holdfast.events import AnyEvent, StepCommitted
from holdfast.job.scheduler_account import SchedulerAccount
from holdfast.report.predicted_step import PredictedStep
from holdfast.report.rank_times import RankTimes, RankTimesRecorder
from holdfast.report.run_status import RunStatus
from holdfast.report.status_reducer import update_status

MAX_POINTS = 800
"""Points of a curve; of a longer run, neighbours are merged."""
MAX_CURVES = 8
"""Replicas whose curves are kept."""
MAX_MARKS = 400
"""Marks of each kind; of more, every second one is dropped."""


class Quantity(StrEnum):
    """What a curve shows over the steps."""

    LOSS = "loss"
    GRAD_NORM = "grad_norm"
    STEP_S = "step_s"
    TOKENS_PER_S = "tokens_per_s"
    MFU = "mfu_full"


class MarkKind(StrEnum):
    """What happened at a moment of a run."""

    ATTEMPT = "attempt"
    FAILURE = "failure"
    CHECKPOINT = "checkpoint"
    DRILL = "drill"
    UPDATE = "update"
    WORLD_SIZE = "world size"
    CONTROLLER = "controller restart"


class Mark(Struct, frozen=True):
    """One moment."""

    at: float
    """Unix seconds."""
    text: str


class Point:
    """The mean over consecutive steps of one attempt."""

    __slots__ = ("attempt", "numbers", "seconds", "step", "steps", "sums", "tokens")

    def __init__(self, event: StepCommitted) -> None:
        self.step = event.step
        self.steps = event.steps
        self.attempt = event.attempt
        self.seconds = max(0.0, event.ended - event.started)
        self.tokens = event.metrics.get("tokens", 0.0) * event.steps
        self.sums = {name: event.metrics[name] for name in _METRICS if name in event.metrics}
        self.numbers = dict.fromkeys(self.sums, 1)

    def add(self, later: Point) -> None:
        """Include later steps."""
        self.step = later.step
        self.steps += later.steps
        self.seconds += later.seconds
        self.tokens += later.tokens
        for name, total in later.sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + total
            self.numbers[name] = self.numbers.get(name, 0) + later.numbers[name]

    def of(self, quantity: Quantity) -> float | None:
        """Its value; None if the program does not report it."""
        match quantity:
            case Quantity.STEP_S:
                return self.seconds / self.steps
            case Quantity.TOKENS_PER_S:
                return self.tokens / self.seconds if self.tokens and self.seconds else None
            case _:
                return self.sums[quantity] / self.numbers[quantity] if quantity in self.sums else None


_METRICS = (Quantity.LOSS.value, Quantity.GRAD_NORM.value, Quantity.MFU.value)


class _Curve:
    """A replica's steps, thinned while they are added."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self._per_point = 1
        """Log lines that a point stands for."""
        self._in_last = 0

    def add(self, event: StepCommitted) -> None:
        fresh = Point(event)
        if self.points and self._in_last < self._per_point and self.points[-1].attempt == event.attempt:
            self.points[-1].add(fresh)
            self._in_last += 1
            return
        self.points.append(fresh)
        self._in_last = 1
        if len(self.points) >= 2 * MAX_POINTS:
            for earlier, later in zip(self.points[::2], self.points[1::2], strict=False):
                earlier.add(later)
            self.points = self.points[::2]
            self._per_point *= 2


class RunRecord(Struct, frozen=True, kw_only=True):
    """What a report shows of one run."""

    status: RunStatus
    job: Mapping[str, Any] = field(default_factory=dict[str, Any])
    version: str = ""
    """The version of holdfast that created it."""
    curves: Mapping[int, tuple[Point, ...]] = field(default_factory=dict[int, tuple[Point, ...]])
    """By replica, oldest first."""
    marks: Mapping[MarkKind, tuple[Mark, ...]] = field(default_factory=dict[MarkKind, tuple[Mark, ...]])
    checked_nodes: int = 0
    """Nodes whose checks before the start are done."""
    failed_checks: int = 0
    """Those that may run no ranks."""
    facts: Mapping[str, str] = field(default_factory=dict[str, str])
    """What the checks found the same on all nodes, such as versions."""
    rank_times: RankTimes | None = None
    """None if no ranks measured their steps."""
    predicted_step: PredictedStep | None = None
    """None if no prediction can be made."""
    scheduler: SchedulerAccount | None = None
    """None on a target without a scheduler, and if it was not asked."""

    @property
    def last_at(self) -> float:
        """Where its account ends, in Unix seconds: now for a live run."""
        return self.status.finished_at or self.status.now

    @property
    def device_hours(self) -> float:
        """Hours of all devices, from the run's start to its end."""
        account = self.status.account(self.last_at)
        return account.total_s * self.status.devices / 3600


class RunRecorder:
    """Collects a run's events one by one."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._begin()

    def _begin(self) -> None:
        self._status = RunStatus(run=self._run)
        self._created: events.RunCreated | None = None
        self._curves: dict[int, _Curve] = {}
        self._marks: dict[MarkKind, list[Mark]] = {}
        self._checks: dict[int, events.NodeChecked] = {}
        self._rank_times = RankTimesRecorder()

    def add(self, event: AnyEvent) -> None:
        """Add the next event."""
        if isinstance(event, events.RunCreated):  # a log that another replaced is read from its beginning
            self._begin()
        is_first = isinstance(event, events.ControllerStarted) and not self._status.nodes
        if (found := _MARKS.get(type(event))) is not None and not is_first:
            kind, text_of = found
            _add(self._marks.setdefault(kind, []), Mark(event.at, text_of(event)))
        self._status = update_status(self._status, event)
        match event:
            case StepCommitted():
                if event.replica in self._curves or len(self._curves) < MAX_CURVES:
                    self._curves.setdefault(event.replica, _Curve()).add(event)
            case events.RunCreated():
                self._created = event
            case events.NodeChecked():
                self._checks[event.node] = event
            case events.StepTimesCompared():
                self._rank_times.add(event)
            case _:
                pass

    @property
    def record(self) -> RunRecord:
        """What has been collected."""
        created = self._created
        return RunRecord(
            status=self._status,
            job=created.job if created else {},
            version=created.version if created else "",
            curves={replica: tuple(curve.points) for replica, curve in sorted(self._curves.items())},
            marks={kind: tuple(found) for kind, found in self._marks.items()},
            checked_nodes=len(self._checks),
            failed_checks=sum(each.problem is not None for each in self._checks.values()),
            facts=_same_everywhere([each.facts for each in self._checks.values()]),
            rank_times=self._rank_times.found,
        )


def record_run(log: Iterable[AnyEvent], run: str) -> RunRecord:
    """Collect a run's events."""
    recorder = RunRecorder(run)
    for event in log:
        recorder.add(event)
    return recorder.record


def _add(known: list[Mark], mark: Mark) -> None:
    known.append(mark)
    if len(known) > MAX_MARKS:
        del known[1::2]


def _same_everywhere(facts: list[dict[str, str]]) -> dict[str, str]:
    if not facts:
        return {}
    return {name: value for name, value in facts[0].items() if all(each.get(name) == value for each in facts)}


_MARKS: Mapping[type[AnyEvent], tuple[MarkKind, Callable[[Any], str]]] = {
    events.AttemptStarted: (
        MarkKind.ATTEMPT,
        lambda event: f"attempt {event.attempt} of replica {event.replica}, {event.world_size} ranks",
    ),
    events.RecoveryDecided: (MarkKind.FAILURE, lambda event: event.finding.what),
    events.CheckpointCommitted: (MarkKind.CHECKPOINT, lambda event: f"checkpoint of step {event.step}"),
    events.FaultInjected: (MarkKind.DRILL, lambda event: f"drill: {event.action} {event.target}"),
    events.UpdateEnded: (MarkKind.UPDATE, lambda event: f"update {event.outcome.value}"),
    events.WorldSizeChanged: (
        MarkKind.WORLD_SIZE,
        lambda event: f"{event.world_size} of {event.full_world_size} ranks",
    ),
    events.ControllerStarted: (MarkKind.CONTROLLER, lambda _: "controller started"),
}
