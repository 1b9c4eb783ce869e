"""Owns who may commit into a folder of checkpoints: of one replica's attempts, the one that took it over last.

FOLDER/
    writer-0.json          who that is, for replica 0
    lock-0                 locked by the one process that commits, as long as it lives: another run's is refused
    writing-0-3/           what attempt 3 of replica 0 is writing; a checkpoint leaves it, complete, by one rename

An attempt takes over by putting its name down and then taking away what others were writing. After that an earlier
one, cut off from its controller but alive, can finish nothing it had begun, for that is gone, and nothing new, for it
reads the name before it commits. Refuses to own what is written (manager.py).
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
"""Codes of what ends a rank: the folder is another's."""


class WriterId(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt; the defaults are those of a process that nobody counts."""

    run: str = ""
    replica: int = 0
    attempt: int = 0

    def precedes(self, other: WriterId) -> bool:
        """Whether it is an earlier attempt of the same; those of different runs are in no order."""
        return (self.run, self.replica) == (other.run, other.replica) and self.attempt < other.attempt


class WriterFence:
    """One attempt's right to commit; its rank 0 alone takes it and uses it."""

    def __init__(self, folder: Path, writer: WriterId) -> None:
        self.folder = folder
        self._writer = writer
        self._writer_file = folder / f"writer-{writer.replica}.json"
        self._writing_dir = folder / f"writing-{writer.replica}-{writer.attempt}"
        self._lock: BinaryIO | None = None

    def partial(self, final: Path) -> Path:
        """Where to write what will be committed under this name."""
        return self._writing_dir / final.name

    def take_over(self) -> None:
        """From here on no other attempt commits; raises HoldfastError when a later one holds the folder."""
        self._refuse_successor()
        self._lock_folder()
        try:
            self._publish_writer()
        finally:
            self._discard_partial()  # also where the disk is too full for a name: what dead writers left may be what fills it

    def _lock_folder(self) -> None:
        """Lock the folder against other runs; raises HoldfastError when one has it.

        A dead process holds nothing. An earlier attempt of the same run may be alive and beyond reach: it does not
        matter, and the lock is tried again at each commit. Where the file system has no locks, nobody is refused.
        """
        if self._lock is not None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        held = open_lock(self.folder / f"lock-{self._writer.replica}")  # who may only read the folder cannot lock it
        try:
            # By process, so that a child that a loader forked does not hold it on.
            fcntl.lockf(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            held.close()
            if error.errno in (errno.EAGAIN, errno.EACCES):
                self._refuse_other_run()
            return
        self._lock = held

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
        for desk in self.folder.glob(f"writing-{self._writer.replica}-*"):
            # Renamed first, and at once: what is being removed can be renamed by its writer until its turn comes.
            ended = desk.with_name(f"ended-{desk.name}")
            shutil.rmtree(ended, ignore_errors=True)
            desk.rename(ended)
        for ended in self.folder.glob(f"ended-writing-{self._writer.replica}-*"):
            shutil.rmtree(ended, ignore_errors=True)

    def commit(self, final: Path) -> None:
        """Make what was written for this name complete; raises HoldfastError when another attempt has taken over."""
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
            # A replica that was lost right after had saved the step, which another did again: both are as good.
            shutil.rmtree(partial, ignore_errors=True)

    def check(self) -> None:
        """Raise HoldfastError when another attempt has taken over, or another run has the folder."""
        self.check_still_mounted()
        self._lock_folder()
        self._refuse_successor()

    def check_still_mounted(self) -> None:
        """Raise OSError, once, when the folder that was taken over was removed since, or its disk unmounted."""
        if self._lock_lost():
            self._lock_folder()
            self._refuse_successor()
            self._publish_writer()
            what = "It has vanished since the last save, and is made anew"
            raise FileNotFoundError(errno.ENOENT, what, str(self.folder))

    def _lock_lost(self) -> bool:
        """Whether the lock that is held is not in the folder any more; then it is let go."""
        if self._lock is None:
            return False
        try:  # Not by the file's number, which some network file systems make up anew.
            there = os.stat(self._lock.name).st_dev == os.fstat(self._lock.fileno()).st_dev
        except FileNotFoundError:
            there = False
        if not there:
            self._lock.close()
            self._lock = None
        return not there

    def drop(self, final: Path) -> None:
        """Remove a complete checkpoint: never to be seen in part under its name."""
        self._writing_dir.mkdir(exist_ok=True)
        shutil.rmtree(final.rename(self.partial(final).with_suffix(".old")), ignore_errors=True)

    def _refuse_successor(self) -> None:
        """Raise when a later attempt of this run has put its name down."""
        holder = self._current_writer()
        if holder is not None and self._writer.precedes(holder):
            raise superseded(self._writer, holder, str(self._writer_file))


def to_error(problem: Finding) -> HoldfastError:
    """What a save that failed is where it must not: whatever it was among others, it ends the loop."""
    ended = msgspec.structs.replace(problem, severity=Severity.ERROR)
    return HoldfastError((ended,), ExitCode.NOT_PERMITTED if problem.code in REFUSALS else ExitCode.STORAGE_FAILED)


def superseded(writer: WriterId, holder: WriterId, where: str) -> HoldfastError:
    """A later attempt of the same run has taken over."""
    finding = Finding(
        code="attempt-superseded",  # SUPERSEDED, in words: the list of codes is read from calls
        what=f"attempt {holder.attempt} has taken over, so attempt {writer.attempt} commits nothing more",
        where=where,
        remedy="Nothing: this attempt's node was given up while it was out of reach. Its ranks end.",
        owner=Owner.CLUSTER,
    )
    return HoldfastError((finding,), ExitCode.NOT_PERMITTED)


def in_use(holder: WriterId | None, where: str, found_by: str = "") -> HoldfastError:
    """Another run, that of `holder` where one has signed, has the place; `found_by` is how to find its process."""
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
