"""Checkpoints written by a framework, committed with a manifest after all ranks have written their files.

A framework writes a folder `checkpoint-42` file by file, and a truncated one looks like any other. The manifest
(manifest_file.py) is written last and lists all files; a background thread syncs the files and computes their
checksums. Contents and time of a checkpoint are the framework's choice.
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
from holdfast.findings import Finding, Owner, Severity
from holdfast.train.checkpoint import manifest_file
from holdfast.train.checkpoint.hyperparams import Hyperparams
from holdfast.train.checkpoint.manifest_file import FileChecksum, Manifest
from holdfast.train.checkpoint.storage import check_readable
from holdfast.train.checkpoint.writer_fence import WriterFence, WriterId
from holdfast.train.session.control_group import ControlGroup

ANONYMOUS = WriterId()
_NAMED = re.compile(r"checkpoint-(\d+)")


class LatestCheckpoint(NamedTuple):
    """Result of a search for a checkpoint."""

    path: Path | None
    """None if there is no good one."""
    manifest: Manifest | None
    findings: list[Finding]
    """Findings about it, and about skipped ones."""

    @property
    def step(self) -> int:
        """0 if there is none."""
        return self.manifest.step if self.manifest else 0

    @property
    def node_s(self) -> float:
        """Seconds of training so far, summed over nodes."""
        return self.manifest.node_s if self.manifest else 0.0


class FinalizeResult(NamedTuple):
    """Result of committing a checkpoint, the same on all ranks."""

    step: int
    path: Path
    took_s: float
    """Since the framework began to write it."""
    problem: Finding | None
    """Why it failed."""
    size_bytes: int
    """Of all its files; 0 if it failed."""


class CheckpointDir:
    """The checkpoints `checkpoint-STEP` in a folder that all ranks reach, of one run at a time.

    At most one is being committed: `wait` comes before the next `start`.
    """

    def __init__(self, folder: Path, *, writer: WriterId = ANONYMOUS, keep: int | None = None) -> None:
        """Keep this many of the newest checkpoints; None leaves that to the framework."""
        self.folder = folder
        self._keep = keep
        self._fence = WriterFence(folder, writer)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="holdfast-seal")
        self._finalizing: Future[FinalizeResult] | None = None

    def path(self, step: int) -> Path:
        """Folder of a step's checkpoint."""
        return self.folder / f"checkpoint-{step}"

    def take_over(self) -> None:
        """Fence other attempts; raises HoldfastError if another live run uses the folder."""
        with suppress(OSError):  # in a read-only folder no manifest is written
            self._fence.take_over()

    def latest(self, *, world_size: int) -> LatestCheckpoint:
        """The newest checkpoint that matches its manifest, for this world size.

        Raises HoldfastError if the folder cannot be read, or another version of holdfast wrote it.
        """
        check_readable(self.folder)
        findings: list[Finding] = []
        for path in self._checkpoints():
            manifest = manifest_file.read(path, _step(path))
            if isinstance(manifest, Manifest):
                manifest_file.refuse_other_format(manifest, str(path))
            damage = manifest if isinstance(manifest, str) else _damage(path, manifest)
            if isinstance(manifest, Manifest) and damage is None:
                if manifest.world_size != world_size:
                    findings.append(_world_size_changed(path, manifest, world_size))
                return LatestCheckpoint(path, manifest, findings)
            findings.append(_skipped(path, str(damage), whole_once=isinstance(manifest, Manifest)))
        return LatestCheckpoint(None, None, findings)

    def start(
        self,
        step: int,
        group: ControlGroup,
        *,
        began: float,
        node_s: float = 0.0,
        configured: Hyperparams | None = None,
    ) -> None:
        """Commit a checkpoint in the background, after this rank has written its part.

        `group`: a process group for the background thread; `began`: monotonic time at which the writing began.
        """
        manifest = Manifest(step=step, world_size=group.world_size, node_s=node_s, hyperparams=configured, files={})
        self._finalizing = self._thread.submit(self._finalize, manifest, group, began)

    def poll(self) -> FinalizeResult | None:
        """The result of the current commit; None while it runs or without one. Each result is returned once."""
        return self.wait() if self._finalizing is not None and self._finalizing.done() else None

    def wait(self) -> FinalizeResult | None:
        """Wait for the result of the current commit."""
        commit, self._finalizing = self._finalizing, None
        return commit.result() if commit is not None else None

    def _finalize(self, manifest: Manifest, ranks: ControlGroup, began: float) -> FinalizeResult:
        path = self.path(manifest.step)
        try:
            ranks.gather(None)  # rank 0 lists the files after all ranks have written
            files = ranks.broadcast(_contents(path) if ranks.rank == 0 else [])
            summed = ranks.gather(_checksums(path, files[ranks.rank :: ranks.world_size]))
            done = ranks.broadcast(self._commit(path, manifest, summed) if ranks.rank == 0 else 0)
        except RuntimeError as error:  # from Gloo, when another rank is gone
            done = _finalize_failed(path, error)
        problem, size_bytes = (done, 0) if isinstance(done, Finding) else (None, done)
        return FinalizeResult(manifest.step, path, time.monotonic() - began, problem, size_bytes)

    def _commit(
        self, path: Path, manifest: Manifest, summed: Iterable[dict[str, FileChecksum] | OSError]
    ) -> int | Finding:
        """Write the manifest, and remove expired checkpoints; returns the checkpoint's bytes, or the failure."""
        files: dict[str, FileChecksum] = {}
        try:
            for part in summed:
                if isinstance(part, OSError):
                    raise part
                files |= part
            self._fence.check()
            whole = msgspec.structs.replace(manifest, files=files)
            manifest_file.write(path, whole)
        except HoldfastError as error:
            return error.findings[0]
        except OSError as error:
            return _finalize_failed(path, error)
        if self._keep is not None:  # a partly removed checkpoint no longer matches its manifest
            for old in self._checkpoints()[self._keep :]:
                shutil.rmtree(old, ignore_errors=True)
        return whole.size_bytes

    def _checkpoints(self) -> list[Path]:
        """Newest first."""
        named = [path for path in self.folder.glob("checkpoint-*") if _NAMED.fullmatch(path.name)]
        return sorted(named, key=_step, reverse=True)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("checkpoint-"))


