"""Owns checkpoints in two tiers: saved on the nodes' own disks, brought to a store that all of them reach afterwards.

LOCAL/CRC OF THE STORE'S URL/
    rank-00003/
        writing/           what this rank is writing
        step-00000042/     its files, and the seal of all; complete once every rank has renamed its own
        reading/           files of a checkpoint that is being loaded: links to this node's, and fetched ones

Each rank has a folder of its own, so that nothing has to be agreed on a node. A checkpoint is loaded from the nearest
copy, file by file: this node's where it has the file, else the store's. One that only nodes have is brought to the
store before, where a rank lacks some of it. A save never waits for the store: while one checkpoint is on its way the
next ones stay on the nodes. Refuses to own the store's layout (store.py).
"""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from holdfast.errors import HoldfastError
from holdfast.findings import Fault, Finding, Severity
from holdfast.train import seal
from holdfast.train.depot import Copy, Written, damaged, failed, merged, steps_in, unreachable
from holdfast.train.ranks import Ranks
from holdfast.train.retention import Retention
from holdfast.train.seal import FileSum, Seal
from holdfast.train.store import Store
from holdfast.train.tensors import Lost

KEPT = Retention(keep=1)
"""On the nodes, beside the one that was last given to the store's thread."""


class _Held(NamedTuple):
    """A checkpoint as the ranks' nodes have it between them."""

    sealed: Seal
    holders: dict[str, int]
    """For each of its files a rank whose node has it."""
    everywhere: bool
    """Whether each rank's node has all of them."""


