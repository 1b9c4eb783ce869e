"""Checkpoint storage: its interface, and the backend for a folder that all ranks reach.

The other backend has two tiers (tiered_storage.py). All ranks make the same calls.
"""

from __future__ import annotations

import os
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec
from torch.distributed.checkpoint.api import CheckpointException

from holdfast.errors import ExitCode, HoldfastError, failure
from holdfast.findings import Finding, Owner, Severity
from holdfast.os_errors import disk_usage, probe_disk, resource_error_in, resource_error_of
from holdfast.train.checkpoint import manifest_file
from holdfast.train.checkpoint.dcp_io import ReadSource, StoreUnreachable
from holdfast.train.checkpoint.manifest_file import FileChecksum, Manifest
from holdfast.train.checkpoint.regular_file import is_damage, open_regular
from holdfast.train.checkpoint.retention_policy import RetentionPolicy
from holdfast.train.checkpoint.writer_fence import WriterFence, WriterId
from holdfast.train.session.control_group import ControlGroup
from holdfast.train.session.rank_config import USE_ANOTHER_FOLDER

T = TypeVar("T")

STEP_FOLDER = re.compile(r"step-(\d{8,})")

UNTOUCHED = "The checkpoints that are there are untouched"
NEXT = "and the next is tried when it is due"
LAST = "but this was the last: what none of them holds is done again at the next start"

WrittenFiles = dict[str, FileChecksum] | Finding
"""A rank's files as written, or why writing failed."""


class Incomplete(str):
    """Describes a checkpoint that was never complete, or was lost with a node before its upload."""


class CheckpointRef(ReadSource):
    """A checkpoint in one location; `find_damage` and `fetch` are local to a rank, all other calls are collective."""

    step: int
    where: str

    @abstractmethod
    def manifest(self) -> Manifest | str:
        """Its manifest, or why it cannot be read: the same on all ranks."""

    @abstractmethod
    def quarantine(self, damage: str) -> Finding:
        """Move the checkpoint out of the way, so that no start tries it again; returns the finding."""


class CheckpointStorage(ABC):
    """Storage for the checkpoints of one run."""

    where: str
    agreed_step: int | None = None
    """The last step after which all replicas were equal; None without other replicas."""

    @abstractmethod
    def name(self, step: int) -> str: ...

    @abstractmethod
    def partial(self, step: int) -> Path:
        """The folder that this rank writes its part to."""

    @abstractmethod
    def take_over(self) -> list[CheckpointRef]:
        """Fence other attempts; returns the checkpoints, newest first and, for one step, the nearest first."""

    @abstractmethod
    def commit(self, manifest: Manifest, written: WrittenFiles, group: ControlGroup) -> int | Finding:
        """Make a checkpoint complete; returns its bytes, or why that failed.

        `written` is this rank's part. Called by each rank's background thread.
        """

    @abstractmethod
    def prune(self) -> None:
        """Remove expired checkpoints after a commit; called by each rank's background thread."""

    @abstractmethod
    def set_aside_after(self, step: int) -> None:
        """Hide the checkpoints after this step from later starts; other replicas may do so concurrently."""

    def on_resumed(self, step: int) -> None:  # noqa: B027 - a storage need not act on it
        """Training resumes after this step."""

    def take_finding(self) -> Finding | None:
        """Background failure since the last call; the same on all ranks."""
        return None

    def close(self) -> Finding | None:
        """Wait for background work; returns why the newest checkpoint is not in its final storage."""
        return None


