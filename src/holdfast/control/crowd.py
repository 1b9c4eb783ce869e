"""Owns how the words of a large replica's nodes become few lines of the log.

A replica of more than `CROWD` nodes speaks as one: what its nodes say alike, and no decision waits for, is gathered
until all have said it, or for `GATHER_S`, and then written as one event (events/crowd.py). What may decide something,
such as the first failures of an attempt, is written at once and whole. Nothing gathered counts before it is written:
it is not acknowledged, so agents say it again to a controller's successor; and it is written before anything else is,
so that the log keeps each agent's words in their order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from holdfast.control.blame import gave_up, precedence, suspicion
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
    spans,
)

CROWD = 16
"""Nodes up to which a replica has a line in the log for every word of every node."""

GATHER_S = 1.0
"""Longest that a word is kept where others have yet to say the same; what all have said is written at once."""

FIRST_ONES = 8
"""How many failures, or hung ranks, of an attempt are written whole: those that may be its cause."""

Word = RanksStarted | RankHung | RankExited | RanksStopped

_KINDS = (RanksStarted, RankHung, RankExited, RanksStopped)
"""In the order in which an agent says them: an attempt is judged when the last of its nodes has stopped."""


class Crowd:
    """What large replicas' nodes have said and is not written yet."""

    def __init__(self) -> None:
        self.rounds = 0
        """How often words were given out; those taken in an earlier round are written."""
        self._words: dict[tuple[str, int], Word] = {}
        self._spoken: dict[tuple[type[Word], int], int] = defaultdict(int)
        """Nodes that said something, a bit each, by what and of which replica."""

    def __bool__(self) -> bool:
        return bool(self._words)

    def takes(self, state: State, word: AgentEvent) -> bool:
        """Keep a word, unless it is of another kind or something may be decided by it."""
        if not isinstance(word, Word):
            return False
        replica = state.replicas[word.replica]
        if replica.slots.bit_count() <= CROWD or word.attempt != replica.attempt:
            return False
        ending, judging = (replica.phase is phase for phase in (ReplicaPhase.STOPPING, ReplicaPhase.JUDGING))
        match word:
            case RankExited() if judging and gave_up(word):
                pass
            case RankExited() if not ending and (word.stopped or word.failed):
                return False
            case RankHung() if not ending and not judging:
                return False
            case _:
                pass
        self._words[word.source, word.seq] = word
        self._spoken[type(word), word.replica] |= 1 << word.node
        return True

    def wrote(self, taken_in: int) -> bool:
        """Whether words taken in that round are written."""
        return taken_in < self.rounds

    def complete(self, state: State) -> bool:
        """Whether every node of a replica that can say it has: that it started, or that nothing is left on it."""
        return any(
            kind in (RanksStarted, RanksStopped) and spoken & state.busy == state.busy & state.replicas[index].slots
            for (kind, index), spoken in self._spoken.items()
        )

    def give(self, state: State) -> list[AnyEvent]:
        """What was gathered, drawn together; from now on it is written."""
        if not self._words:
            return []
        self.rounds += 1
        words, self._words = list(self._words.values()), {}
        self._spoken.clear()
        firsts = _firsts(state, words)
        events: list[AnyEvent] = []
        for kind in _KINDS:
            alike: dict[object, list[Word]] = defaultdict(list)
            for word in words:
                if type(word) is kind:
                    alike[id(word) if id(word) in firsts else _likeness(word)].append(word)
            events.extend(map(_drawn_together, alike.values()))
        return events


def _likeness(word: Word) -> object:
    """Equal for words of a kind that can be drawn together."""
    if isinstance(word, RankExited):
        return (word.replica, word.how, word.code, word.stopped, word.left)
    return word.replica


def _firsts(state: State, words: Iterable[Word]) -> set[int]:
    """Those (by identity) that may be an attempt's cause, beside what is known of it."""
    firsts: set[int] = set()
    for replica in state.replicas:
        failures = [word for word in words if isinstance(word, RankExited) and word.failed]
        failures = [word for word in failures if word.replica == replica.replica]
        hangs = [word for word in words if isinstance(word, RankHung) and word.replica == replica.replica]
        firsts.update(map(id, sorted((*replica.exits, *failures), key=precedence)[:FIRST_ONES]))
        firsts.update(map(id, sorted((*replica.hangs, *hangs), key=suspicion)[:FIRST_ONES]))
    return firsts


def _drawn_together(group: list[Word]) -> AnyEvent:
    """One event that says what all of these do; a lone word stays as it is."""
    last = group[-1]
    if len(group) == 1:
        return last
    at, replica, attempt = max(word.at for word in group), last.replica, last.attempt
    match last:
        case RanksStarted():
            nodes = spans(word.node for word in group)
            ranks = spans(state.rank for word in group if isinstance(word, RanksStarted) for state in word.ranks)
            return NodesStarted(at=at, replica=replica, attempt=attempt, nodes=nodes, ranks=ranks)
        case RanksStopped():
            held = sorted((word.node, word.port) for word in group if isinstance(word, RanksStopped))
            nodes, ports = spans(node for node, _ in held), tuple(port for _, port in held)
            return NodesStopped(at=at, replica=replica, attempt=attempt, nodes=nodes, ports=ports)
        case RankExited(how=how, code=code, stopped=stopped):
            ranks = spans(word.rank for word in group if isinstance(word, RankExited))
            return RanksExited(
                at=at, replica=replica, attempt=attempt, ranks=ranks, how=how, code=code, stopped=stopped
            )
        case RankHung():
            ranks = spans(word.rank for word in group if isinstance(word, RankHung))
            return RanksHung(at=at, replica=replica, attempt=attempt, ranks=ranks)
