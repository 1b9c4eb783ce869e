"""Aggregates the steps of a node's ranks: a step is reported once all ranks here have finished it.

Steps are sent in batches at a limited rate: a message per node and step would overload a controller. A step whose
metrics are still on a GPU waits for them.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping

import msgspec
from msgspec import Struct, field

from holdfast.metrics.metric_catalog import reduce_metrics, reduced_metrics
from holdfast.protocol.metric_validation import limit_metric_count, split_valid_metrics
from holdfast.protocol.orders import NodeStep, Progress, StartRanks
from holdfast.protocol.phase_times import PhaseTimes, merged
from holdfast.protocol.rank_messages import RankStep, RankStepMetrics

MAX_STEPS_PER_MESSAGE = 128
"""Most steps in one message."""
MAX_MESSAGE_BYTES = 1 << 20
"""Largest estimated message; the controller API rejects messages above 4 MiB (security/api_limits.py)."""
MAX_AWAITED_STEPS = 16
"""Steps of one rank whose metrics are awaited; beyond them the oldest is reported without."""
MAX_PENDING_STEPS = 20_000
"""Steps of one rank that wait for the node's other ranks; beyond them the oldest is dropped."""


class _RankSteps(Struct):
    """Steps that one rank has reported."""

    last_step: int = -1
    step_clock: bool = False
    """Whether no Session reports them, but the step clock."""
    awaited: deque[RankStep] = field(default_factory=deque[RankStep])
    """Steps whose metrics have not arrived, and those after them."""
    pending: deque[RankStep] = field(default_factory=lambda: deque[RankStep](maxlen=MAX_PENDING_STEPS))
    """Steps that other ranks of the node have not finished."""

    def pop(self, step: int) -> RankStep | None:
        """Remove and return a step; drop any earlier ones."""
        while self.pending and self.pending[0].step <= step:
            found = self.pending.popleft()
            if found.step == step:
                return found
        return None


