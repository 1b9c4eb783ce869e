"""Batches the messages of a large replica's nodes into few log lines.

In a replica of more than `BATCH_ABOVE_NODES` nodes, equal messages that no decision waits for are held until all nodes
have sent them, or for `MAX_BATCH_DELAY_S`, and then written as one event (events/batched.py). Messages that may decide
something, such as the first failures of an attempt, are written immediately and individually. A held message has no
effect before it is written: it is not acknowledged, so agents resend it to the next controller. It is written before
any other event, so the log keeps each agent's messages in order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from holdfast import events
from holdfast.control.node_set import NodeSet
from holdfast.control.root_cause import by_hang_suspicion, hang_culprits, precedence, timed_out_waiting
from holdfast.control.state import ReplicaPhase, State

BATCH_ABOVE_NODES = 16
"""Maximum nodes of a replica whose messages each get a log line."""

MAX_BATCH_DELAY_S = 1.0
"""Maximum seconds that a message is held while other nodes have yet to send the same."""

UNBATCHED_FAILURES = 8
"""Failures, or hung ranks, of an attempt that are written individually: those that may be its cause."""

BatchableEvent = events.RanksStarted | events.RankHung | events.RankExited | events.RanksStopped

_BATCHABLE_TYPES = (events.RanksStarted, events.RankHung, events.RankExited, events.RanksStopped)
"""In the order in which an agent sends them: an attempt is judged when the last of its nodes has stopped."""


class EventBatcher:
    """Messages of large replicas' nodes that are not written yet."""

    def __init__(self) -> None:
        self.rounds = 0
        """Number of flushes; messages offered in an earlier round are written."""
        self._pending: dict[tuple[str, int], BatchableEvent] = {}
        self._reported_nodes: dict[tuple[type[BatchableEvent], int], NodeSet] = defaultdict(NodeSet)
        """Nodes that sent a message, by message type and replica."""

    def __bool__(self) -> bool:
        return bool(self._pending)

    @property
    def held(self) -> tuple[BatchableEvent, ...]:
        """Messages that are not written yet."""
        return tuple(self._pending.values())

    def offer(self, state: State, message: events.AgentEvent) -> bool:
        """Hold a message, unless it is of another type or may decide something."""
        if not isinstance(message, BatchableEvent):
            return False
        replica = state.replicas[message.replica]
        if len(replica.slots) <= BATCH_ABOVE_NODES or message.attempt != replica.attempt:
            return False
        ending, hang_suspected = (
            replica.phase is phase for phase in (ReplicaPhase.STOPPING, ReplicaPhase.HANG_SUSPECTED)
        )
        match message:
            case events.RankExited() if hang_suspected and timed_out_waiting(message):
                pass
            case events.RankExited() if not ending and (message.stopped or message.failed):
                return False
            case events.RankHung(unless_others_work=False) if not ending and not hang_suspected:
                return False
            case _:
                pass
        self._pending[message.source, message.seq] = message
        key = type(message), message.replica
        self._reported_nodes[key] = self._reported_nodes[key].with_member(message.node)
        return True

    def is_flushed(self, round_offered: int) -> bool:
        """Whether messages offered in that round are written."""
        return round_offered < self.rounds

    def is_complete(self, state: State) -> bool:
        """Whether every node of a replica that can has reported that it started, or that it stopped."""
        return any(
            kind in (events.RanksStarted, events.RanksStopped)
            and state.nodes_with_processes & state.replicas[index].slots <= reported
            for (kind, index), reported in self._reported_nodes.items()
        )

    def flush(self, state: State) -> list[events.AnyEvent]:
        """The held messages, merged; from now on they count as written."""
        if not self._pending:
            return []
        self.rounds += 1
        messages, self._pending = list(self._pending.values()), {}
        self._reported_nodes.clear()
        firsts = _likely_causes(state, messages)
        merged: list[events.AnyEvent] = []
        for kind in _BATCHABLE_TYPES:
            batches: dict[object, list[BatchableEvent]] = defaultdict(list)
            for message in messages:
                if type(message) is kind:
                    batches[id(message) if id(message) in firsts else _batch_key(message)].append(message)
            merged.extend(map(_merge, batches.values()))
        return merged


def _batch_key(message: BatchableEvent) -> object:
    """Equal for messages that can be merged."""
    if isinstance(message, events.RankExited):
        return (message.replica, message.reason, message.code, message.stopped, message.exited_on_request)
    if isinstance(message, events.RankHung):
        return (message.replica, message.unless_others_work)
    return message.replica


def _likely_causes(state: State, messages: Iterable[BatchableEvent]) -> set[int]:
    """The messages, by identity, that may be an attempt's cause, given the failures already known."""
    firsts: set[int] = set()
    for replica in state.replicas:
        own = [message for message in messages if message.replica == replica.replica]
        failures = [one for one in own if isinstance(one, events.RankExited) and one.failed]
        hangs = [one for one in own if isinstance(one, events.RankHung)]
        firsts.update(map(id, sorted((*replica.rank_failures, *failures), key=precedence)[:UNBATCHED_FAILURES]))
        if hangs:
            hangs = [*replica.hangs, *hangs]
            firsts.update(map(id, by_hang_suspicion(hangs, hang_culprits(hangs))[:UNBATCHED_FAILURES]))
    return firsts


def _merge(group: list[BatchableEvent]) -> events.AnyEvent:
    """One event for all of these messages; a single message stays unchanged."""
    last = group[-1]
    if len(group) == 1:
        return last
    at, replica, attempt = max(message.at for message in group), last.replica, last.attempt
    match last:
        case events.RanksStarted():
            nodes = events.to_ranges(message.node for message in group)
            ranks = events.to_ranges(
                state.rank for message in group if isinstance(message, events.RanksStarted) for state in message.ranks
            )
            return events.NodesStarted(at=at, replica=replica, attempt=attempt, nodes=nodes, ranks=ranks)
        case events.RanksStopped():
            held = sorted((message.node, message.port) for message in group if isinstance(message, events.RanksStopped))
            nodes, ports = events.to_ranges(node for node, _ in held), tuple(port for _, port in held)
            return events.NodesStopped(at=at, replica=replica, attempt=attempt, nodes=nodes, ports=ports)
        case events.RankExited(reason=how, code=code, stopped=stopped):
            ranks = events.to_ranges(message.rank for message in group if isinstance(message, events.RankExited))
            return events.RanksExited(
                at=at, replica=replica, attempt=attempt, ranks=ranks, reason=how, code=code, stopped=stopped
            )
        case events.RankHung(unless_others_work=provisional):
            hung = [message for message in group if isinstance(message, events.RankHung)]
            return events.RanksHung(
                at=at,
                replica=replica,
                attempt=attempt,
                ranks=events.to_ranges(message.rank for message in hung),
                unless_others_work=provisional,
                last_step_at=max(message.last_step_at for message in hung),
            )