class Tiers:
    """The nodes' own disks before a store."""

    def __init__(self, local: Path, store: Store, *, retention: Retention, ranks: Ranks) -> None:
        self.where = store.url
        self._node = local / f"{zlib.crc32(store.url.encode()):08x}"
        self._own = self._node / f"rank-{ranks.rank:05d}"
        self.store = store
        self._retention = retention
        self._ranks = ranks
        self._beside = ranks.aside()
        """For the thread that brings checkpoints to the store."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="holdfast-checkpoint-store")
        self._bringing: Future[Finding | None] | None = None
        self._newest: Seal | None = None
        """Committed by this attempt."""
        self._noticed: Finding | None = None
        self._brought: int | None = None
        """The step of the one that was last given to the thread."""

    def name(self, step: int) -> str:
        return f"{self.where.rstrip('/')}/{self.store.folder(step)}"

    def partial(self, step: int) -> Path:
        return self._own / "writing" / f"step-{step:08d}"

    def take_over(self) -> list[Copy]:
        for left in ("writing", "reading"):
            shutil.rmtree(self._own / left, ignore_errors=True)
        stored = [_Stored(self, self._ranks, step, folder) for step, folder in self._stored()]
        on_nodes = self._ranks.from_first(_between(self._ranks.to_first(self._on_node())))
        newest = {copy.step: copy for copy in reversed(stored)}
        near = [_Near(self, self._ranks, held, newest.get(held.sealed.step)) for held in on_nodes]
        # Of one step the nodes' comes first: sorting keeps the order of equals.
        return sorted([*near, *stored], key=lambda copy: copy.step, reverse=True)

    def resumed(self, step: int) -> None:
        """What came after is of another course of training now; nobody saves before all ranks are here."""
        for folder in self._node.glob("rank-*"):
            for later in filter(lambda each: each > step, steps_in(folder)):
                shutil.rmtree(folder / f"step-{later:08d}", ignore_errors=True)
        shutil.rmtree(self._own / "reading", ignore_errors=True)
        self._ranks.all(True)

    def commit(self, sealed: Seal, written: Written, aside: Ranks) -> Finding | None:
        parts = aside.to_first(written)
        whole = aside.from_first(merged(sealed, parts) if parts else None)
        problem = whole if isinstance(whole, Finding) else None
        if isinstance(whole, Seal):
            problem = aside.any_of(self._commit(whole))
        if problem is not None or not isinstance(whole, Seal):
            shutil.rmtree(self.partial(sealed.step), ignore_errors=True)
            return problem
        self._newest = whole
        busy = self._bringing is not None and not self._bringing.done()
        if not aside.any_of(True if busy else None):
            self._noticed = self._came_to()
            self._bring(whole)
        return None

    def _commit(self, whole: Seal) -> Finding | None:
        partial, final = self.partial(whole.step), self._folder(whole.step)
        try:
            seal.write(partial, whole)
            shutil.rmtree(final, ignore_errors=True)
            partial.rename(final)
            seal.sync_folder(self._own)
        except OSError as error:
            return failed(partial, self._ranks.rank, error)
        return None

    def tidy(self) -> None:
        for step in KEPT.superfluous([step for step in steps_in(self._own) if step != self._brought]):
            shutil.rmtree(self._folder(step), ignore_errors=True)

    def noticed(self) -> Finding | None:
        noticed, self._noticed = self._noticed, None
        return noticed

    def close(self) -> Finding | None:
        """What an older one came to does not count any more."""
        problem = self._came_to()
        if self._newest is not None and self._brought != self._newest.step:
            self._bring(self._newest)
            problem = self._came_to()
        return problem

    def _came_to(self) -> Finding | None:
        """Wait for what is on its way to the store."""
        bringing, self._bringing = self._bringing, None
        return bringing.result() if bringing is not None else None

    def _bring(self, whole: Seal) -> None:
        """Have the second copy made, beside the loop and the saves."""
        self._brought = whole.step
        files = [self._folder(whole.step) / name for name in self._mine(whole)]
        self._bringing = self._thread.submit(self.brought, whole, files, self._beside)

    def brought(self, whole: Seal, files: Collection[Path], ranks: Ranks) -> Finding | None:
        """Each rank brings some files, and once all have come rank 0 seals them; returns what went wrong on any."""
        try:
            problem = ranks.any_of(self._tried(whole.step, lambda: self.store.bring(whole.step, files)))
            if problem is None:
                problem = self._sealed(whole) if ranks.rank == 0 else None
                problem = ranks.from_first(problem)
        except RuntimeError as error:  # Gloo's, when another rank is gone
            problem = self._not_stored(whole.step, error)
        return problem

    def _sealed(self, whole: Seal) -> Finding | None:
        return self._tried(whole.step, lambda: self.store.complete(whole, self._retention))

    def _tried(self, step: int, act: Callable[[], None]) -> Finding | None:
        try:
            act()
        except HoldfastError as error:
            return error.findings[0]
        except Exception as error:  # a client of any store: it raises what it likes
            return self._not_stored(step, error)
        return None

    def _not_stored(self, step: int, error: Exception) -> Finding:
        return Finding(
            code="checkpoint-not-stored",
            severity=Severity.WARNING,
            what=f"the checkpoint of step {step} is on the nodes' disks and could not be brought to the store",
            where=self.where,
            evidence=(f"rank {self._ranks.rank}: {type(error).__name__}: {error}",),
            remedy="see whether the store answers, has room and lets this user write; the older checkpoints there are "
            "untouched, and a later one is brought when it is due",
            fault=Fault.CLUSTER,
        )

    def _folder(self, step: int) -> Path:
        return self._own / f"step-{step:08d}"

    def _mine(self, whole: Seal) -> list[str]:
        return [name for name in whole.files if (self._folder(whole.step) / name).exists()]

    def _stored(self) -> list[tuple[int, str]]:
        """Steps and folders in the store, taken over by rank 0; raises on all ranks where it does not answer."""
        found: list[tuple[int, str]] | HoldfastError = []
        if self._ranks.rank == 0:
            try:
                self.store.take_over()
                found = self.store.sealed()
            except HoldfastError as error:
                found = error
            except Exception as error:  # a client of any store: it raises what it likes
                found = unreachable(self.where, f"{type(error).__name__}: {error}")
        found = self._ranks.from_first(found)
        if isinstance(found, HoldfastError):
            raise found
        return found

    def _on_node(self) -> list[tuple[Seal, set[str]]]:
        """Checkpoints of which this rank's node has files, and which."""
        found: dict[bytes, tuple[Seal, set[str]]] = {}
        for folder in self._node.glob("rank-*/step-*"):
            sealed = seal.read(folder)
            if isinstance(sealed, Seal):
                _, names = found.setdefault(seal.encoded(sealed), (sealed, set()))
                names |= {name for name, file in sealed.files.items() if has(folder / name, file)}
        return list(found.values())

    def on_node(self, step: int, name: str, expected: FileSum) -> Path | None:
        """This node's copy of a file."""
        copies = (folder / f"step-{step:08d}" / name for folder in sorted(self._node.glob("rank-*")))
        return next((copy for copy in copies if has(copy, expected)), None)

    def forget(self, step: int) -> None:
        """Remove this node's copies of a checkpoint."""
        for folder in self._node.glob(f"rank-*/step-{step:08d}"):
            shutil.rmtree(folder, ignore_errors=True)

    def reading(self, name: str) -> Path:
        """A new folder to have files in."""
        folder = self._own / "reading" / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder


