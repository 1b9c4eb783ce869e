"""Owns where checkpoints are kept, as their life needs it (manager.py): a folder that all ranks reach, for a start.

The other depot is that of two tiers (tiered_storage.py). All ranks make the same calls. Refuses to own what a checkpoint holds
(train_state.py), and when one is taken (session.py).
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import msgspec
from torch.distributed.checkpoint.api import CheckpointException

from holdfast.errors import ExitCode, HoldfastError, failure
from holdfast.findings import Finding, Owner, Severity
from holdfast.os_errors import disk_usage, probe_disk, resource_error_in, resource_error_of
from holdfast.train.checkpoint import manifest_file
from holdfast.train.checkpoint.dcp_io import StoreUnreachable
from holdfast.train.checkpoint.manifest_file import FileChecksum, Manifest
from holdfast.train.checkpoint.regular_file import is_damage, open_regular
from holdfast.train.checkpoint.retention_policy import RetentionPolicy
from holdfast.train.checkpoint.writer_fence import WriterFence, WriterId
from holdfast.train.session.control_group import ControlGroup
from holdfast.train.session.rank_config import USE_ANOTHER_FOLDER

STEP_FOLDER = re.compile(r"step-(\d{8,})")

UNTOUCHED = "The checkpoints that are there are untouched"
NEXT = "and the next is tried when it is due"
LAST = "but this was the last: what none of them holds is done again at the next start"

WrittenFiles = dict[str, FileChecksum] | Finding
"""A rank's files as they were written, or why they were not."""


class Incomplete(str):
    """Says what is left of a checkpoint that was never whole, or went with a node before the store had it."""


class CheckpointRef(Protocol):
    """A checkpoint at one place; `damage` and `have` are a rank's own, the rest is called by all."""

    step: int
    where: str
    folder: Path
    """Where its files can be read, once `have` has been asked for them."""

    def manifest(self) -> Manifest | str:
        """What it must be, or why that cannot be told: the same on all ranks."""
        ...

    def fetch(self, names: Iterable[str]) -> None:
        """Have these files in `folder`; raises Lost where their place does not answer."""
        ...

    def find_damage(self, name: str, expected: FileChecksum) -> str | None:
        """How a file differs from what it was sealed as."""
        ...

    def quarantine(self, damage: str) -> Finding:
        """Have it out of the way, so that nobody comes upon it again; says so."""
        ...


class CheckpointStorage(Protocol):
    """A place for the checkpoints of one run."""

    where: str

    def name(self, step: int) -> str: ...

    def partial(self, step: int) -> Path:
        """The folder that this rank writes its part to."""
        ...

    def take_over(self) -> list[CheckpointRef]:
        """Have other attempts commit no more; returns what is there, newest first, and of one step the nearest."""
        ...

    def on_resumed(self, step: int) -> None:
        """Training goes on after this step."""
        ...

    def commit(self, manifest: Manifest, written: WrittenFiles, group: ControlGroup) -> Finding | None:
        """Make a checkpoint complete; `written` is this rank's part. Called by each rank's second thread."""
        ...

    def prune(self) -> None:
        """Drop what is too old, after a commit; called by each rank's second thread."""
        ...

    def take_finding(self) -> Finding | None:
        """What went wrong behind the saves since the last call; the same on all ranks."""
        ...

    def close(self) -> Finding | None:
        """Wait for what goes on behind the saves; returns why the newest checkpoint is not where it should be."""
        ...


