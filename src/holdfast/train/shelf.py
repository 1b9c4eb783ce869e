"""Owns which of a framework's own checkpoints are believed: those that were sealed when all ranks had written them.

A framework writes a folder `checkpoint-42` file by file, and one that was cut short looks like any other. The seal
(seal.py) goes into it last, and names all that must be there: a thread sees the files to disk and sums them, beside the
steps that follow. Refuses to own what is in the folder, which is the
framework's affair, and when it is written (the callbacks).
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from holdfast.errors import HoldfastError
from holdfast.findings import Fault, Finding, Severity
from holdfast.train import seal
from holdfast.train.configured import Configured
from holdfast.train.depot import look_into
from holdfast.train.ranks import Ranks
from holdfast.train.seal import FileSum, Seal
from holdfast.train.tenure import Tenure, Writer

NOBODY = Writer()
_NAMED = re.compile(r"checkpoint-(\d+)")


class Found(NamedTuple):
    """What came of looking for a checkpoint."""

    path: Path | None
    """None where there is no good one."""
    sealed: Seal | None
    noticed: list[Finding]
    """What is to be said of it, and of those that were passed over."""

    @property
    def node_s(self) -> float:
        """Seconds of training so far, of all nodes together."""
        return self.sealed.node_s if self.sealed else 0.0


class Sealed(NamedTuple):
    """What came of sealing one, the same on all ranks."""

    step: int
    path: Path
    took_s: float
    """From when its framework began to write it."""
    problem: Finding | None
    """Why it failed."""


class Shelf:
    """The checkpoints `checkpoint-STEP` in a folder that all ranks reach, of one run at a time.

    At most one is being sealed: `finish` comes before the next `begin`.
    """

    def __init__(self, folder: Path, *, writer: Writer = NOBODY, keep: int | None = None) -> None:
        """Keep that many of the newest; none leaves that to the framework."""
        self.folder = folder
        self._keep = keep
        self._tenure = Tenure(folder, writer)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="holdfast-seal")
        self._sealing: Future[Sealed] | None = None

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step lies."""
        return self.folder / f"checkpoint-{step}"

    def take_over(self) -> None:
        """Have no other attempt seal from here on; raises HoldfastError where another live run has the folder."""
        with suppress(OSError):  # where nothing can be written, nothing is sealed
            self._tenure.take_over()

    def newest(self, *, world_size: int) -> Found:
        """The newest one that is what its seal says, for so many ranks.

        Raises HoldfastError where the folder cannot be read, or another version of holdfast wrote it.
        """
        look_into(self.folder)
        noticed: list[Finding] = []
        for path in self._all():
            sealed = seal.read(path, _step(path))
            if isinstance(sealed, Seal):
                seal.refuse_other_format(sealed, str(path))
            damage = sealed if isinstance(sealed, str) else _damage(path, sealed)
            if isinstance(sealed, Seal) and damage is None:
                if sealed.world_size != world_size:
                    noticed.append(_world_changed(path, sealed, world_size))
                return Found(path, sealed, noticed)
            noticed.append(_passed_over(path, str(damage), whole_once=isinstance(sealed, Seal)))
        return Found(None, None, noticed)

    def begin(
        self, step: int, aside: Ranks, *, began: float, node_s: float = 0.0, configured: Configured | None = None
    ) -> None:
        """Seal this one, of which this rank has written its part, beside the steps that follow.

        `aside` are the ranks for a thread of its own; `began` (monotonic) is when the writing did.
        """
        sealed = Seal(step=step, world_size=aside.world_size, node_s=node_s, configured=configured, files={})
        self._sealing = self._thread.submit(self._seal, sealed, aside, began)

    def finished(self) -> Sealed | None:
        """What came of the sealing under way; None while it is not known, and where there is none. Told once."""
        return self.finish() if self._sealing is not None and self._sealing.done() else None

    def finish(self) -> Sealed | None:
        """The same, waited for."""
        sealing, self._sealing = self._sealing, None
        return sealing.result() if sealing is not None else None

    def _seal(self, sealed: Seal, ranks: Ranks, began: float) -> Sealed:
        path = self.path(sealed.step)
        try:
            ranks.to_first(None)  # rank 0 looks when all have written
            files = ranks.from_first(_contents(path) if ranks.rank == 0 else [])
            summed = ranks.to_first(_sums(path, files[ranks.rank :: ranks.world_size]))
            problem = ranks.from_first(self._commit(path, sealed, summed) if ranks.rank == 0 else None)
        except RuntimeError as error:  # Gloo's, when another rank is gone
            problem = _not_sealed(path, error)
        return Sealed(sealed.step, path, time.monotonic() - began, problem)

    def _commit(self, path: Path, sealed: Seal, summed: Iterable[dict[str, FileSum] | OSError]) -> Finding | None:
        """Write the seal, and drop what is too old; returns what went wrong."""
        files: dict[str, FileSum] = {}
        try:
            for part in summed:
                if isinstance(part, OSError):
                    raise part
                files |= part
            self._tenure.check()
            seal.write(path, msgspec.structs.replace(sealed, files=files))
        except HoldfastError as error:
            return error.findings[0]
        except OSError as error:
            return _not_sealed(path, error)
        if self._keep is not None:  # one that was removed in part no longer is what its seal says
            for old in self._all()[self._keep :]:
                shutil.rmtree(old, ignore_errors=True)
        return None

    def _all(self) -> list[Path]:
        """Newest first."""
        named = [path for path in self.folder.glob("checkpoint-*") if _NAMED.fullmatch(path.name)]
        return sorted(named, key=_step, reverse=True)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("checkpoint-"))


def _damage(path: Path, sealed: Seal) -> str | None:
    """How a checkpoint differs from what its seal says; None where it does not."""
    damages = (seal.damage(path / name, expected) for name, expected in sealed.files.items())
    return next((damage for damage in damages if damage), None)


def _not_sealed(path: Path, error: BaseException) -> Finding:
    return Finding(
        code="checkpoint-not-sealed",
        what=f"{path.name} could not be sealed, so it will not be resumed from",
        where=str(path),
        evidence=(f"{type(error).__name__}: {error}",),
        remedy="look for space and permissions there, and whether every node reaches that folder",
        fault=Fault.CLUSTER,
    )


def _contents(path: Path) -> list[str]:
    """Every file below, but for the seal."""
    return sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file() and file.name != seal.NAME)


def _sums(path: Path, files: Sequence[str]) -> dict[str, FileSum] | OSError:
    """See these files to disk, and sum them."""
    try:
        return {file: seal.sums([path / file])[Path(file).name] for file in files}
    except OSError as error:
        return error


def _passed_over(path: Path, why: str, *, whole_once: bool) -> Finding:
    cut_short = (
        "Nothing, if it was cut short. If it was taken without holdfast, name it when you start: "
        "then it is resumed from as the framework does it."
    )
    return Finding(
        code="checkpoint-passed-over",
        severity=Severity.WARNING,
        what=f"{path.name} is not resumed from",
        where=str(path),
        evidence=(why,),
        remedy="Check the storage: it was whole when it was sealed." if whole_once else cut_short,
        fault=Fault.CLUSTER if whole_once else Fault.USER,
    )


def _world_changed(path: Path, sealed: Seal, world_size: int) -> Finding:
    return Finding(
        code="world-size-changed",
        severity=Severity.WARNING,
        what=f"{path.name} was taken by {sealed.world_size} ranks; {world_size} go on with it",
        where=str(path),
        remedy="weights and optimiser go on; random numbers, and which samples come next, are not those of an unbroken "
        "run",
    )
