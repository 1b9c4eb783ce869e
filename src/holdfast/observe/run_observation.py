"""The reducer from a run's events to what is exported of it: its status, and counts that the status lacks. Pure.

`observe_event` applies one event, starting from `RunObservation()`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from holdfast.events import (
    AnyEvent,
    AttemptStarted,
    CorruptionObserved,
    DeviceFaultObserved,
    FindingRaised,
    NodeChecked,
    NumericFaultObserved,
    RunCreated,
    StepCommitted,
    StragglerObserved,
    TrafficStopped,
)
from holdfast.observe.live_readings import LiveReadings
from holdfast.report.run_status import RunStatus
from holdfast.report.status_reducer import update_status

STEP_BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0)
"""Upper bounds in seconds of the classes of step times; longer steps are the last class."""
RECOVERY_BOUNDS_S = (0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
"""The same of recoveries."""


class Histogram(Struct, frozen=True):
    """Observations by class."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    """One more than bounds."""
    total: float = 0.0
    """Sum of the values."""

    @staticmethod
    def empty(bounds: tuple[float, ...]) -> Histogram:
        """No observations."""
        return Histogram(bounds, (0,) * (len(bounds) + 1))

    def plus(self, value: float, times: int = 1) -> Histogram:
        """With a value that was observed so many times."""
        place = bisect_left(self.bounds, value)
        counts = (*self.counts[:place], self.counts[place] + times, *self.counts[place + 1 :])
        return replace(self, counts=counts, total=self.total + value * times)

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts by upper bound, as Prometheus has them."""
        so_far, found = 0, list[tuple[str, float]]()
        for bound, number in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            so_far += number
            found.append((bound, so_far))
        return found


class Raised(Struct, frozen=True):
    """How often something was raised, and when it was last."""

    times: int = 0
    last_at: float = 0.0
    """Unix seconds."""

    def again(self, at: float) -> Raised:
        """Raised once more."""
        return Raised(self.times + 1, max(at, self.last_at))


class RunObservation(Struct, frozen=True, kw_only=True):
    """What is exported of one run."""

    status: RunStatus = RunStatus()
    step_times: Mapping[int, Histogram] = field(default_factory=dict[int, Histogram])
    """By replica, seconds of a step. Of several steps in one event, each counts with their mean."""
    tokens: Mapping[int, float] = field(default_factory=dict[int, float])
    """By replica, the tokens of its steps, repeated ones included."""
    findings: Mapping[tuple[str, str], Raised] = field(default_factory=dict[tuple[str, str], Raised])
    """By code and severity; a failure's own finding is among the failures."""
    checked_nodes: int = 0
    """Bit N: node N has ended its checks before a start. A mapping would be copied at each of thousands of events."""
    failed_nodes: int = 0
    """Bit N: the last ones of node N failed."""
    waited_s: float | None = None
    """Seconds from the run's creation until all nodes of its first attempt had joined; None before that."""
    last_event_at: float = 0.0
    """Unix seconds."""
    live: LiveReadings | None = None
    """None unless the run's controller itself is scraped."""

    @property
    def recovery_times(self) -> Histogram:
        """Seconds from each failure to the end of its replica's next step."""
        found = Histogram.empty(RECOVERY_BOUNDS_S)
        for each in self.status.history.recoveries:
            found = found if each.until_step_s is None else found.plus(each.until_step_s)
        return found

    @property
    def failures(self) -> dict[str, Raised]:
        """Failures by the code of their finding."""
        found: dict[str, Raised] = {}
        for each in self.status.history.recoveries:
            found[each.finding.code] = found.get(each.finding.code, Raised()).again(each.failed_at)
        return found


def observe_event(known: RunObservation, event: AnyEvent) -> RunObservation:
    """Apply one event."""
    if isinstance(event, RunCreated):  # a log that another replaced is read from its beginning
        known = RunObservation()
    handler = _TABLE.get(type(event))
    known = known if handler is None else handler(known, event)
    return replace(known, status=update_status(known.status, event), last_event_at=event.at)


def _step_committed(known: RunObservation, event: StepCommitted) -> RunObservation:
    times = known.step_times.get(event.replica) or Histogram.empty(STEP_BOUNDS_S)
    step_s = max(0.0, event.ended - event.started) / event.steps
    tokens = known.tokens.get(event.replica, 0.0) + event.metrics.get("tokens", 0.0) * event.steps
    return replace(
        known,
        step_times={**known.step_times, event.replica: times.plus(step_s, event.steps)},
        tokens={**known.tokens, event.replica: tokens},
    )


def _attempt_started(known: RunObservation, event: AttemptStarted) -> RunObservation:
    created_at = known.status.created_at
    if known.waited_s is not None or created_at is None:
        return known
    return replace(known, waited_s=max(0.0, event.at - created_at))


def _node_checked(known: RunObservation, event: NodeChecked) -> RunObservation:
    node = 1 << event.node
    failed = known.failed_nodes & ~node if event.problem is None else known.failed_nodes | node
    return replace(known, checked_nodes=known.checked_nodes | node, failed_nodes=failed)


_Raised = (
    FindingRaised | StragglerObserved | DeviceFaultObserved | TrafficStopped | NumericFaultObserved | CorruptionObserved
)


def _raised(known: RunObservation, event: _Raised) -> RunObservation:
    key = event.finding.code, event.finding.severity.value
    return replace(known, findings={**known.findings, key: known.findings.get(key, Raised()).again(event.at)})


_TABLE: Mapping[type[AnyEvent], Callable[[RunObservation, Any], RunObservation]] = {
    AttemptStarted: _attempt_started,
    NodeChecked: _node_checked,
    StepCommitted: _step_committed,
    **dict.fromkeys(_Raised.__args__, _raised),
}
