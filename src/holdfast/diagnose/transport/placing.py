"""Owns whose each connection is: it parses what was gathered and gives every connection to a communicator.

Refuses to own reading the lines (reading.py), and which communicators of different processes are one (joining.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from holdfast.diagnose.transport import grammar
from holdfast.diagnose.transport.grammar import words
from holdfast.diagnose.transport.records import CHANNEL_BITS, Joined, Keys, ProcessRecord, Session
from holdfast.diagnose.transport.result import Evidence, Kind, Link, Way

LINE_BITS = 40
"""Of a place, those that are the line's number; above them is the number of the source."""
_CHANNELS = (1 << CHANNEL_BITS) - 1


class Placing:
    """Gives connections to communicators, process by process, and counts those that it cannot give."""

    def __init__(self, sources: Sequence[str], nodes: Mapping[int, Mapping[int, str]]) -> None:
        """`nodes` says for each communicator of a process (by its `id()`) on which node each rank of it is."""
        self._sources = sources
        self._nodes = nodes
        self._ways: dict[Way, Way] = {}
        self.torn = 0
        self.orphans: dict[int, list[Link]] = {}
        """Links of processes of whose communicators nothing was seen, by the process."""

    def place(self, number: int, record: ProcessRecord) -> None:
        """Give the connections of one process to its communicators; its sessions are used up."""
        for session in record.sessions:
            links = self._links(session.keys, record)
            if not record.joined:
                self.orphans.setdefault(number, []).extend(links)
            elif links:
                self._give(links, session, record)
        record.sessions.clear()

    def _give(self, links: list[Link], session: Session, record: ProcessRecord) -> None:
        if session.joined is not None and all(_fits(link, session.joined) for link in links):
            session.joined.links.extend(links)
            return
        candidates = [(self._agreement(links, joined), joined) for joined in record.joined]
        most = max(agreement for agreement, _ in candidates)
        best = [joined for agreement, joined in candidates if agreement == most]
        # Of equals the first that has no connection yet: communicators are mostly used in the order they were made.
        chosen = next((joined for joined in best if not joined.links), best[0])
        fitting = [link for link in links if _fits(link, chosen)]
        chosen.links.extend(fitting)
        self.torn += len(links) - len(fitting)
        if len(best) > 1:
            chosen.inferred += sum(link.channels.bit_count() for link in fitting)

    def _agreement(self, links: list[Link], joined: Joined) -> int:
        """How many connections are possible in a communicator, less those that its nodes contradict."""
        nodes = self._nodes.get(id(joined), {})
        score = 0
        for link in links:
            if not _fits(link, joined):
                continue
            score += 1
            sender, receiver = nodes.get(link.sender), nodes.get(link.receiver)
            if sender is not None and receiver is not None and link.way.kind is not Kind.COLLNET:
                within = link.way.kind is Kind.SHM or (link.way.kind is Kind.P2P and link.way.name != "MNNVL")
                score += 1 if within == (sender == receiver) else -2
        return score

    def _links(self, keys: Keys, record: ProcessRecord) -> list[Link]:
        links: list[Link] = []
        for key, packed in keys.items():
            channels = packed & _CHANNELS
            parsed = grammar.connection(key)
            if parsed is None:
                self.torn += 0 if grammar.is_ring(key) else channels.bit_count()
                continue
            sender, receiver, way = parsed
            links.append(Link(sender, receiver, channels, self._ways.setdefault(way, way)))
            if way.route not in record.evidence:
                place = packed >> CHANNEL_BITS
                source, line = self._sources[place >> LINE_BITS], place & ((1 << LINE_BITS) - 1)
                record.evidence[way.route] = Evidence(source, line, words(key))
        return links


def _fits(link: Link, joined: Joined) -> bool:
    return link.own == joined.rank and max(link.sender, link.receiver) < joined.size
