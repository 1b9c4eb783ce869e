"""Fences writers of a checkpoint folder: of one replica's attempts, only the last to take it over may commit.

FOLDER/
    writer-0.json          the current writer, for replica 0
    lock-0                 locked by the committing process while it lives, against other runs
    writing-0-3/           files that attempt 3 of replica 0 is writing; one rename commits a checkpoint

An attempt takes over by writing its name, then renaming and removing the partial files of others. A partitioned earlier
attempt can then commit nothing: its partial files are gone, and it reads the name before each commit.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from pathlib import Path
from typing import BinaryIO

import msgspec

from holdfast.errors import ExitCode, HoldfastError
from holdfast.findings import Finding, Owner, Severity
from holdfast.host.files import open_lock
from holdfast.train.checkpoint.regular_file import open_regular

MAX_BYTES = 1 << 16
"""Of the file that names the writer."""
SUPERSEDED = "attempt-superseded"
REFUSALS = frozenset({SUPERSEDED, "checkpoints-in-use"})
"""Finding codes that end a rank, because another writer owns the folder."""


class WriterId(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt; the defaults suit a process without attempt numbers."""

    run: str = ""
    replica: int = 0
    attempt: int = 0

    def precedes(self, other: WriterId) -> bool:
        """Whether it is an earlier attempt of the same run; different runs have no order."""
        return (self.run, self.replica) == (other.run, other.replica) and self.attempt < other.attempt


class WriterFence:
    """One attempt's right to commit; only its rank 0 takes and uses it."""

    def __init__(self, folder: Path, writer: WriterId) -> None:
        self.folder = folder
        self._writer = writer
        self._writer_file = folder / f"writer-{writer.replica}.json"
        self._writing_dir = folder / f"writing-{writer.replica}-{writer.attempt}"
        self._lock: BinaryIO | None = None

    def partial(self, final: Path) -> Path:
        """Path for writing what will be committed as `final`."""
        return self._writing_dir / final.name

    def take_over(self) -> None:
        """Become the only attempt that may commit; raises HoldfastError if a later one has taken over."""
        self._refuse_successor()
        self._lock_folder()
        try:
            self._publish_writer()
        finally:
            self._discard_partial()  # also after ENOSPC: partial files of dead writers may fill the disk

    def _lock_folder(self) -> None:
        """Lock the folder against other runs; raises HoldfastError if one has locked it.

        A dead process holds no lock. An earlier attempt of the same run may be alive but unreachable: then the lock is
        not required, and is tried again at each commit. On file systems without locks this refuses no run.
        """
        if self._lock is not None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = open_lock(self.folder / f"lock-{self._writer.replica}")  # fails in a read-only folder
        try:
            # A lock per process, so that a child forked by a data loader does not keep it.
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.close()
            if error.errno in (errno.EAGAIN, errno.EACCES):
                self._refuse_other_run()
            return
        self._lock = lock

    def _refuse_other_run(self) -> None:
        holder = self._current_writer()
        if holder is not None and holder.run == self._writer.run != "":
            return
        raise in_use(holder, str(self.folder), f"`fuser -v {self.folder}/lock-{self._writer.replica}` names it")

    def _current_writer(self) -> WriterId | None:
        try:
            with open_regular(self._writer_file) as file:
                return msgspec.json.decode(file.read(MAX_BYTES), type=WriterId)
        except (OSError, msgspec.DecodeError):
            return None

    def _publish_writer(self) -> None:
        fresh = self._writer_file.with_suffix(".new")
        with fresh.open("wb") as file:
            file.write(msgspec.json.encode(self._writer))
            file.flush()
            os.fsync(file.fileno())
        fresh.rename(self._writer_file)

    def _discard_partial(self) -> None:
        for writing in self.folder.glob(f"writing-{self._writer.replica}-*"):
            # Rename first: its writer could still commit a folder that is being removed.
            ended = writing.with_name(f"ended-{writing.name}")
            shutil.rmtree(ended, ignore_errors=True)
            writing.rename(ended)
        for ended in self.folder.glob(f"ended-writing-{self._writer.replica}-*"):
            shutil.rmtree(ended, ignore_errors=True)

    def commit(self, final: Path) -> None:
        """Commit what was written for this name; raises HoldfastError if another attempt has taken over."""
        self.check()
        partial = self.partial(final)
        try:
            partial.rename(final)
        except FileNotFoundError:
            self._refuse_successor()
            raise
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            # A lost replica had already saved this step, and another repeats it: both checkpoints are equal.
            shutil.rmtree(partial, ignore_errors=True)

    def check(self) -> None:
        """Raise HoldfastError if another attempt has taken over, or another run has the folder."""
        self.check_still_mounted()
        self._lock_folder()
        self._refuse_successor()

    def check_still_mounted(self) -> None:
        """Raise OSError, once, if the folder was removed or its disk unmounted since the takeover."""
        if self._lock_lost():
            self._lock_folder()
            self._refuse_successor()
            self._publish_writer()
            what = "It has vanished since the last save, and is created again"
            raise FileNotFoundError(errno.ENOENT, what, str(self.folder))

    def _lock_lost(self) -> bool:
        """Whether the locked file is no longer in the folder; if so, release the lock."""
        if self._lock is None:
            return False
        try:  # Not by inode number: some network file systems change it.
            there = os.stat(self._lock.name).st_dev == os.fstat(self._lock.fileno()).st_dev
        except FileNotFoundError:
            there = False
        if not there:
            self._lock.close()
            self._lock = None
        return not there

    def drop(self, final: Path) -> None:
        """Remove a complete checkpoint by a rename first, so that a partial one is never visible under its name."""
        self._writing_dir.mkdir(exist_ok=True)
        shutil.rmtree(final.rename(self.partial(final).with_suffix(".old")), ignore_errors=True)

    def _refuse_successor(self) -> None:
        """Raise if a later attempt of this run has written its name."""
        holder = self._current_writer()
        if holder is not None and self._writer.precedes(holder):
            raise superseded(self._writer, holder, str(self._writer_file))


