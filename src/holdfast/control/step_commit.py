"""Decides which steps are committed: those that every node of a replica has finished in the same attempt.

The evidence is a progress message from every node, or a complete checkpoint. The controller feeds it, thins what it
gives (step_sampling.py: later steps share a line), and writes the rest to the log (`Controller._commit`).

A step comes here from train/session/rank_coordinator.py and agent_client.py, over the rank's socket, to
agent/rank_reports.py, step_aggregator.py and controller_connection.py, over the agent's WebSocket, to
`Controller.agent_messages` and `_on_progress`. `_commit` calls `EventWriter.append` (events/log_writer.py).
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, field

from holdfast.events import StepCommitted
from holdfast.metrics.metric_catalog import reduce_metrics
from holdfast.protocol.orders import NodeStep, Progress


class _PendingStep(Struct):
    """A step that some nodes have finished: their latest times, and their metrics."""

    node_count: int = 0
    """Number of nodes that have."""
    head_step: NodeStep | None = None
    others: list[Mapping[str, float]] = field(default_factory=list[Mapping[str, float]])
    """Metrics of the other nodes."""
    started: float = 0.0
    ended: float = 0.0
    checkpoint_s: float = 0.0
    step_clock: bool = False

    def add(self, node_step: NodeStep, *, of_head: bool) -> None:
        self.node_count += 1
        if of_head:
            self.head_step = node_step
        else:
            self.others.append(node_step.metrics)
        self.started = max(self.started, node_step.started)
        self.ended = max(self.ended, node_step.ended)
        self.checkpoint_s = max(self.checkpoint_s, node_step.checkpoint_s)
        self.step_clock = self.step_clock or node_step.step_clock


class StepTracker(Struct):
    """Merges the nodes' progress in one attempt of a replica."""

    replica: int
    attempt: int
    nodes: tuple[int, ...]
    """The first is the head node, which has rank 0."""
    committed: int = 0
    """Highest step committed in this attempt."""
    written: int = 0
    """Highest step of this attempt that is in the log."""
    checkpointed: int = 0
    """Highest step of a complete checkpoint: every rank finished it, even if a node's progress message was lost."""
    _last_by_node: dict[int, int] = field(default_factory=dict[int, int])
    """The last step each node has finished."""
    _pending: dict[int, _PendingStep] = field(default_factory=dict[int, _PendingStep])
    """Steps not committed, by number."""

    def add(self, progress: Progress, at: float) -> list[StepCommitted]:
        """Add a node's progress; returns the newly committed steps. Repeated messages change nothing."""
        newest = max(self._last_by_node.get(progress.node, 0), self.committed)
        steps: list[StepCommitted] = []
        for node_step in progress.steps:
            if node_step.step <= newest:
                continue
            newest = node_step.step
            step = self._pending.setdefault(node_step.step, _PendingStep())
            step.add(node_step, of_head=progress.node == self.nodes[0])
            if step.node_count == len(self.nodes):
                steps.append(self._commit(node_step.step, step, at))
        self._last_by_node[progress.node] = newest
        return steps

    def ahead(self, node: int) -> int:
        """Steps that a node is ahead of others, as far as they are kept."""
        return min(len(self._pending), self._last_by_node.get(node, 0) - self.committed)

    def commit_checkpointed(self, at: float) -> list[StepCommitted]:
        """Commit the head's steps up to the checkpoint; other nodes' progress messages may be lost with them."""
        proven = [
            (number, step) for number, step in self._pending.items() if step.head_step and number <= self.checkpointed
        ]
        return [self._commit(number, step, at) for number, step in sorted(proven, key=lambda pair: pair[0])]

    def _commit(self, number: int, step: _PendingStep, at: float) -> StepCommitted:
        """A node finishes its steps in order, so no node will finish a lower one."""
        self.committed = number
        while self._pending and (lowest := next(iter(self._pending))) <= number:
            del self._pending[lowest]
        return StepCommitted(
            at=at,
            replica=self.replica,
            attempt=self.attempt,
            step=number,
            started=step.started,
            ended=step.ended,
            checkpoint_s=step.checkpoint_s,
            step_clock=step.step_clock,
            metrics=reduce_metrics(step.head_step.metrics if step.head_step else {}, step.others),
        )
