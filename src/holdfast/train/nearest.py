"""Owns a checkpoint of two tiers as it is found at a start: on the nodes, near, or in the store.

It is loaded from the nearest copy, file by file: this node's where it has the file, else the store's. One that only
nodes have is brought to the store before, where a rank lacks some of it. Refuses to own how it came there (tiers.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from holdfast.findings import Fault, Finding, Severity
from holdfast.train import seal
from holdfast.train.depot import Remains, damaged, unreachable
from holdfast.train.disk import Disk
from holdfast.train.ranks import Ranks
from holdfast.train.seal import FileSum, Seal
from holdfast.train.store import Store
from holdfast.train.tensors import Lost

Bring = Callable[[Seal, Collection[Path], Ranks], Finding | None]
"""Has files brought to the store, by all ranks together, and sealed there; returns what went wrong."""


class Held(NamedTuple):
    """A checkpoint as the ranks' nodes have it between them."""

    sealed: Seal
    holders: dict[str, int]
    """For each of its files a rank whose node has it."""
    everywhere: bool
    """Whether each rank's node has all of them."""


class Stored:
    """A checkpoint in the store alone."""

    def __init__(self, disk: Disk, store: Store, ranks: Ranks, step: int, stored: str) -> None:
        self.step = step
        self.where = f"{store.url.rstrip('/')}/{stored}"
        self.folder = disk.reading(stored)
        self._store = store
        self._ranks = ranks
        self._name = stored

    def sealed(self) -> Seal | str:
        found: Seal | str | Lost = ""
        if self._ranks.rank == 0:
            try:
                found = self._store.seal_of(self._name)
            except Exception as error:  # a client of any store: it raises what it likes
                found = Lost(f"{type(error).__name__}: {error}")
        found = self._ranks.from_first(found)
        if isinstance(found, Lost):
            raise unreachable(self._store.url, str(found))
        return found

    def have(self, names: Iterable[str]) -> None:
        for name in names:
            try:
                self._store.fetch(self._name, name, self.folder)
            except Exception as error:  # a client of any store: it raises what it likes
                raise Lost(f"{name}: {type(error).__name__}: {error}") from None

    def damage(self, name: str, expected: FileSum) -> str | None:
        return seal.damage(self.folder / name, expected)

    def set_aside(self, damage: str) -> Finding:
        where = ""
        if self._ranks.rank == 0:
            with suppress(Exception):  # where nothing can be renamed it stays, and is passed over again
                where = self._store.set_aside(self._name)
        return damaged(self._name, where, damage)


class Near:
    """A checkpoint that nodes have, or had a part of."""

    def __init__(self, disk: Disk, store: Store, ranks: Ranks, held: Held, stored: Stored | None, bring: Bring) -> None:
        self.step = held.sealed.step
        self.where = f"the nodes' own copy of {store.name(self.step)}"
        self.folder = disk.reading(f"near-{self.step}")
        self._disk = disk
        self._store = store
        self._bring = bring
        self._ranks = ranks
        self._held = held
        self._stored = stored

    def sealed(self) -> Seal | str:
        """Where some node lacks some file, and the store does too, the store gets it first."""
        held = self._held
        if self._stored is not None or held.everywhere or held.sealed.format != seal.FORMAT:  # which is refused
            return held.sealed
        gone = held.sealed.files.keys() - held.holders.keys()
        if gone:
            return Remains(f"{len(gone)} of its {len(held.sealed.files)} files are on no node, nor in the store")
        mine = [name for name, rank in held.holders.items() if rank == self._ranks.rank]
        paths = [self._disk.find(self.step, name, held.sealed.files[name]) for name in mine]
        problem = self._bring(held.sealed, [path for path in paths if path is not None], self._ranks)
        if problem is not None:
            raise unreachable(self._store.url, *problem.evidence)
        self._stored = Stored(self._disk, self._store, self._ranks, self.step, self._store.folder(self.step))
        return held.sealed

    def have(self, names: Iterable[str]) -> None:
        for name in names:
            near = self._disk.find(self.step, name, self._held.sealed.files[name])
            if near is not None:
                with suppress(FileExistsError):
                    (self.folder / name).hardlink_to(near)
            elif self._stored is not None:
                self._stored.have([name])
                with suppress(FileExistsError, FileNotFoundError):
                    (self.folder / name).hardlink_to(self._stored.folder / name)

    def damage(self, name: str, expected: FileSum) -> str | None:
        return seal.damage(self.folder / name, expected)

    def set_aside(self, damage: str) -> Finding:
        self._disk.forget(self.step)
        return _copy_lost(self.step, str(self.folder), damage)


class Spoilt:
    """A checkpoint in folders of nodes whose seals are damaged; other nodes, or the store, may have it whole."""

    def __init__(self, disk: Disk, step: int, damage: str) -> None:
        self.step = step
        self.where = f"the nodes' own copy of step {step}"
        self.folder = disk.folder(step)
        self._disk = disk
        self._damage = damage

    def sealed(self) -> Seal | str:
        return self._damage

    def have(self, names: Iterable[str]) -> None:
        """Nothing: it is never read."""

    def damage(self, name: str, expected: FileSum) -> str | None:
        return self._damage

    def set_aside(self, damage: str) -> Finding:
        self._disk.forget_damaged(self.step)
        return _copy_lost(self.step, self.where, damage)


def _copy_lost(step: int, where: str, damage: str) -> Finding:
    return Finding(
        code="checkpoint-copy-lost",
        severity=Severity.WARNING,
        what=f"what nodes had of the checkpoint of step {step} is not whole, and was removed",
        where=where,
        evidence=(damage,),
        remedy="nothing: training resumes from the copy in the store; look at the node's disk if files were "
        "damaged there",
        fault=Fault.CLUSTER,
    )


def between(parts: Iterable[list[tuple[Seal, set[str]]]]) -> list[Held]:
    """What all ranks' nodes have between them, from what each has, by rank."""
    parts = list(parts)
    found: dict[bytes, tuple[Seal, list[set[str]]]] = {}
    for rank, part in enumerate(parts):
        for sealed, names in part:
            _, held = found.setdefault(seal.encoded(sealed), (sealed, [set() for _ in parts]))
            held[rank] = names
    return [
        Held(
            sealed,
            {name: rank for rank, names in reversed(list(enumerate(held))) for name in names},
            all(names == sealed.files.keys() for names in held),
        )
        for sealed, held in found.values()
    ]
