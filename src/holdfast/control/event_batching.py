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

from holdfast.control.root_cause import hang_suspicion, precedence, timed_out_waiting
from holdfast.control.state import ReplicaPhase, State
from holdfast.events import (
    AgentEvent,
    AnyEvent,
    NodesStarted,
    NodesStopped,
    RankExited,
    RankHung,
    RanksExited,
    RanksHung,
    RanksStarted,
    RanksStopped,
    to_ranges,
)

BATCH_ABOVE_NODES = 16
"""Maximum nodes of a replica whose messages each get a log line."""

MAX_BATCH_DELAY_S = 1.0
"""Maximum seconds that a message is held while other nodes have yet to send the same."""

UNBATCHED_FAILURES = 8
"""Failures, or hung ranks, of an attempt that are written individually: those that may be its cause."""

BatchableEvent = RanksStarted | RankHung | RankExited | RanksStopped

_BATCHABLE_TYPES = (RanksStarted, RankHung, RankExited, RanksStopped)
"""In the order in which an agent sends them: an attempt is judged when the last of its nodes has stopped."""


class EventBatcher:
    """Messages of large replicas' nodes that are not written yet."""

    def __init__(self) -> None:
        self.rounds = 0
        """Number of flushes; messages offered in an earlier round are written."""
        self._pending: dict[tuple[str, int], BatchableEvent] = {}
        self._reported_nodes: dict[tuple[type[BatchableEvent], int], int] = defaultdict(int)
        """Nodes that sent a message, one bit each, by message type and replica."""

    def __bool__(self) -> bool:
        return bool(self._pending)

    def offer(self, state: State, word: AgentEvent) -> bool:
        """Hold a message, unless it is of another type or may decide something."""
        if not isinstance(word, BatchableEvent):
            return False
        replica = state.replicas[word.replica]
        if replica.slots.bit_count() <= BATCH_ABOVE_NODES or word.attempt != replica.attempt:
            return False
        ending, judging = (replica.phase is phase for phase in (ReplicaPhase.STOPPING, ReplicaPhase.HANG_SUSPECTED))
        match word:
            case RankExited() if judging and timed_out_waiting(word):
                pass
            case RankExited() if not ending and (word.stopped or word.failed):
                return False
            case RankHung() if not ending and not judging:
                return False
            case _:
                pass
        self._pending[word.source, word.seq] = word
        self._reported_nodes[type(word), word.replica] |= 1 << word.node
        return True

    def is_flushed(self, round_offered: int) -> bool:
        """Whether messages offered in that round are written."""
        return round_offered < self.rounds

    def is_complete(self, state: State) -> bool:
        """Whether every node of a replica that can has reported that it started, or that it stopped."""
        return any(
            kind in (RanksStarted, RanksStopped)
            and spoken & state.nodes_with_processes == state.nodes_with_processes & state.replicas[index].slots
            for (kind, index), spoken in self._reported_nodes.items()
        )

    def flush(self, state: State) -> list[AnyEvent]:
        """The held messages, merged; from now on they count as written."""
        if not self._pending:
            return []
        self.rounds += 1
        words, self._pending = list(self._pending.values()), {}
        self._reported_nodes.clear()
        firsts = _likely_causes(state, words)
        events: list[AnyEvent] = []
        for kind in _BATCHABLE_TYPES:
            alike: dict[object, list[BatchableEvent]] = defaultdict(list)
            for word in words:
                if type(word) is kind:
                    alike[id(word) if id(word) in firsts else _batch_key(word)].append(word)
            events.extend(map(_merge, alike.values()))
        return events


def _batch_key(word: BatchableEvent) -> object:
    """Equal for messages that can be merged."""
    if isinstance(word, RankExited):
        return (word.replica, word.reason, word.code, word.stopped, word.exited_on_request)
    return word.replica


def _likely_causes(state: State, words: Iterable[BatchableEvent]) -> set[int]:
    """The messages, by identity, that may be an attempt's cause, given the failures already known."""
    firsts: set[int] = set()
    for replica in state.replicas:
        failures = [word for word in words if isinstance(word, RankExited) and word.failed]
        failures = [word for word in failures if word.replica == replica.replica]
        hangs = [word for word in words if isinstance(word, RankHung) and word.replica == replica.replica]
        firsts.update(map(id, sorted((*replica.rank_failures, *failures), key=precedence)[:UNBATCHED_FAILURES]))
        firsts.update(map(id, sorted((*replica.hangs, *hangs), key=hang_suspicion)[:UNBATCHED_FAILURES]))
    return firsts


def _merge(group: list[BatchableEvent]) -> AnyEvent:
    """One event for all of these messages; a single message stays unchanged."""
    last = group[-1]
    if len(group) == 1:
        return last
    at, replica, attempt = max(word.at for word in group), last.replica, last.attempt
    match last:
        case RanksStarted():
            nodes = to_ranges(word.node for word in group)
            ranks = to_ranges(state.rank for word in group if isinstance(word, RanksStarted) for state in word.ranks)
            return NodesStarted(at=at, replica=replica, attempt=attempt, nodes=nodes, ranks=ranks)
        case RanksStopped():
            held = sorted((word.node, word.port) for word in group if isinstance(word, RanksStopped))
            nodes, ports = to_ranges(node for node, _ in held), tuple(port for _, port in held)
            return NodesStopped(at=at, replica=replica, attempt=attempt, nodes=nodes, ports=ports)
        case RankExited(reason=how, code=code, stopped=stopped):
            ranks = to_ranges(word.rank for word in group if isinstance(word, RankExited))
            return RanksExited(
                at=at, replica=replica, attempt=attempt, ranks=ranks, reason=how, code=code, stopped=stopped
            )
        case RankHung():
            ranks = to_ranges(word.rank for word in group if isinstance(word, RankHung))
            return RanksHung(at=at, replica=replica, attempt=attempt, ranks=ranks)
