"""Owns whose each connection is: it gives every connection of a process to one of its communicators.

Refuses to own reading the lines (reading.py), and which communicators of different processes are one (joining.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter

from holdfast.diagnose.transport.records import Joined, ProcessRecord, Session, ThreadRecord
from holdfast.diagnose.transport.result import COLLNET, P2P, SHM, Link

_NO_NODES: Mapping[int, str] = {}
_SENDER, _RECEIVER = attrgetter("sender"), attrgetter("receiver")


class Placing:
    """Gives connections to communicators, process by process, and keeps those that it cannot give."""

    def __init__(self, nodes: Mapping[int, Mapping[int, str]]) -> None:
        """`nodes` says for each communicator of a process (by its `id()`) on which node each rank of it is."""
        self._nodes = nodes
        self.orphans: dict[int, list[Link]] = {}
        """Connections of processes of whose communicators nothing was seen, by the process."""
        self.astray = 0
        """Connections that no communicator of their process can have: they are torn."""

    def place(self, number: int, record: ProcessRecord) -> None:
        """Give the connections of one process to its communicators; its sessions are used up."""
        last: dict[ThreadRecord, Joined] = {}
        for session in record.sessions:
            if record.joined:
                self._give(session, record.joined, last)
            else:
                self.orphans.setdefault(number, []).extend(session.links)
        record.sessions.clear()

    def _give(self, session: Session, joined: Sequence[Joined], last: dict[ThreadRecord, Joined]) -> None:
        links = session.links
        own = {link.own for link in links}
        highest = max(*map(_SENDER, links), *map(_RECEIVER, links))
        told = session.joined
        if told is not None and own == {told.rank} and highest < told.size:
            possible = [told]
        else:
            possible = [one for one in joined if own == {one.rank} and highest < one.size]
        if len(possible) > 1:
            scores = [
                (_agreement(links, self._nodes.get(id(one), _NO_NODES)), session.stage not in one.stages)
                for one in possible
            ]
            possible = [one for one, score in zip(possible, scores, strict=True) if score == max(scores)]
        if possible:
            # Of equals that which this thread connected last, since a thread of its own connects each; or else the
            # first that has no connection yet: communicators are mostly used in the order they were made.
            of_thread = last.get(session.thread)
            chosen = min(possible, key=lambda one: (one is not of_thread, bool(one.links)))
            last[session.thread] = chosen
            chosen.links.extend(links)
            chosen.stages.update({session.stage} - {b""})
            if len(possible) > 1:
                chosen.inferred += sum(link.channels.bit_count() for link in links)
        else:
            self._give_each(links, session.joined, joined)

    def _give_each(self, links: Sequence[Link], first: Joined | None, joined: Sequence[Joined]) -> None:
        """Give connections one by one where no communicator can have them all."""
        candidates = [*([first] if first else []), *joined]
        for link in links:
            highest = max(link.sender, link.receiver)
            chosen = next((one for one in candidates if one.rank == link.own and highest < one.size), None)
            if chosen is None:
                self.astray += link.channels.bit_count()
            else:
                chosen.links.append(link)
                chosen.inferred += 0 if chosen is first else link.channels.bit_count()


def _agreement(links: Sequence[Link], nodes: Mapping[int, str]) -> int:
    """How many connections a communicator's nodes confirm, less those that they contradict."""
    score = 0
    for link in links:
        sender, receiver = nodes.get(link.sender), nodes.get(link.receiver)
        if sender is not None and receiver is not None and link.way.kind is not COLLNET:
            within = link.way.kind is SHM or (link.way.kind is P2P and link.way.name != "MNNVL")
            score += 1 if within == (sender == receiver) else -1
    return score