def _damage(path: Path, manifest: Manifest) -> str | None:
    """How a checkpoint differs from its manifest; None if it matches."""
    damages = (manifest_file.find_damage(path / name, expected) for name, expected in manifest.files.items())
    return next((damage for damage in damages if damage), None)


def _finalize_failed(path: Path, error: BaseException) -> Finding:
    return Finding(
        code="checkpoint-manifest-missing",
        what=f"the manifest of {path.name} could not be written, so it will not be resumed from",
        where=str(path),
        evidence=(f"{type(error).__name__}: {error}",),
        remedy="look for space and permissions there, and whether every node reaches that folder",
        owner=Owner.CLUSTER,
    )


def _contents(path: Path) -> list[str]:
    """All files in the folder except the manifest."""
    return sorted(
        str(file.relative_to(path)) for file in path.rglob("*") if file.is_file() and file.name != manifest_file.NAME
    )


def _checksums(path: Path, files: Sequence[str]) -> dict[str, FileChecksum] | OSError:
    """Sync these files to disk, and compute their checksums."""
    try:
        return {file: manifest_file.checksums([path / file])[Path(file).name] for file in files}
    except OSError as error:
        return error


def _skipped(path: Path, why: str, *, whole_once: bool) -> Finding:
    cut_short = (
        "Nothing, if it was cut short. If it was taken without holdfast, name it when you start: "
        "then it is resumed from as the framework does it."
    )
    return Finding(
        code="checkpoint-skipped",
        severity=Severity.WARNING,
        what=f"{path.name} is not resumed from",
        where=str(path),
        evidence=(why,),
        remedy="Check the storage: it was whole when its manifest was written." if whole_once else cut_short,
        owner=Owner.CLUSTER if whole_once else Owner.USER,
    )


def _world_size_changed(path: Path, manifest: Manifest, world_size: int) -> Finding:
    return Finding(
        code="world-size-changed",
        severity=Severity.WARNING,
        what=f"{path.name} was taken by {manifest.world_size} ranks; {world_size} resume from it",
        where=str(path),
        remedy="weights and optimizer are restored; random numbers and the next samples are not those of an unbroken "
        "run",
    )
