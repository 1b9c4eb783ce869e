"""Assigns every connection of a process to one of its communicators.

merge.py joins communicators of different processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter

from holdfast.diagnose.nccl_transport.process_records import CommInit, ConnectionBatch, ProcessRecord, ThreadRecord
from holdfast.diagnose.nccl_transport.transport_report import COLLNET, P2P, SHM, Link

_NO_NODES: Mapping[int, str] = {}
_SENDER, _RECEIVER = attrgetter("sender"), attrgetter("receiver")


class LinkAssigner:
    """Assigns connections to communicators, process by process, and keeps those that it cannot assign."""

    def __init__(self, nodes: Mapping[int, Mapping[int, str]]) -> None:
        """`nodes` gives, for each communicator of a process (by its `id()`), the node of each rank."""
        self._nodes = nodes
        self.orphans: dict[int, list[Link]] = {}
        """Connections of processes without any communicator in the logs, by the process."""
        self.unassigned = 0
        """Connections that fit no communicator of their process: they are torn."""

    def assign(self, number: int, record: ProcessRecord) -> None:
        """Assigns the connections of one process to its communicators; consumes its sessions."""
        last: dict[ThreadRecord, CommInit] = {}
        for session in record.batches:
            if record.comms:
                self._assign_batch(session, record.comms, last)
            else:
                self.orphans.setdefault(number, []).extend(session.links)
        record.batches.clear()

    def _assign_batch(
        self, session: ConnectionBatch, joined: Sequence[CommInit], last: dict[ThreadRecord, CommInit]
    ) -> None:
        links = session.links
        own = {link.reported_by for link in links}
        highest = max(*map(_SENDER, links), *map(_RECEIVER, links))
        known = session.comm
        if known is not None and own == {known.rank} and highest < known.size:
            possible = [known]
        else:
            possible = [one for one in joined if own == {one.rank} and highest < one.size]
        if len(possible) > 1:
            scores = [
                (_agreement_score(links, self._nodes.get(id(one), _NO_NODES)), session.stage not in one.stages)
                for one in possible
            ]
            possible = [one for one, score in zip(possible, scores, strict=True) if score == max(scores)]
        if possible:
            # Of equals, the communicator that this thread connected last, since each has its own thread; else the first
            # without a connection yet: communicators are mostly used in the order they were created.
            of_thread = last.get(session.thread)
            chosen = min(possible, key=lambda one: (one is not of_thread, bool(one.links)))
            last[session.thread] = chosen
            chosen.links.extend(links)
            chosen.stages.update({session.stage} - {b""})
            chosen.mixed = chosen.mixed or session.mixed
            if len(possible) > 1:
                chosen.inferred += sum(link.channels.bit_count() for link in links)
        else:
            self._assign_each(links, session.comm, joined)

    def _assign_each(self, links: Sequence[Link], first: CommInit | None, joined: Sequence[CommInit]) -> None:
        """Assigns connections one by one where no communicator fits them all."""
        candidates = [*([first] if first else []), *joined]
        for link in links:
            highest = max(link.sender, link.receiver)
            chosen = next((one for one in candidates if one.rank == link.reported_by and highest < one.size), None)
            if chosen is None:
                self.unassigned += link.channels.bit_count()
            else:
                chosen.links.append(link)
                chosen.mixed = True
                chosen.inferred += 0 if chosen is first else link.channels.bit_count()


def _agreement_score(links: Sequence[Link], nodes: Mapping[int, str]) -> int:
    """How many connections a communicator's nodes confirm, less those that they contradict."""
    score = 0
    for link in links:
        sender, receiver = nodes.get(link.sender), nodes.get(link.receiver)
        if sender is not None and receiver is not None and link.link_type.kind is not COLLNET:
            within = link.link_type.kind is SHM or (link.link_type.kind is P2P and link.link_type.name != "MNNVL")
            score += 1 if within == (sender == receiver) else -1
    return score
