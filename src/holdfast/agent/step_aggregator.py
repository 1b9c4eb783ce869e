"""Owns the steps of a node's ranks on their way to the controller: a step is said once every rank here has passed it.

They are said together, at most so often: a word for every step of every node would be more than one controller hears.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from holdfast.metrics.metric_catalog import reduce_metrics, reduced_metrics
from holdfast.protocol.metric_validation import split_valid_metrics
from holdfast.protocol.orders import NodeStep, Progress, StartRanks
from holdfast.protocol.rank_messages import RankStep

MAX_STEPS_PER_MESSAGE = 128
"""Steps in one message at most."""
MAX_MESSAGE_BYTES = 1 << 20
"""Estimated size of one message at most; the port refuses what is larger than 4 MiB (security/api_limits.py)."""
MAX_PENDING_STEPS = 20_000
"""Steps of one rank that are kept for the node's other ranks to pass; beyond them the oldest is forgotten."""


@dataclass
class _RankSteps:
    """What one rank has said of its steps."""

    last_step: int = -1
    pending: deque[RankStep] = field(default_factory=lambda: deque[RankStep](maxlen=MAX_PENDING_STEPS))
    """Steps that the node's other ranks have yet to pass."""

    def pop(self, step: int) -> RankStep | None:
        """Take the word for a step, and any for earlier ones, off the list."""
        while self.pending and self.pending[0].step <= step:
            word = self.pending.popleft()
            if word.step == step:
                return word
        return None


class StepAggregator:
    """The steps of one attempt's ranks on this node."""

    def __init__(self, order: StartRanks, *, node: int, send: Callable[[Progress], int]) -> None:
        self._order = order
        self._node = node
        self._send = send
        self._ranks: dict[int, _RankSteps] = {}
        self._expected = sum(launch.rank_count for launch in order.ranks)
        self._completed: list[NodeStep] = []
        self._flushed_at = 0.0
        self._flush_timer: asyncio.TimerHandle | None = None

    def add_rank(self, rank: int) -> None:
        """A rank will speak of its steps."""
        self._ranks[rank] = _RankSteps()

    def add(self, rank: int, step: RankStep) -> None:
        """A rank has passed a step, and so has the node if it was the last; times are on the agent's clock."""
        self._ranks[rank].last_step = step.step
        self._ranks[rank].pending.append(step)
        if len(self._ranks) < self._expected:
            return
        ranks = [one for _, one in sorted(self._ranks.items())]
        completed_step = min(one.last_step for one in ranks)
        while (first := next(iter(ranks[0].pending), None)) and first.step <= completed_step:
            words = [one.pop(first.step) for one in ranks]
            self._completed.append(_merge([word for word in words if word is not None], has_rank0=0 in self._ranks))
        if self._completed and self._flush_timer is None:
            wait_s = max(0.0, self._flushed_at + self._order.progress_interval_s - time.monotonic())
            self._flush_timer = asyncio.get_running_loop().call_later(wait_s, self.flush)

    def flush(self) -> None:
        """Say what all have passed; what is said next about this node's ranks comes after it."""
        if self._flush_timer is not None:
            self._flush_timer.cancel()
            self._flush_timer = None
        if not self._completed:
            return
        self._flushed_at = time.monotonic()
        completed, self._completed = self._completed, []
        for steps in _split_into_messages(completed):
            self._send(Progress(node=self._node, replica=self._order.replica, attempt=self._order.attempt, steps=steps))


def _split_into_messages(completed: list[NodeStep]) -> Iterator[tuple[NodeStep, ...]]:
    """Steps in order, as many at a time as a message can hold."""
    steps: list[NodeStep] = []
    size_bytes = 0
    for step in completed:
        # A character takes six bytes at most, as an escape; a number and its punctuation 32.
        size = sum(6 * len(name) + 32 for name in step.metrics) + 128
        if steps and (len(steps) == MAX_STEPS_PER_MESSAGE or size_bytes + size > MAX_MESSAGE_BYTES):
            yield tuple(steps)
            steps, size_bytes = [], 0
        steps.append(step)
        size_bytes += size
    if steps:
        yield tuple(steps)


def _merge(steps: list[RankStep], *, has_rank0: bool) -> NodeStep:
    """A step that all ranks of the node have passed: the latest times, and what their metrics come to."""
    # A mean of finite numbers may be infinite, and several ranks may have more metrics than one can.
    metrics, _ = split_valid_metrics(reduce_metrics(steps[0].metrics, [word.metrics for word in steps[1:]]))
    return NodeStep(
        step=steps[0].step,
        started=max(word.started for word in steps),
        ended=max(word.ended for word in steps),
        checkpoint_s=max(word.checkpoint_s for word in steps),
        metrics=metrics if has_rank0 else reduced_metrics(metrics),
    )