def to_error(problem: Finding) -> HoldfastError:
    """The error for a failed save that must end the loop, whatever severity it had."""
    ended = msgspec.structs.replace(problem, severity=Severity.ERROR)
    return HoldfastError((ended,), ExitCode.NOT_PERMITTED if problem.code in REFUSALS else ExitCode.STORAGE_FAILED)


def superseded(writer: WriterId, holder: WriterId, where: str) -> HoldfastError:
    """Error: a later attempt of the same run has taken over."""
    finding = Finding(
        code="attempt-superseded",  # SUPERSEDED as a literal: the list of codes is extracted from calls
        what=f"attempt {holder.attempt} has taken over, so attempt {writer.attempt} commits nothing more",
        where=where,
        remedy="Nothing: this attempt's node was given up while it was out of reach. Its ranks end.",
        owner=Owner.CLUSTER,
    )
    return HoldfastError((finding,), ExitCode.NOT_PERMITTED)


def in_use(holder: WriterId | None, where: str, found_by: str = "") -> HoldfastError:
    """Error: another run, that of `holder` if known, uses the folder; `found_by` tells how to find its process."""
    run = holder.run if holder else ""
    who = f"the run {run}" if run else "a process that belongs to no run of holdfast's"
    end = f"end it with `holdfast cancel {run}`" if run else f"end it{found_by and f' ({found_by})'}"
    finding = Finding(
        code="checkpoints-in-use",
        what=f"{who} is saving its checkpoints there now",
        where=where,
        remedy=f"set `checkpoint.path` (HOLDFAST_CHECKPOINT_PATH without a job) to another folder, or {end}",
    )
    return HoldfastError((finding,), ExitCode.NOT_PERMITTED)
