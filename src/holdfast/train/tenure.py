"""Owns who may commit into a folder of checkpoints: of one replica's attempts, the one that took it over last.

FOLDER/
    writer-0.json          who that is, for replica 0
    held-0                 locked by the one process that commits, as long as it lives: another run's is refused
    writing-0-3/           what attempt 3 of replica 0 is writing; a checkpoint leaves it, complete, by one rename

An attempt takes over by putting its name down and then taking away what others were writing. After that an earlier
one, cut off from its controller but alive, can finish nothing it had begun, for that is gone, and nothing new, for it
reads the name before it commits. Refuses to own what is written (checkpoint.py).
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
from holdfast.findings import Fault, Finding, Severity
from holdfast.host.files import open_lock
from holdfast.train.regular import open_regular

MAX_BYTES = 1 << 16
"""Of the file that names the writer."""
SUPERSEDED = "attempt-superseded"
REFUSALS = frozenset({SUPERSEDED, "checkpoints-in-use"})
"""Codes of what ends a rank: the folder is another's."""


class Writer(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt; the defaults are those of a process that nobody counts."""

    run: str = ""
    replica: int = 0
    attempt: int = 0

    def precedes(self, other: Writer) -> bool:
        """Whether it is an earlier attempt of the same; those of different runs are in no order."""
        return (self.run, self.replica) == (other.run, other.replica) and self.attempt < other.attempt


class Tenure:
    """One attempt's right to commit; its rank 0 alone takes it and uses it."""

    def __init__(self, folder: Path, writer: Writer) -> None:
        self.folder = folder
        self._writer = writer
        self._name = folder / f"writer-{writer.replica}.json"
        self._desk = folder / f"writing-{writer.replica}-{writer.attempt}"
        self._held: BinaryIO | None = None

    def partial(self, final: Path) -> Path:
        """Where to write what will be committed under this name."""
        return self._desk / final.name

    def take_over(self) -> None:
        """From here on no other attempt commits; raises HoldfastError when a later one holds the folder."""
        self._refuse_successor()
        self._hold()
        try:
            self._sign()
        finally:
            self._clear()  # also where the disk is too full for a name: what dead writers left may be what fills it

    def _hold(self) -> None:
        """Lock the folder against other runs; raises HoldfastError when one has it.

        A dead process holds nothing. An earlier attempt of the same run may be alive and beyond reach: it does not
        matter, and the lock is tried again at each commit. Where the file system has no locks, nobody is refused.
        """
        if self._held is not None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        held = open_lock(self.folder / f"held-{self._writer.replica}")  # who may only read the folder cannot lock it
        try:
            # By process, so that a child that a loader forked does not hold it on.
            fcntl.lockf(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            held.close()
            if error.errno in (errno.EAGAIN, errno.EACCES):
                self._refuse_neighbour()
            return
        self._held = held

    def _refuse_neighbour(self) -> None:
        holder = self._holder()
        if holder is not None and holder.run == self._writer.run != "":
            return
        raise in_use(holder, str(self.folder), f"`fuser -v {self.folder}/held-{self._writer.replica}` names it")

    def _holder(self) -> Writer | None:
        try:
            with open_regular(self._name) as file:
                return msgspec.json.decode(file.read(MAX_BYTES), type=Writer)
        except (OSError, msgspec.DecodeError):
            return None

    def _sign(self) -> None:
        fresh = self._name.with_suffix(".new")
        with fresh.open("wb") as file:
            file.write(msgspec.json.encode(self._writer))
            file.flush()
            os.fsync(file.fileno())
        fresh.rename(self._name)

    def _clear(self) -> None:
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
        self.miss()
        self._hold()
        self._refuse_successor()

    def miss(self) -> None:
        """Raise OSError, once, when the folder that was taken over was removed since, or its disk unmounted."""
        if self._gone():
            self._hold()
            self._refuse_successor()
            self._sign()
            what = "It has vanished since the last save, and is made anew"
            raise FileNotFoundError(errno.ENOENT, what, str(self.folder))

    def _gone(self) -> bool:
        """Whether the lock that is held is not in the folder any more; then it is let go."""
        if self._held is None:
            return False
        try:  # Not by the file's number, which some network file systems make up anew.
            there = os.stat(self._held.name).st_dev == os.fstat(self._held.fileno()).st_dev
        except FileNotFoundError:
            there = False
        if not there:
            self._held.close()
            self._held = None
        return not there

    def drop(self, final: Path) -> None:
        """Remove a complete checkpoint: never to be seen in part under its name."""
        self._desk.mkdir(exist_ok=True)
        shutil.rmtree(final.rename(self.partial(final).with_suffix(".old")), ignore_errors=True)

    def _refuse_successor(self) -> None:
        """Raise when a later attempt of this run has put its name down."""
        holder = self._holder()
        if holder is not None and self._writer.precedes(holder):
            raise superseded(self._writer, holder, str(self._name))


def error_of(problem: Finding) -> HoldfastError:
    """What a save that failed is where it must not: whatever it was among others, it ends the loop."""
    ended = msgspec.structs.replace(problem, severity=Severity.ERROR)
    return HoldfastError((ended,), ExitCode.REFUSED if problem.code in REFUSALS else ExitCode.STORAGE)


def superseded(writer: Writer, holder: Writer, where: str) -> HoldfastError:
    """A later attempt of the same run has taken over."""
    finding = Finding(
        code="attempt-superseded",  # SUPERSEDED, in words: the list of codes is read from calls
        what=f"attempt {holder.attempt} has taken over, so attempt {writer.attempt} commits nothing more",
        where=where,
        remedy="Nothing: this attempt's node was given up while it was out of reach. Its ranks end.",
        fault=Fault.CLUSTER,
    )
    return HoldfastError((finding,), ExitCode.REFUSED)


def in_use(holder: Writer | None, where: str, found_by: str = "") -> HoldfastError:
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
    return HoldfastError((finding,), ExitCode.REFUSED)