class StepAggregator:
    """The steps of one attempt's ranks on this node."""

    def __init__(
        self,
        order: StartRanks,
        *,
        node: int,
        send: Callable[[Progress], int],
        node_metrics: Callable[[], Mapping[str, float]] = dict[str, float],
    ) -> None:
        """`node_metrics` returns what was measured of the node since it was last called."""
        self.step_count = 0
        """Steps that all ranks have finished."""
        self._node_metrics = node_metrics
        self._order = order
        self._node = node
        self._send = send
        self._ranks: dict[int, _RankSteps] = {}
        self._expected = sum(launch.rank_count for launch in order.ranks)
        self._completed: list[NodeStep] = []
        self._phases: dict[int, PhaseTimes] = {}
        """By rank, how it spent the steps since the last message."""
        self._flushed_at = 0.0
        self._flush_timer: asyncio.TimerHandle | None = None

    def add_rank(self, rank: int, *, step_clock: bool = False) -> None:
        """A rank will report steps, with a Session or with the step clock."""
        self._ranks[rank] = _RankSteps(step_clock=step_clock)

    def add(self, rank: int, step: RankStep) -> None:
        """Record a rank's step, unless its metrics follow; times are on the agent's clock."""
        awaited = self._ranks[rank].awaited
        awaited.append(step)
        if not step.metrics_follow:
            self.complete(rank)
        elif len(awaited) > MAX_AWAITED_STEPS:
            self._record(rank, awaited.popleft())

    def add_metrics(self, rank: int, message: RankStepMetrics) -> None:
        """Record the step that these metrics belong to, and those before it; ignores metrics of any other step."""
        awaited = self._ranks[rank].awaited
        for place, step in enumerate(awaited):
            if step.step == message.step:
                awaited[place] = msgspec.structs.replace(step, metrics=message.metrics)
                self.complete(rank, until=message.step)
                return

    def add_phases(self, rank: int, times: PhaseTimes, *, ahead_s: float) -> None:
        """Record how a rank spent its last steps, to be sent with the node's next steps."""
        if not times.is_valid:
            return
        arrived = times.arrived - ahead_s if times.arrived else 0.0
        times = msgspec.structs.replace(times, rank=rank, arrived=arrived)
        self._phases[rank] = merged(self._phases[rank], times) if rank in self._phases else times

    def complete(self, rank: int, *, until: float = math.inf) -> None:
        """Record the rank's steps up to this one, although their metrics may not have arrived."""
        awaited = self._ranks[rank].awaited if rank in self._ranks else deque[RankStep]()
        while awaited and awaited[0].step <= until:
            self._record(rank, awaited.popleft())

    def _record(self, rank: int, step: RankStep) -> None:
        """Record a rank's step, and the node's if this rank is the last."""
        self._ranks[rank].last_step = step.step
        self._ranks[rank].pending.append(step)
        if len(self._ranks) < self._expected:
            return
        ranks = [one for _, one in sorted(self._ranks.items())]
        completed_step = min(one.last_step for one in ranks)
        while (first := next(iter(ranks[0].pending), None)) and first.step <= completed_step:
            finished = [found for one in ranks if (found := one.pop(first.step)) is not None]
            self.step_count += 1
            completed = _merge(finished, has_rank0=0 in self._ranks)
            if any(one.step_clock for one in ranks):
                completed = msgspec.structs.replace(completed, step_clock=True)
            self._completed.append(completed)
        if self._completed and self._flush_timer is None:
            wait_s = max(0.0, self._flushed_at + self._order.progress_interval_s - time.monotonic())
            self._flush_timer = asyncio.get_running_loop().call_later(wait_s, self.flush)

    def flush(self) -> None:
        """Send the steps that all ranks have finished, ahead of any later message about them."""
        if self._flush_timer is not None:
            self._flush_timer.cancel()
            self._flush_timer = None
        if not self._completed:
            return
        self._flushed_at = time.monotonic()
        completed, self._completed = self._completed, []
        if measured := self._node_metrics():
            kept, _ = limit_metric_count({**completed[-1].metrics, **measured})
            completed[-1] = msgspec.structs.replace(completed[-1], metrics=kept)
        phases, self._phases = tuple(self._phases.values()), {}
        for steps in _split_into_messages(completed):
            self._send(
                Progress(
                    node=self._node,
                    replica=self._order.replica,
                    attempt=self._order.attempt,
                    steps=steps,
                    phases=phases,
                )
            )
            phases = ()


def _split_into_messages(completed: list[NodeStep]) -> Iterator[tuple[NodeStep, ...]]:
    """Split steps, in order, into messages of limited size."""
    steps: list[NodeStep] = []
    size_bytes = 0
    for step in completed:
        # A character takes at most six bytes, as an escape; a number and its punctuation take 32.
        size = sum(6 * len(name) + 32 for name in step.metrics) + 128
        if steps and (len(steps) == MAX_STEPS_PER_MESSAGE or size_bytes + size > MAX_MESSAGE_BYTES):
            yield tuple(steps)
            steps, size_bytes = [], 0
        steps.append(step)
        size_bytes += size
    if steps:
        yield tuple(steps)


def _merge(steps: list[RankStep], *, has_rank0: bool) -> NodeStep:
    """Merge a step that all ranks of the node have finished: the latest times, and the reduced metrics."""
    # A mean of finite numbers may be infinite, and several ranks together may exceed the limit on metrics.
    metrics, _ = split_valid_metrics(reduce_metrics(steps[0].metrics, [each.metrics for each in steps[1:]]))
    return NodeStep(
        step=steps[0].step,
        started=max(each.started for each in steps),
        ended=max(each.ended for each in steps),
        checkpoint_s=max(each.checkpoint_s for each in steps),
        metrics=metrics if has_rank0 else reduced_metrics(metrics),
    )