class SharedStorage(CheckpointStorage):
    """A folder that all ranks reach, with the only copy."""

    def __init__(self, folder: Path, *, retention: RetentionPolicy, ranks: ControlGroup, writer: WriterId) -> None:
        self.folder = folder
        self.where = str(folder)
        self._fence = WriterFence(folder, writer)
        self._retention = retention
        self._ranks = ranks

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def name(self, step: int) -> str:
        return str(self.path(step))

    def partial(self, step: int) -> Path:
        return self._fence.partial(self.path(step))

    def take_over(self) -> list[CheckpointRef]:
        return [
            _SharedCheckpoint(step, self.path(step), self._ranks) for step in self._ranks.run_on_first(self._take_over)
        ]

    def _take_over(self) -> list[int]:
        with suppress(OSError):  # in a read-only folder no attempt commits; the first save reports it
            self._fence.take_over()
        check_readable(self.folder)
        return list_steps(self.folder)[::-1]

    def commit(self, manifest: Manifest, written: WrittenFiles, group: ControlGroup) -> int | Finding:
        parts = group.gather(written)
        return group.broadcast(self._commit(manifest, parts) if parts else 0)

    def _commit(self, manifest: Manifest, parts: Iterable[WrittenFiles]) -> int | Finding:
        """Commit by one rename; after a failure, remove the partial files: a full disk needs the space."""
        partial = self.partial(manifest.step)
        whole = merge_files(manifest, parts)
        try:
            self._fence.check_still_mounted()
            if isinstance(whole, Manifest):
                manifest_file.write(partial, whole)
                self._fence.commit(self.path(manifest.step))
                manifest_file.sync_folder(self.folder)
                return whole.size_bytes
        except (HoldfastError, OSError) as error:
            whole = error.findings[0] if isinstance(error, HoldfastError) else save_failed(partial, 0, error)
        shutil.rmtree(partial, ignore_errors=True)
        return whole

    def prune(self) -> None:
        if self._ranks.rank == 0:
            with suppress(OSError):  # retried after the next commit
                for step in self._retention.expired(list_steps(self.folder), self.agreed_step):
                    self._fence.drop(self.path(step))

    def set_aside_after(self, step: int) -> None:
        if self._ranks.rank == 0:
            for later in (self.path(each) for each in list_steps(self.folder) if each > step):
                aside = later.with_name(f"{later.name}.diverged")
                with suppress(OSError):  # another replica may have moved it, and a read-only folder holds no later one
                    if aside.exists():  # of an earlier divergence
                        shutil.rmtree(aside, ignore_errors=True)
                    later.rename(aside)
        self._ranks.all(True)


class ReadOnlyStorage(SharedStorage):
    """The same folder for a replay, which changes nothing there and saves nothing."""

    def take_over(self) -> list[CheckpointRef]:
        check_readable(self.folder)
        steps = self._ranks.run_on_first(lambda: list_steps(self.folder)[::-1])
        return [_ReadOnlyCheckpoint(step, self.path(step), self._ranks) for step in steps]

    def set_aside_after(self, step: int) -> None:
        """Later checkpoints stay, for the attempt that follows to set aside."""


class _SharedCheckpoint(CheckpointRef):
    """A checkpoint in a folder that all ranks reach."""

    def __init__(self, step: int, folder: Path, ranks: ControlGroup) -> None:
        self.step = step
        self.where = str(folder)
        self.folder = folder
        self._ranks = ranks

    def manifest(self) -> Manifest | str:
        return self._ranks.run_on_first(self._read_manifest)

    def _read_manifest(self) -> Manifest | str:
        try:
            self.fetch([manifest_file.NAME])
        except StoreUnreachable as error:
            raise store_unreachable(self.where, str(error)) from error
        return manifest_file.read(self.folder, self.step)

    def fetch(self, names: Iterable[str]) -> None:
        """A file that cannot be opened, as for missing descriptors or permissions, is not damaged."""
        for name in names:
            try:
                open_regular(self.folder / name).close()
            except OSError as error:
                if not is_damage(error):
                    raise StoreUnreachable(f"{type(error).__name__}: {error}") from None

    def quarantine(self, damage: str) -> Finding:
        quarantined = self.folder.with_name(f"{self.folder.name}.damaged")
        if self._ranks.rank == 0:
            with suppress(OSError):  # in a read-only folder it stays; an older one is loaded anyway
                shutil.rmtree(quarantined, ignore_errors=True)
                self.folder.rename(quarantined)
        return damaged_finding(self.folder.name, str(quarantined), damage)


class _ReadOnlyCheckpoint(_SharedCheckpoint):
    """A checkpoint that stays where it is, damaged or not."""

    def quarantine(self, damage: str) -> Finding:
        return damaged_finding(self.folder.name, self.where, damage)


def check_readable(folder: Path) -> None:
    """Raise HoldfastError if the folder exists but cannot be read: `glob` would treat it as empty."""
    try:
        with suppress(FileNotFoundError):
            os.listdir(folder)
    except OSError as error:
        raise failure(
            "checkpoint-store-unreachable",
            "the checkpoint folder cannot be read, so the step to resume from is unknown",
            exit_code=ExitCode.STORAGE_FAILED,
            where=str(folder),
            evidence=(f"{type(error).__name__}: {error}",),
            remedy=f"{_remedy(error)} Nothing there was changed.",
            owner=Owner.CLUSTER,
        ) from error