class SharedStorage:
    """A folder that all ranks reach: the only copy."""

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
        with suppress(OSError):  # where nothing can be written, nobody commits; the first save will say so
            self._fence.take_over()
        check_readable(self.folder)
        return list_steps(self.folder)[::-1]

    def on_resumed(self, step: int) -> None:
        pass

    def commit(self, manifest: Manifest, written: WrittenFiles, group: ControlGroup) -> Finding | None:
        parts = group.gather(written)
        return group.broadcast(self._commit(manifest, parts) if parts else None)

    def _commit(self, manifest: Manifest, parts: Iterable[WrittenFiles]) -> Finding | None:
        """In one rename; what was written of one that failed is removed: a full disk needs the room for the next."""
        partial = self.partial(manifest.step)
        whole = merge_files(manifest, parts)
        try:
            self._fence.check_still_mounted()
            if isinstance(whole, Manifest):
                manifest_file.write(partial, whole)
                self._fence.commit(self.path(manifest.step))
                manifest_file.sync_folder(self.folder)
                return None
        except (HoldfastError, OSError) as error:
            whole = error.findings[0] if isinstance(error, HoldfastError) else save_failed(partial, 0, error)
        shutil.rmtree(partial, ignore_errors=True)
        return whole

    def prune(self) -> None:
        if self._ranks.rank == 0:
            with suppress(OSError):  # it is tried again after the next
                for step in self._retention.expired(list_steps(self.folder)):
                    self._fence.drop(self.path(step))

    def take_finding(self) -> Finding | None:
        return None

    def close(self) -> Finding | None:
        return None


class _SharedCheckpoint:
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
        """That a file cannot be opened, as for want of descriptors or rights, is no damage to it."""
        for name in names:
            try:
                open_regular(self.folder / name).close()
            except OSError as error:
                if not is_damage(error):
                    raise StoreUnreachable(f"{type(error).__name__}: {error}") from None

    def find_damage(self, name: str, expected: FileChecksum) -> str | None:
        return manifest_file.find_damage(self.folder / name, expected)

    def quarantine(self, damage: str) -> Finding:
        group = self.folder.with_name(f"{self.folder.name}.damaged")
        if self._ranks.rank == 0:
            with suppress(OSError):  # a folder that cannot be written: the loaded one, older, is as good
                shutil.rmtree(group, ignore_errors=True)
                self.folder.rename(group)
        return damaged_finding(self.folder.name, str(group), damage)


def check_readable(folder: Path) -> None:
    """Raise HoldfastError where a folder is there and cannot be read: to `glob` it is an empty one."""
    try:
        with suppress(FileNotFoundError):
            os.listdir(folder)
    except OSError as error:
        raise failure(
            "checkpoint-store-unreachable",
            "the folder of checkpoints cannot be read, so nobody knows where training stood",
            exit_code=ExitCode.STORAGE_FAILED,
            where=str(folder),
            evidence=(f"{type(error).__name__}: {error}",),
            remedy=f"{_remedy(error)} Nothing there was changed.",
            owner=Owner.CLUSTER,
        ) from error


def list_steps(folder: Path) -> list[int]:
    """Of the folders of a final name, oldest first."""
    named = (STEP_FOLDER.fullmatch(path.name) for path in folder.glob("step-*"))
    return sorted(int(match[1]) for match in named if match)


def merge_files(manifest: Manifest, parts: Iterable[WrittenFiles]) -> Manifest | Finding:
    """The seal of what all ranks have written, or why one has not."""
    files: dict[str, FileChecksum] = {}
    for part in parts:
        if isinstance(part, Finding):
            return part
        files |= part
    return msgspec.structs.replace(manifest, files=files)


def damaged_finding(name: str, where: str, damage: str) -> Finding:
    """A checkpoint is not what was written, and lies there now."""
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
    """Why a checkpoint could not be written; torch may not say that the disk is full, so the disk is looked at."""
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
    """Why there is no checkpoint, with what comes of that; `last` is one that no other follows."""
    follows = LAST if last else NEXT
    return msgspec.structs.replace(problem, remedy=f"{problem.remedy} {UNTOUCHED}, {follows}.")


def store_unreachable(where: str, *evidence: str) -> HoldfastError:
    """The store cannot be asked what it has, and without it nobody knows where training stood."""
    return failure(
        "checkpoint-store-unreachable",
        "the store of checkpoints does not answer",
        exit_code=ExitCode.STORAGE_FAILED,
        where=where,
        evidence=evidence,
        remedy="See whether the address is right and lets this user in. Nothing there was changed.",
        owner=Owner.CLUSTER,
    )
