"""Collects the stacks of a running replica's ranks, round by round, and compares them when all nodes have sent theirs.

They stay in memory: five dumps of 16,384 ranks have 50 MB. The next controller compares what it still gets.
"""

from __future__ import annotations

from holdfast.control.hang_stacks import layout_of
from holdfast.control.state import ReplicaState
from holdfast.diagnose.rank_stack import Stack
from holdfast.diagnose.stack_groups import group_stacks, to_event
from holdfast.diagnose.stack_rounds import judge_rounds
from holdfast.events import StacksCompared
from holdfast.events.requests import MAX_STACK_ROUNDS
from holdfast.job.spec import Job
from holdfast.protocol.orders import StackRound


class SlowStacks:
    """The rounds of the latest request for one replica."""

    def __init__(self) -> None:
        self._begin(0.0)

    def _begin(self, requested_at: float) -> None:
        self._requested_at = requested_at
        self._rounds: dict[int, dict[int, Stack]] = {}
        """By number of the round, the stack of each rank."""
        self._nodes: dict[int, set[int]] = {}
        """By number of the round, the nodes that have sent theirs."""
        self._node_of: dict[int, int] = {}
        """By rank."""
        self._judged = False

    def add(self, message: StackRound, job: Job, replica: ReplicaState, at: float) -> StacksCompared | None:
        """Add a node's dumps; what all show together, once, after the last round."""
        world_size = len(replica.members) * job.local_world_size
        if message.attempt != replica.attempt or message.node not in replica.members:
            return None
        if message.requested_at < self._requested_at or not 0 <= message.number < message.rounds <= MAX_STACK_ROUNDS:
            return None
        if message.requested_at > self._requested_at:
            self._begin(message.requested_at)
        stacks = {each.rank: each.frames for each in message.stacks if each.rank < world_size}
        self._rounds.setdefault(message.number, {}).update(stacks)
        self._nodes.setdefault(message.number, set()).add(message.node)
        self._node_of.update(dict.fromkeys(stacks, message.node))
        if self._judged or len(self._nodes.get(message.rounds - 1, ())) < len(replica.members):
            return None
        self._judged = True
        return self._compared(job, replica, message.rounds, at)

    def _compared(self, job: Job, replica: ReplicaState, asked: int, at: float) -> StacksCompared:
        world_size = len(replica.members) * job.local_world_size
        layout = layout_of(job, world_size)
        whole = [number for number, nodes in sorted(self._nodes.items()) if len(nodes) == len(replica.members)]
        rounds = [group_stacks(self._rounds[number], layout, world_size=world_size) for number in whole]
        found = judge_rounds(rounds, layout, asked=asked)
        self._rounds.clear()
        nodes = {self._node_of[rank] for rank in found.verdict.suspects if rank in self._node_of}
        return to_event(
            found.verdict,
            at=at,
            replica=replica.replica,
            attempt=replica.attempt,
            nodes=nodes,
            rounds=found.rounds,
            times=found.times,
        )