def list_steps(folder: Path) -> list[int]:
    """Steps of the committed folders, oldest first."""
    named = (STEP_FOLDER.fullmatch(path.name) for path in folder.glob("step-*"))
    return sorted(int(match[1]) for match in named if match)


def merge_files(manifest: Manifest, parts: Iterable[WrittenFiles]) -> Manifest | Finding:
    """The manifest of the files of all ranks, or why one rank failed."""
    files: dict[str, FileChecksum] = {}
    for part in parts:
        if isinstance(part, Finding):
            return part
        files |= part
    return msgspec.structs.replace(manifest, files=files)


def damaged_finding(name: str, where: str, damage: str) -> Finding:
    """Finding for a checkpoint that does not match its manifest; `where` is where it is now."""
    return Finding(
        code="checkpoint-corrupt",
        severity=Severity.WARNING,
        what=f"the checkpoint {name} is damaged and was set aside",
        where=where,
        evidence=(damage,),
        remedy="check the storage; delete the folder once it is understood",
        owner=Owner.CLUSTER,
    )


def save_failed(partial: Path, rank: int, error: BaseException) -> Finding:
    """Why a checkpoint could not be written; torch may hide that the disk is full, so free space is checked."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (error, _) = next(iter(error.failures.items()))
    row = resource_error_of(error) or resource_error_of(probe_disk(partial)) or resource_error_in(str(error))
    finding = Finding(
        code="checkpoint-failed",
        what=f"the checkpoint {partial.stem} could not be written{f': {row.what}' if row else ''}",
        where=str(partial.parent),
        evidence=(f"rank {rank}: {type(error).__name__}: {error}", *disk_usage(partial)),
        remedy=_remedy(error),
        owner=Owner.CLUSTER,
    )
    return msgspec.structs.replace(finding, code=row.code, remedy=row.remedy) if row else finding


def _remedy(error: BaseException) -> str:
    match error:
        case NotADirectoryError() | FileExistsError():
            first = "A file is where a folder is needed: move it away"
        case PermissionError():
            first = f"Let user {os.geteuid()} read and write there (`ls -ld`, `id`)"
        case FileNotFoundError():
            first = "See whether the folder was removed or its disk unmounted, and whether folders can be made there"
        case _:
            first = "Look for space and permissions there"
    return f"{first}, or {USE_ANOTHER_FOLDER}."


def not_saved(problem: Finding, *, last: bool) -> Finding:
    """Why there is no checkpoint, and the consequence; `last`: no later save follows."""
    follows = LAST if last else NEXT
    return msgspec.structs.replace(problem, remedy=f"{problem.remedy} {UNTOUCHED}, {follows}.")


def require_checkpoint(step: int, resumed_step: int, where: str) -> None:
    """Raise HoldfastError if a run that resumes another one would start at step 0."""
    if step or not resumed_step:
        return
    raise failure(
        "resumed-checkpoint-missing",
        f"this run resumes another one after step {resumed_step}, and the ranks see no checkpoint",
        exit_code=ExitCode.STORAGE_FAILED,
        where=where,
        remedy="Mount that folder on every node, or copy it to one that they share and name that: `holdfast run "
        "--resume RUN --set checkpoint.path=FOLDER`.",
        owner=Owner.CLUSTER,
    )


def ask_store(where: str, ask: Callable[[], T]) -> T:
    """The answer of a store; raises HoldfastError if there is none."""
    try:
        return ask()
    except HoldfastError:
        raise
    except Exception as error:  # any store client: it may raise anything
        raise store_unreachable(where, f"{type(error).__name__}: {error}") from error


def store_unreachable(where: str, *evidence: str) -> HoldfastError:
    """The store cannot be read, so the step to resume from is unknown."""
    return failure(
        "checkpoint-store-unreachable",
        "the store of checkpoints does not answer",
        exit_code=ExitCode.STORAGE_FAILED,
        where=where,
        evidence=evidence,
        remedy="See whether the address is right and lets this user in. Nothing there was changed.",
        owner=Owner.CLUSTER,
    )
