"""Owns checkpoints in two tiers: saved on the nodes' own disks, brought to a store that all of them reach afterwards.

A save never waits for the store: while one checkpoint is on its way the next ones stay on the nodes. Refuses to own how
they lie on a disk (disk.py) and in the store (store.py), and from which of both they are loaded (nearest.py).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from holdfast.errors import HoldfastError
from holdfast.findings import Fault, Finding, Severity
from holdfast.train.depot import Copy, Written, failed, merged, unreachable
from holdfast.train.disk import Disk
from holdfast.train.nearest import Near, Spoilt, Stored, between
from holdfast.train.ranks import Ranks
from holdfast.train.retention import Retention
from holdfast.train.seal import Seal
from holdfast.train.store import Store

KEPT = Retention(keep=1)
"""On the nodes, beside the one that was last given to the store's thread."""


class Tiers:
    """The nodes' own disks before a store."""

    def __init__(self, local: Path, store: Store, *, retention: Retention, ranks: Ranks, replica: int = 0) -> None:
        self.where = store.url
        self._disk = Disk(local, store.url, ranks.rank, replica)
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
        return self.store.name(step)

    def partial(self, step: int) -> Path:
        return self._disk.partial(step)

    def take_over(self) -> list[Copy]:
        disk, store, ranks = self._disk, self.store, self._ranks
        disk.clear()
        stored = [Stored(disk, store, ranks, step, folder) for step, folder in self._stored()]
        on_nodes = ranks.from_first(between(ranks.to_first(disk.held())))
        spoilt = ranks.from_first(
            {step: why for part in ranks.to_first(disk.damaged_seals()) for step, why in part.items()}
        )
        newest = {copy.step: copy for copy in reversed(stored)}
        near = [Near(disk, store, ranks, held, newest.get(held.sealed.step), self.brought) for held in on_nodes]
        bad = [Spoilt(disk, step, damage) for step, damage in spoilt.items()]
        # Of one step the nodes' comes first: sorting keeps the order of equals.
        return sorted([*bad, *near, *stored], key=lambda copy: copy.step, reverse=True)

    def resumed(self, step: int) -> None:
        """What came after is of another course of training now; nobody saves before all ranks are here."""
        self._disk.forget_after(step)
        self._disk.clear()
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
        try:
            self._disk.commit(whole)
        except OSError as error:
            return failed(self.partial(whole.step), self._ranks.rank, error)
        return None

    def tidy(self) -> None:
        steps = self._disk.steps()
        superfluous = KEPT.superfluous([step for step in steps if step != self._brought])
        self._disk.keep(set(steps) - set(superfluous))

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
        files = [self._disk.folder(whole.step) / name for name in self._mine(whole)]
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
            "untouched. Until a later one is brought only the nodes have it, and a start goes on from there",
            fault=Fault.CLUSTER,
        )

    def _mine(self, whole: Seal) -> list[str]:
        return [name for name in whole.files if (self._disk.folder(whole.step) / name).exists()]

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
