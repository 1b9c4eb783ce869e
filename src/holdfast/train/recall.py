"""Owns what the nodes' memories hold at a start of the states that were copied there, and the way to whom they are of.

All ranks go on from the same step or none goes on from memory: the newest step of which every rank's state lies on some
node, wherever that is, undamaged. Refuses to own how copies came there (peercopies.py).
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from holdfast.findings import Fault, Finding, Severity
from holdfast.train import handover
from holdfast.train.handover import MEMORY, Handed, Head, Origin
from holdfast.train.ranks import Ranks

EVIDENCE = 8


class Kept(NamedTuple):
    """The state of some rank, in the memory of a rank's node."""

    rank: int
    origin: Origin


class Choice(NamedTuple):
    """What is gone on from."""

    origin: Origin
    holders: tuple[int, ...]
    """For each rank the one on whose node its state lies: itself where it can be."""


def chosen(parts: Sequence[Collection[Kept]]) -> Choice | None:
    """The newest of what all ranks have, by rank; None where of no step every rank's state is there. Pure."""
    holders: dict[Origin, dict[int, int]] = {}
    for holder, part in enumerate(parts):
        for kept in part:
            of = holders.setdefault(kept.origin, {})
            of[kept.rank] = holder if kept.rank == holder else of.get(kept.rank, holder)
    whole = [origin for origin, of in holders.items() if origin.world_size == len(parts) == len(of)]
    if not whole:
        return None
    newest = max(whole, key=lambda origin: (origin.step, origin.writer.attempt))
    return Choice(newest, tuple(holders[newest][rank] for rank in range(len(parts))))


class Recall:
    """What lies in memory at a start; every rank makes one, and makes the same calls."""

    def __init__(self, memories: Iterable[Path], ranks: Ranks) -> None:
        self._ranks = ranks
        self._lying = [handed for handed in map(Handed.lying, memories) if handed is not None]
        self._fetched: int | None = None
        """Descriptor of the memory that a fetched state lies in."""
        self._parts = ranks.to_first([Kept(handed.rank, handed.origin) for handed in self._lying])
        """On rank 0."""
        self._choice = ranks.from_first(chosen(self._parts))

    @property
    def newest(self) -> int:
        """The step that all ranks have in memory; 0 where there is none."""
        return self._choice.origin.step if self._choice is not None else 0

    def state(self) -> tuple[Handed | None, list[Finding]]:
        """This rank's state, where all have theirs of one step; and on rank 0 what is to be said of that."""
        noticed: list[Finding] = []
        while (choice := self._choice) is not None:
            handed = self._have(choice)
            damages = self._ranks.to_first(handed.damage() if handed is not None else "it did not come as it was sent")
            bad = {rank: damage for rank, damage in enumerate(damages) if damage is not None}
            noticed += [self._set_aside(Kept(rank, choice.origin), choice.holders[rank], bad[rank]) for rank in bad]
            if not self._ranks.from_first(bool(bad)):
                return handed, [*noticed, _recalled(choice)]
            self._choice = self._ranks.from_first(chosen(self._parts))
        return None, [*noticed, _incomplete(self._parts)] if any(self._parts) else noticed

    def _set_aside(self, kept: Kept, holder: int, damage: str) -> Finding:
        self._parts[holder] = [each for each in self._parts[holder] if each != kept]
        return _damaged(kept, holder, damage)

    def close(self) -> None:
        """Give back what was fetched."""
        if self._fetched is not None:
            os.close(self._fetched)
            self._fetched = None

    def _have(self, choice: Choice) -> Handed | None:
        """This rank's state, from another node where it is not here; what others lack is sent to them meanwhile."""
        me, holders = self._ranks.rank, choice.holders
        sent = [
            self._ranks.send(part, rank)
            for rank, holder in enumerate(holders)
            if holder == me != rank
            for part in _parts(self._lies(Kept(rank, choice.origin)))
        ]
        handed = self._fetch(holders[me]) if holders[me] != me else self._lies(Kept(me, choice.origin))
        for each in sent:
            each()
        return handed

    def _lies(self, kept: Kept) -> Handed:
        return next(handed for handed in self._lying if (handed.rank, handed.origin) == kept)

    def _fetch(self, holder: int) -> Handed | None:
        self.close()
        self._fetched = os.memfd_create("holdfast-recall", os.MFD_CLOEXEC)
        memory = Path(f"/proc/self/fd/{self._fetched}")
        words = torch.zeros(len(Head._fields), dtype=torch.int64)
        self._ranks.receive(words, holder)
        head = Head(*words.tolist())
        os.ftruncate(self._fetched, head.begin)
        with mmap.mmap(self._fetched, head.begin) as room:
            into = handover.body(room, head)
            self._ranks.receive(into, holder)
            del into  # it keeps the mapping open
        index = torch.empty(head.length, dtype=torch.uint8)
        self._ranks.receive(index, holder)
        handover.accept(memory, head, index.numpy().data)
        return Handed.lying(memory)


def _parts(handed: Handed) -> Sequence[torch.Tensor]:
    """What is sent of a state, in order."""
    with open(handed.memory, "rb") as file:
        room = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    words = torch.tensor(handed.head, dtype=torch.int64)
    return words, handover.body(room, handed.head), handover.index_of(handed.memory, handed.head)


def _recalled(choice: Choice) -> Finding:
    fetched = [
        f"rank {rank}: from rank {holder}'s node" for rank, holder in enumerate(choice.holders) if rank != holder
    ]
    return Finding(
        code="state-recalled",
        severity=Severity.INFO,
        what=f"the ranks go on after step {choice.origin.step} from copies in {MEMORY}, {len(fetched)} of "
        f"{len(choice.holders)} from another node's",
        where=MEMORY,
        evidence=tuple(fetched[:EVIDENCE]),
        remedy="Nothing: each is what it summed up to when it was copied.",
    )


def _damaged(kept: Kept, holder: int, damage: str) -> Finding:
    return Finding(
        code="peer-copy-damaged",
        severity=Severity.WARNING,
        what=f"a copy of rank {kept.rank}'s state of step {kept.origin.step} is damaged, so another is gone on from",
        where=f"the memory of rank {holder}'s node",
        evidence=(damage,),
        remedy="Test that node's memory.",
        fault=Fault.CLUSTER,
    )


def _incomplete(parts: Sequence[Collection[Kept]]) -> Finding:
    """There is something, and of no step all of it."""
    there: dict[Origin, set[int]] = {}
    for kept in (kept for part in parts for kept in part):
        there.setdefault(kept.origin, set()).add(kept.rank)
    newest = sorted(there, key=lambda origin: (origin.step, origin.writer.attempt), reverse=True)
    words = [f"step {each.step}: of {len(there[each])} of {each.world_size} ranks" for each in newest]
    return Finding(
        code="peer-copies-incomplete",
        severity=Severity.WARNING,
        what=f"no step is in {MEMORY} as all {len(parts)} ranks need it, so the newest checkpoint is gone on from",
        where=MEMORY,
        evidence=tuple(words[:EVIDENCE]),
        remedy="Nothing, if nodes that held each other's copies were lost together, or the number of ranks is another.",
        fault=Fault.CLUSTER,
    )