class _Stored:
    """A checkpoint in the store alone."""

    def __init__(self, tiers: Tiers, ranks: Ranks, step: int, stored: str) -> None:
        self.step = step
        self.where = f"{tiers.where.rstrip('/')}/{stored}"
        self.folder = tiers.reading(stored)
        self._tiers = tiers
        self._ranks = ranks
        self._name = stored

    def sealed(self) -> Seal | str:
        found: Seal | str | Lost = ""
        if self._ranks.rank == 0:
            try:
                found = self._tiers.store.seal_of(self._name)
            except Exception as error:  # a client of any store: it raises what it likes
                found = Lost(f"{type(error).__name__}: {error}")
        found = self._ranks.from_first(found)
        if isinstance(found, Lost):
            raise unreachable(self._tiers.where, str(found))
        return found

    def have(self, names: Iterable[str]) -> None:
        for name in names:
            try:
                self._tiers.store.fetch(self._name, name, self.folder)
            except Exception as error:  # a client of any store: it raises what it likes
                raise Lost(f"{name}: {type(error).__name__}: {error}") from None

    def damage(self, name: str, expected: FileSum) -> str | None:
        return seal.damage(self.folder / name, expected)

    def set_aside(self, damage: str) -> Finding:
        where = ""
        if self._ranks.rank == 0:
            with suppress(Exception):  # where nothing can be renamed it stays, and is passed over again
                where = self._tiers.store.set_aside(self._name)
        return damaged(self._name, where, damage)


class _Near:
    """A checkpoint that nodes have, or had a part of."""

    def __init__(self, tiers: Tiers, ranks: Ranks, held: _Held, stored: _Stored | None) -> None:
        self.step = held.sealed.step
        self.where = f"the nodes' own copy of {tiers.name(self.step)}"
        self.folder = tiers.reading(f"near-{self.step}")
        self._tiers = tiers
        self._ranks = ranks
        self._held = held
        self._stored = stored

    def sealed(self) -> Seal | str:
        """Where some node lacks some file, and the store does too, the store gets it first."""
        held = self._held
        if self._stored is not None or held.everywhere:
            return held.sealed
        gone = held.sealed.files.keys() - held.holders.keys()
        if gone:
            return f"{len(gone)} of its {len(held.sealed.files)} files are on none of these nodes, nor in the store"
        mine = [name for name, rank in held.holders.items() if rank == self._ranks.rank]
        paths = [self._tiers.on_node(self.step, name, held.sealed.files[name]) for name in mine]
        problem = self._tiers.brought(held.sealed, [path for path in paths if path is not None], self._ranks)
        if problem is not None:
            raise unreachable(self._tiers.where, *problem.evidence)
        self._stored = _Stored(self._tiers, self._ranks, self.step, self._tiers.store.folder(self.step))
        return held.sealed

    def have(self, names: Iterable[str]) -> None:
        for name in names:
            near = self._tiers.on_node(self.step, name, self._held.sealed.files[name])
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
        self._tiers.forget(self.step)
        return Finding(
            code="checkpoint-copy-lost",
            severity=Severity.WARNING,
            what=f"what nodes had of the checkpoint of step {self.step} is not whole, and was removed",
            where=str(self.folder),
            evidence=(damage,),
            remedy="nothing: the next copy, in the store, is gone on from; look at the node's disk if files were "
            "damaged there",
            fault=Fault.CLUSTER,
        )


def has(file: Path, expected: FileSum) -> bool:
    """Whether there is a file of that size; what is in it is checked when it is read."""
    try:
        return file.stat().st_size == expected.size
    except OSError:
        return False


def _between(parts: Iterable[list[tuple[Seal, set[str]]]]) -> list[_Held]:
    """What all ranks' nodes have between them, from what each has, by rank."""
    parts = list(parts)
    found: dict[bytes, tuple[Seal, list[set[str]]]] = {}
    for rank, part in enumerate(parts):
        for sealed, names in part:
            _, held = found.setdefault(seal.encoded(sealed), (sealed, [set() for _ in parts]))
            held[rank] = names
    return [
        _Held(
            sealed,
            {name: rank for rank, names in reversed(list(enumerate(held))) for name in names},
            all(names == sealed.files.keys() for names in held),
        )
        for sealed, held in found.values()
    ]
