"""What a handler of the state machine works on: the state so far, the commands, and what else follows."""

from __future__ import annotations

from enum import Enum
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from holdfast.control.commands import Command, RecordEvent, Send
from holdfast.control.state import NodeState, ReplicaState, State, Timer
from holdfast.events import AnyEvent, FindingRaised
from holdfast.findings import Finding
from holdfast.job.spec import Job
from holdfast.protocol.orders import Order


class FollowUp(Enum):
    """What an event leads to in a replica, handled like an event before the next one."""

    ADVANCE = "advance"
    """Its nodes or its ranks have changed: start, or judge what has ended, as far as they allow."""
    STOP = "stop"
    """Its attempt is over, and its ranks must stop."""
    SCALE_UP = "add-nodes"
    """It may have spare nodes."""
    LOSE_FAILED = "lose-failed"
    """A node has failed its checks."""
    PROBED = "probed"
    """Perhaps no node of its probe still runs it."""
    REPLAYED = "replayed"
    """Perhaps no node of its replay still runs it."""
    REFILL = "refill"
    """One of its node slots, or a standby's, is empty."""
    RESUME = "resume"
    """Another controller has taken over."""
    END = "end"
    """The run ends."""
    FINISH = "finish"
    """It is done: none of its ranks will start again."""


class Context(Struct):
    """One event being handled; the machine creates it, and handlers change it."""

    job: Job
    state: State
    at: float
    """Unix seconds of the event."""
    commands: list[Command] = field(default_factory=list[Command])
    raised: list[tuple[FollowUp, int]] = field(default_factory=list[tuple[FollowUp, int]])
    """What follows from the event in a replica or a node slot, in the order in which it is handled."""

    def emit(self, *commands: Command) -> None:
        self.commands.extend(commands)

    def send(self, order: Order, nodes: tuple[int, ...] | None) -> None:
        """Send an order to these nodes; None means all that are connected."""
        self.emit(Send(order=order, nodes=nodes))

    def record(self, event: AnyEvent) -> None:
        """Log a decision."""
        self.emit(RecordEvent(event=event))

    def report(self, finding: Finding) -> None:
        self.record(FindingRaised(at=self.at, finding=finding))

    def raise_(self, *follow_ups: FollowUp, index: int) -> None:
        """Have these follow-ups handled, in this order, when the current handler returns."""
        self.raised.extend((follow_up, index) for follow_up in follow_ups)

    def change(self, **changes: Any) -> None:
        self.state = replace(self.state, **changes)

    def change_replica(self, index: int, **changes: Any) -> ReplicaState:
        replica = replace(self.state.replicas[index], **changes)
        self.state = self.state.with_replica(replica)
        return replica

    def change_node(self, index: int, **changes: Any) -> NodeState:
        node = replace(self.state.nodes[index], **changes)
        self.state = self.state.with_nodes((node,))
        return node

    def timer(self, timer: Timer, index: int) -> float | None:
        """When a timer expires; None if it is not set."""
        return self.state.timers.get(timer.key(index))

    def set_timer(self, timer: Timer, index: int, at: float | None, *, earliest: bool = False) -> None:
        """Set a timer, or delete it with None; with `earliest` an earlier time stays."""
        if earliest and at is not None:
            at = min(at, self.state.timers.get(timer.key(index), at))
        self.state = self.state.with_timer(timer.key(index), at)

    def clear_timers(self, index: int, *timers: Timer) -> None:
        for timer in timers:
            self.set_timer(timer, index, None)
