"""Owns the steps of a node's ranks on their way to the controller: a step is said once every rank here has passed it.

They are said together, at most so often: a word for every step of every node would be more than one controller hears.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from holdfast.events.metrics import sift
from holdfast.events.orders import Progress, StartRanks, StepPassed
from holdfast.events.rank import Step
from holdfast.measure.catalog import shared, together

STEPS_TOGETHER = 128
"""Steps in one message at most."""
TOGETHER_BYTES = 1 << 20
"""Estimated size of one message at most; the port refuses what is larger than 4 MiB (guard/limits.py)."""
AHEAD_STEPS = 20_000
"""Steps of one rank that are kept for the node's other ranks to pass; beyond them the oldest is forgotten."""


@dataclass
class _Rank:
    """What one rank has said of its steps."""

    step: int = -1
    words: deque[Step] = field(default_factory=lambda: deque[Step](maxlen=AHEAD_STEPS))
    """Steps that the node's other ranks have yet to pass."""

    def word(self, step: int) -> Step | None:
        """Take the word for a step, and any for earlier ones, off the list."""
        while self.words and self.words[0].step <= step:
            word = self.words.popleft()
            if word.step == step:
                return word
        return None


class March:
    """The steps of one attempt's ranks on this node."""

    def __init__(self, order: StartRanks, *, node: int, say: Callable[[Progress], int]) -> None:
        self._order = order
        self._node = node
        self._say = say
        self._ranks: dict[int, _Rank] = {}
        self._expected = sum(launch.ranks for launch in order.ranks)
        self._passed: list[StepPassed] = []
        self._said_at = 0.0
        self._flush: asyncio.TimerHandle | None = None

    def enter(self, rank: int) -> None:
        """A rank will speak of its steps."""
        self._ranks[rank] = _Rank()

    def take(self, rank: int, step: Step) -> None:
        """A rank has passed a step, and so has the node if it was the last; times are on the agent's clock."""
        self._ranks[rank].step = step.step
        self._ranks[rank].words.append(step)
        if len(self._ranks) < self._expected:
            return
        ranks = [one for _, one in sorted(self._ranks.items())]
        whole = min(one.step for one in ranks)
        while (first := next(iter(ranks[0].words), None)) and first.step <= whole:
            words = [one.word(first.step) for one in ranks]
            self._passed.append(_together([word for word in words if word is not None], head=0 in self._ranks))
        if self._passed and self._flush is None:
            wait_s = max(0.0, self._said_at + self._order.progress_s - time.monotonic())
            self._flush = asyncio.get_running_loop().call_later(wait_s, self.say)

    def say(self) -> None:
        """Say what all have passed; what is said next about this node's ranks comes after it."""
        if self._flush is not None:
            self._flush.cancel()
            self._flush = None
        if not self._passed:
            return
        self._said_at = time.monotonic()
        passed, self._passed = self._passed, []
        for steps in _in_messages(passed):
            self._say(Progress(node=self._node, replica=self._order.replica, attempt=self._order.attempt, steps=steps))


def _in_messages(passed: list[StepPassed]) -> Iterator[tuple[StepPassed, ...]]:
    """Steps in order, as many at a time as a message can hold."""
    steps: list[StepPassed] = []
    size_bytes = 0
    for step in passed:
        # A character takes six bytes at most, as an escape; a number and its punctuation 32.
        size = sum(6 * len(name) + 32 for name in step.metrics) + 128
        if steps and (len(steps) == STEPS_TOGETHER or size_bytes + size > TOGETHER_BYTES):
            yield tuple(steps)
            steps, size_bytes = [], 0
        steps.append(step)
        size_bytes += size
    if steps:
        yield tuple(steps)


def _together(words: list[Step], *, head: bool) -> StepPassed:
    """A step that all ranks of the node have passed: the latest times, and what their metrics come to."""
    # A mean of finite numbers may be infinite, and several ranks may have more metrics than one can.
    metrics, _ = sift(together(words[0].metrics, [word.metrics for word in words[1:]]))
    return StepPassed(
        step=words[0].step,
        started=max(word.started for word in words),
        ended=max(word.ended for word in words),
        checkpoint_s=max(word.checkpoint_s for word in words),
        metrics=metrics if head else shared(metrics),
    )
