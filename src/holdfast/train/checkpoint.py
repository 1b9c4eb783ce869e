"""Owns a checkpoint's life: copied between two steps, written beside the next ones, sealed at once, checked when read.

A checkpoint is a folder `step-00000042`: tensors as torch.distributed.checkpoint lays them out (each rank its share),
`host-00000.pt` per rank (random numbers, scheduler, the user's own state), and the seal, which names the format, the
step, and every file's size and checksum. It is written elsewhere and renamed once everything is on disk, so a folder
of the final name is complete whenever the writer died. Refuses to own when one is taken (session.py), and who may
commit one (tenure.py).
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from torch.distributed.checkpoint.api import CheckpointException

from holdfast.errors import ExitCode, HoldfastError, failure
from holdfast.findings import Fault, Finding, Severity
from holdfast.shortage import lacking, room, shortage_in, shortage_of
from holdfast.train import seal, tensors
from holdfast.train.ranks import Ranks
from holdfast.train.retention import Retention
from holdfast.train.seal import FileSum, Seal
from holdfast.train.staging import Staging
from holdfast.train.tenure import SUPERSEDED, Tenure, Writer
from holdfast.train.training import Training

ALONE = Writer()
"""A process that was started by nobody who counts its attempts."""

_COMPLETE = re.compile(r"step-(\d{8,})")


class Restored(NamedTuple):
    """What came of looking for a checkpoint."""

    step: int
    """0 where there is none."""
    noticed: list[Finding]
    """What is to be said of it; on rank 0."""
    samples: int | None = None
    """Samples that its steps took, where that is known."""
    node_s: float = 0.0
    """Seconds that its steps took, of all nodes together."""


class Saved(NamedTuple):
    """What came of a save, the same on all ranks."""

    step: int
    path: Path
    took_s: float
    """From the copy until it was complete, or had failed."""
    problem: Finding | None = None
    """Why it failed."""


class Checkpoints:
    """The checkpoints of one run in a folder that all its ranks reach; all ranks make the same calls after a step.

    At most one save is under way: `finish` comes before the next `begin`.
    """

    def __init__(
        self, folder: Path, *, retention: Retention, training: Training, ranks: Ranks, writer: Writer = ALONE
    ) -> None:
        self.folder = folder
        self._tenure = Tenure(folder, writer)
        self._retention = retention
        self._training = training
        self._ranks = ranks
        self._staging = Staging(training.optimizer)
        self._aside = ranks.aside()
        """For the thread that writes."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="holdfast-checkpoint")
        """One; the process waits for it when it ends."""
        self._prepared = False
        self._saving: Future[Saved] | None = None

    def path(self, step: int) -> Path:
        """Where the complete checkpoint of a step lies."""
        return self.folder / f"step-{step:08d}"

    def take_waited_s(self) -> float:
        """Seconds that the optimiser's steps have waited for copies since the last call."""
        waited_s, self._staging.waited_s = self._staging.waited_s, 0.0
        return waited_s

    def prepare(self) -> None:
        """Get ready for the first save, beside the loop: called after a step, when the optimiser has its state."""
        if not self._prepared:
            self._prepared = True
            self._thread.submit(self._staging.prepare, self._training.tensors())

    def begin(self, step: int, samples: int | None = None, *, node_s: float = 0.0) -> None:
        """Copy what is to be saved, and have it written and sealed beside the steps that follow."""
        sealed = Seal(step=step, world_size=self._ranks.world_size, samples=samples, node_s=node_s, files={})
        self._prepared = True
        began, own = time.monotonic(), self._training.own()
        try:
            staged = self._staging.begin(self._training.tensors())
        except (OSError, RuntimeError) as error:  # no memory for the buffer
            staged = _failed(self._tenure.partial(self.path(step)), self._ranks.rank, error)
        self._saving = self._thread.submit(self._save, sealed, staged, own, began)

    def finished(self) -> Saved | None:
        """What came of the save under way; None while it is not known, and where there is none. Each is told once."""
        return self.finish() if self._saving is not None and self._saving.done() else None

    def finish(self) -> Saved | None:
        """The same, waited for."""
        saving, self._saving = self._saving, None
        return saving.result() if saving is not None else None

    def save(self, step: int, samples: int | None = None) -> Path:
        """Save one: complete, for every rank, when this returns; a failure is raised on all of them alike."""
        self.begin(step, samples)
        saved = self.finish()
        assert saved is not None
        raise_problem(saved)
        return saved.path

    def restore(self) -> Restored:
        """Load the newest complete checkpoint that is what its seal says; those that are not are set aside."""
        noticed: list[Finding] = []
        steps = self._take_over()
        for step in steps:
            sealed = self._sealed(step)
            damage = sealed if isinstance(sealed, str) else self._load(sealed)
            if isinstance(sealed, Seal) and damage is None:
                if sealed.world_size != self._ranks.world_size:
                    noticed.append(_world_changed(sealed, self._ranks.world_size))
                return Restored(step, noticed, sealed.samples, sealed.node_s)
            noticed.append(_damaged(self.path(step), str(damage)))
            if self._ranks.rank == 0:
                _set_aside(self.path(step))
        if noticed:  # The model may hold what was read of them: nothing can begin with it.
            raise failure(
                "no-good-checkpoint",
                f"every checkpoint there is, {len(noticed)} in all, is damaged",
                exit_code=ExitCode.STORAGE,
                where=str(self.folder),
                evidence=tuple(line for finding in noticed for line in finding.evidence),
                remedy="check the storage; they were set aside, so that the next start begins at step 0",
                fault=Fault.CLUSTER,
            )
        return Restored(0, noticed)

    def _take_over(self) -> list[int]:
        """Have other attempts commit no more; returns the steps of what is there, newest first."""
        found: tuple[tuple[Finding, ...], ExitCode, list[int]] = ((), ExitCode.OK, [])
        if self._ranks.rank == 0:
            try:
                with suppress(OSError):  # where nothing can be written, nobody commits; the first save will say so
                    self._tenure.take_over()
                found = ((), ExitCode.OK, self._steps()[::-1])
            except HoldfastError as error:
                found = (error.findings, error.exit_code, [])
        findings, code, steps = self._ranks.from_first(found)
        if findings:
            raise HoldfastError(findings, code)
        return steps

    def _sealed(self, step: int) -> Seal | str:
        """What rank 0 reads there."""
        found = self._ranks.from_first(seal.read(self.path(step)) if self._ranks.rank == 0 else "")
        if isinstance(found, Seal) and found.format > seal.FORMAT:
            raise failure(
                "checkpoint-from-later-version",
                f"the newest checkpoint has format {found.format}; this holdfast reads up to {seal.FORMAT}",
                exit_code=ExitCode.IMPOSSIBLE,
                where=str(self.path(step)),
                remedy="upgrade holdfast, or set `checkpoint.path` in the job to another folder",
            )
        return found

    def _load(self, sealed: Seal) -> str | None:
        """Put the loop where it was; returns the damage instead, on all ranks, where any rank finds some."""
        path, state = self.path(sealed.step), self._training.tensors()
        # A rank beyond those that saved takes rank 0's part.
        own = _own_file(self._ranks.rank if self._ranks.rank < sealed.world_size else 0)

        def damage_of(name: str) -> str | None:
            expected = sealed.files.get(name)
            return seal.damage(path / name, expected) if expected else f"{name}: not sealed"

        try:
            damage = tensors.read(state, path, self._ranks, damage_of, also=own)
        except CheckpointException as error:
            raise failure(
                "checkpoint-does-not-fit",
                f"the checkpoint of step {sealed.step} cannot be loaded into this model and optimiser",
                exit_code=ExitCode.IMPOSSIBLE,
                where=str(path),
                evidence=tuple(f"rank {rank}: {cause}" for rank, (cause, _) in error.failures.items()),
                remedy="train the model it was saved from, or set `checkpoint.path` in the job to another folder",
            ) from error
        if damage is None:
            self._training.take(state)
            self._training.take_own(path / own)
        return damage

    def _save(self, sealed: Seal, staged: dict[str, Any] | Finding, own: bytes, began: float) -> Saved:
        """The writer's part of a save; every rank's thread takes it."""
        path = self.path(sealed.step)
        partial = self._tenure.partial(path)
        try:
            problem = self._aside.any_of(self._settled(staged, partial))
            if problem is None and not isinstance(staged, Finding):
                written = self._aside.to_first(self._write(staged, own, partial))
                problem = self._aside.from_first(self._commit(sealed, partial, written) if written else None)
        except RuntimeError as error:  # Gloo's, when another rank is gone
            problem = _failed(partial, self._ranks.rank, error)
        return Saved(sealed.step, path, time.monotonic() - began, problem)

    def _settled(self, staged: dict[str, Any] | Finding, partial: Path) -> Finding | None:
        if isinstance(staged, Finding):
            return staged
        try:
            return None if self._staging.settle() else _changed(partial, self._ranks.rank)
        except (OSError, RuntimeError) as error:
            return _failed(partial, self._ranks.rank, error)

    def _write(self, staged: dict[str, Any], own: bytes, partial: Path) -> dict[str, FileSum] | Finding:
        """Write this rank's part and see it to disk; returns its files' sums, or what went wrong."""
        try:
            files = tensors.write(staged, partial, self._aside)
            file = partial / _own_file(self._ranks.rank)
            file.write_bytes(own)
            return seal.sums([*files, file])
        except (OSError, RuntimeError, CheckpointException) as error:
            return _failed(partial, self._ranks.rank, error)

    def _commit(self, sealed: Seal, partial: Path, written: Iterable[dict[str, FileSum] | Finding]) -> Finding | None:
        """Make the checkpoint complete in one rename, then drop what is too old; returns what went wrong.

        What was written of one that failed is removed: on a full disk it would stand in the way of the next.
        """
        files: dict[str, FileSum] = {}
        for part in written:
            if isinstance(part, Finding):
                shutil.rmtree(partial, ignore_errors=True)
                return part
            files |= part
        try:
            seal.write(partial, msgspec.structs.replace(sealed, files=files))
            self._tenure.commit(self.path(sealed.step))
            seal.sync_folder(self.folder)
            for step in self._retention.superfluous(self._steps()):
                self._tenure.drop(self.path(step))
        except (HoldfastError, OSError) as error:
            problem = error.findings[0] if isinstance(error, HoldfastError) else _failed(partial, 0, error)
            shutil.rmtree(partial, ignore_errors=True)
            return problem
        return None

    def _steps(self) -> list[int]:
        """Of the folders of a final name, oldest first."""
        named = (_COMPLETE.fullmatch(path.name) for path in self.folder.glob("step-*"))
        return sorted(int(match[1]) for match in named if match)


