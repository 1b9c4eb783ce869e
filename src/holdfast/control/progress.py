"""Owns the rule for a committed step: one that every node of a replica has passed in the same attempt.

Every node's word of it says so, or a complete checkpoint does.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from holdfast.events import StepCommitted
from holdfast.events.orders import Progress, StepPassed


@dataclass
class StepLedger:
    """Puts the nodes' progress in one attempt of a replica together."""

    replica: int
    attempt: int
    nodes: tuple[int, ...]
    """The first is the head: its metrics are the replica's."""
    committed: int = 0
    """Highest step committed in this attempt."""
    proven: int = 0
    """Highest step of a complete checkpoint: every rank finished it, whether or not its node's word of it arrived."""
    _passed: dict[int, deque[StepPassed]] = field(default_factory=dict[int, "deque[StepPassed]"])

    def take(self, progress: Progress, at: float) -> list[StepCommitted]:
        """Add a node's word; the steps that are now whole. Words heard twice change nothing."""
        queue = self._passed.setdefault(progress.node, deque())
        newest = queue[-1].step if queue else self.committed
        for step in progress.steps:
            if step.step > newest:
                queue.append(step)
                newest = step.step
        steps: list[StepCommitted] = []
        while whole := self._next_whole():
            steps.append(self._commit(whole, at))
        return steps

    def ahead(self, node: int) -> int:
        """Steps that a node has passed, and others have not."""
        return len(self._passed.get(node, ()))

    def settle(self, at: float) -> list[StepCommitted]:
        """Commit the head's words up to the proven step; for when other nodes' words of it may have died with them."""
        steps: list[StepCommitted] = []
        queue = self._passed.get(self.nodes[0])
        while queue and queue[0].step <= self.proven:
            head = queue.popleft()
            others = (step for node in self.nodes[1:] for step in self._passed.get(node, ()) if step.step == head.step)
            steps.append(self._commit([head, *others], at))
        return steps

    def _commit(self, words: list[StepPassed], at: float) -> StepCommitted:
        """The step these words are about, the head node's first."""
        head = words[0]
        self.committed = head.step
        return StepCommitted(
            at=at,
            replica=self.replica,
            attempt=self.attempt,
            step=head.step,
            started=max(step.started for step in words),
            ended=max(step.ended for step in words),
            checkpoint_s=max(step.checkpoint_s for step in words),
            metrics=head.metrics,
        )

    def _next_whole(self) -> list[StepPassed] | None:
        """The lowest step that every node has passed, taken from all queues; the head node's word first."""
        queues = [self._passed.get(node) for node in self.nodes]
        while all(queues):
            present = [queue for queue in queues if queue]
            highest = max(queue[0].step for queue in present)
            behind = [queue for queue in present if queue[0].step < highest]
            if not behind:
                return [queue.popleft() for queue in present]
            for queue in behind:
                queue.popleft()
        return None