def raise_problem(saved: Saved) -> None:
    """Where a save failed that must not."""
    if saved.problem is not None:
        superseded = saved.problem.code == SUPERSEDED
        raise HoldfastError((saved.problem,), ExitCode.REFUSED if superseded else ExitCode.STORAGE)


def _own_file(rank: int) -> str:
    return f"host-{rank:05d}.pt"


def _failed(partial: Path, rank: int, error: BaseException) -> Finding:
    """Why a checkpoint could not be written; torch may not say that the disk is full, so the disk is looked at."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (error, _) = next(iter(error.failures.items()))
    full = lacking(partial, "")
    row = shortage_of(error) or shortage_in(full.evidence[0] if full else str(error))
    finding = Finding(
        code="checkpoint-failed",
        what=f"the checkpoint {partial.stem} could not be written{f': {row.what}' if row else ''}",
        where=str(partial.parent),
        evidence=(f"rank {rank}: {type(error).__name__}: {error}", *room(partial)),
        remedy="look for space and permissions there; the older checkpoints are untouched",
        fault=Fault.CLUSTER,
    )
    if row is None:
        return finding
    remedy = f"{row.remedy} The older checkpoints are untouched, and the next is tried when it is due."
    return msgspec.structs.replace(finding, code=row.code, remedy=remedy)


def _changed(partial: Path, rank: int) -> Finding:
    return Finding(
        code="checkpoint-inexact",
        severity=Severity.WARNING,
        what=f"the checkpoint {partial.stem} was given up: weights were changed while they were copied",
        where=f"rank {rank}",
        remedy="Nothing: from now on they are copied before the next step begins. To have saves stall less, change "
        "weights in the optimiser's step, or before session.commit().",
    )


def _set_aside(path: Path) -> None:
    """Take a damaged checkpoint out of the count of those kept, without destroying the evidence."""
    with suppress(OSError):  # where nothing can be renamed it stays, and is passed over again
        aside = _aside(path)
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)


def _aside(path: Path) -> Path:
    return path.with_name(f"{path.name}.damaged")


def _damaged(path: Path, damage: str) -> Finding:
    return Finding(
        code="checkpoint-damaged",
        severity=Severity.WARNING,
        what=f"the checkpoint {path.name} is damaged and was set aside",
        where=str(_aside(path)),
        evidence=(damage,),
        remedy="check the storage; delete the folder once it is understood",
        fault=Fault.CLUSTER,
    )


def _world_changed(sealed: Seal, world_size: int) -> Finding:
    return Finding(
        code="world-size-changed",
        severity=Severity.WARNING,
        what=f"the checkpoint of step {sealed.step} was taken by {sealed.world_size} ranks; {world_size} go on with it",
        remedy="model and optimiser are exact; the random numbers are not those of an unbroken run",
    )
