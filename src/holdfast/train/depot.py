"""Owns where checkpoints are kept, as their life needs it (checkpoint.py): a folder that all ranks reach, for a start.

The other depot is that of two tiers (tiers.py). All ranks make the same calls. Refuses to own what a checkpoint holds
(training.py), and when one is taken (session.py).
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
from holdfast.findings import Fault, Finding, Severity
from holdfast.shortage import lacking, room, shortage_in, shortage_of
from holdfast.train import seal
from holdfast.train.environment import ELSEWHERE
from holdfast.train.ranks import Ranks
from holdfast.train.regular import is_damage, open_regular
from holdfast.train.retention import Retention
from holdfast.train.seal import FileSum, Seal
from holdfast.train.tensors import Lost
from holdfast.train.tenure import Tenure, Writer

COMPLETE = re.compile(r"step-(\d{8,})")

UNTOUCHED = "The checkpoints that are there are untouched"
NEXT = "and the next is tried when it is due"
LAST = "but this was the last: what none of them holds is done again at the next start"

Written = dict[str, FileSum] | Finding
"""A rank's files as they were written, or why they were not."""


class Remains(str):
    """Says what is left of a checkpoint that was never whole, or went with a node before the store had it."""


class Copy(Protocol):
    """A checkpoint at one place; `damage` and `have` are a rank's own, the rest is called by all."""

    step: int
    where: str
    folder: Path
    """Where its files can be read, once `have` has been asked for them."""

    def sealed(self) -> Seal | str:
        """What it must be, or why that cannot be told: the same on all ranks."""
        ...

    def have(self, names: Iterable[str]) -> None:
        """Have these files in `folder`; raises Lost where their place does not answer."""
        ...

    def damage(self, name: str, expected: FileSum) -> str | None:
        """How a file differs from what it was sealed as."""
        ...

    def set_aside(self, damage: str) -> Finding:
        """Have it out of the way, so that nobody comes upon it again; says so."""
        ...


class Depot(Protocol):
    """A place for the checkpoints of one run."""

    where: str

    def name(self, step: int) -> str: ...

    def partial(self, step: int) -> Path:
        """The folder that this rank writes its part to."""
        ...

    def take_over(self) -> list[Copy]:
        """Have other attempts commit no more; returns what is there, newest first, and of one step the nearest."""
        ...

    def resumed(self, step: int) -> None:
        """Training goes on after this step."""
        ...

    def commit(self, sealed: Seal, written: Written, aside: Ranks) -> Finding | None:
        """Make a checkpoint complete; `written` is this rank's part. Called by each rank's second thread."""
        ...

    def tidy(self) -> None:
        """Drop what is too old, after a commit; called by each rank's second thread."""
        ...

    def noticed(self) -> Finding | None:
        """What went wrong behind the saves since the last call; the same on all ranks."""
        ...

    def close(self) -> Finding | None:
        """Wait for what goes on behind the saves; returns why the newest checkpoint is not where it should be."""
        ...


class Shared:
    """A folder that all ranks reach: the only copy."""

    def __init__(self, folder: Path, *, retention: Retention, ranks: Ranks, writer: Writer) -> None:
        self.folder = folder
        self.where = str(folder)
        self._tenure = Tenure(folder, writer)
        self._retention = retention
        self._ranks = ranks

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def name(self, step: int) -> str:
        return str(self.path(step))

    def partial(self, step: int) -> Path:
        return self._tenure.partial(self.path(step))

    def take_over(self) -> list[Copy]:
        return [_Only(step, self.path(step), self._ranks) for step in self._ranks.on_first(self._take_over)]

    def _take_over(self) -> list[int]:
        with suppress(OSError):  # where nothing can be written, nobody commits; the first save will say so
            self._tenure.take_over()
        look_into(self.folder)
        return steps_in(self.folder)[::-1]

    def resumed(self, step: int) -> None:
        pass

    def commit(self, sealed: Seal, written: Written, aside: Ranks) -> Finding | None:
        parts = aside.to_first(written)
        return aside.from_first(self._commit(sealed, parts) if parts else None)

    def _commit(self, sealed: Seal, parts: Iterable[Written]) -> Finding | None:
        """In one rename; what was written of one that failed is removed: a full disk needs the room for the next."""
        partial = self.partial(sealed.step)
        whole = merged(sealed, parts)
        try:
            self._tenure.miss()
            if isinstance(whole, Seal):
                seal.write(partial, whole)
                self._tenure.commit(self.path(sealed.step))
                seal.sync_folder(self.folder)
                return None
        except (HoldfastError, OSError) as error:
            whole = error.findings[0] if isinstance(error, HoldfastError) else failed(partial, 0, error)
        shutil.rmtree(partial, ignore_errors=True)
        return whole

    def tidy(self) -> None:
        if self._ranks.rank == 0:
            with suppress(OSError):  # it is tried again after the next
                for step in self._retention.superfluous(steps_in(self.folder)):
                    self._tenure.drop(self.path(step))

    def noticed(self) -> Finding | None:
        return None

    def close(self) -> Finding | None:
        return None


class _Only:
    """A checkpoint in a folder that all ranks reach."""

    def __init__(self, step: int, folder: Path, ranks: Ranks) -> None:
        self.step = step
        self.where = str(folder)
        self.folder = folder
        self._ranks = ranks

    def sealed(self) -> Seal | str:
        return self._ranks.on_first(self._sealed)

    def _sealed(self) -> Seal | str:
        try:
            self.have([seal.NAME])
        except Lost as error:
            raise unreachable(self.where, str(error)) from error
        return seal.read(self.folder, self.step)

    def have(self, names: Iterable[str]) -> None:
        """That a file cannot be opened, as for want of descriptors or rights, is no damage to it."""
        for name in names:
            try:
                open_regular(self.folder / name).close()
            except OSError as error:
                if not is_damage(error):
                    raise Lost(f"{type(error).__name__}: {error}") from None

    def damage(self, name: str, expected: FileSum) -> str | None:
        return seal.damage(self.folder / name, expected)

    def set_aside(self, damage: str) -> Finding:
        aside = self.folder.with_name(f"{self.folder.name}.damaged")
        if self._ranks.rank == 0:
            with suppress(OSError):  # a folder that cannot be written: the loaded one, older, is as good
                shutil.rmtree(aside, ignore_errors=True)
                self.folder.rename(aside)
        return damaged(self.folder.name, str(aside), damage)


def look_into(folder: Path) -> None:
    """Raise HoldfastError where a folder is there and cannot be read: to `glob` it is an empty one."""
    try:
        with suppress(FileNotFoundError):
            os.listdir(folder)
    except OSError as error:
        raise failure(
            "checkpoint-store-unreachable",
            "the folder of checkpoints cannot be read, so nobody knows where training stood",
            exit_code=ExitCode.STORAGE,
            where=str(folder),
            evidence=(f"{type(error).__name__}: {error}",),
            remedy=f"{_remedy(error)} Nothing there was changed.",
            fault=Fault.CLUSTER,
        ) from error


def steps_in(folder: Path) -> list[int]:
    """Of the folders of a final name, oldest first."""
    named = (COMPLETE.fullmatch(path.name) for path in folder.glob("step-*"))
    return sorted(int(match[1]) for match in named if match)


def merged(sealed: Seal, parts: Iterable[Written]) -> Seal | Finding:
    """The seal of what all ranks have written, or why one has not."""
    files: dict[str, FileSum] = {}
    for part in parts:
        if isinstance(part, Finding):
            return part
        files |= part
    return msgspec.structs.replace(sealed, files=files)


def damaged(name: str, where: str, damage: str) -> Finding:
    """A checkpoint is not what was written, and lies there now."""
    return Finding(
        code="checkpoint-damaged",
        severity=Severity.WARNING,
        what=f"the checkpoint {name} is damaged and was set aside",
        where=where,
        evidence=(damage,),
        remedy="check the storage; delete the folder once it is understood",
        fault=Fault.CLUSTER,
    )


def failed(partial: Path, rank: int, error: BaseException) -> Finding:
    """Why a checkpoint could not be written; torch may not say that the disk is full, so the disk is looked at."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (error, _) = next(iter(error.failures.items()))
    row = shortage_of(error) or shortage_of(lacking(partial)) or shortage_in(str(error))
    finding = Finding(
        code="checkpoint-failed",
        what=f"the checkpoint {partial.stem} could not be written{f': {row.what}' if row else ''}",
        where=str(partial.parent),
        evidence=(f"rank {rank}: {type(error).__name__}: {error}", *room(partial)),
        remedy=_remedy(error),
        fault=Fault.CLUSTER,
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
    return f"{first}, or {ELSEWHERE}."


def unsaved(problem: Finding, *, last: bool) -> Finding:
    """Why there is no checkpoint, with what comes of that; `last` is one that no other follows."""
    follows = LAST if last else NEXT
    return msgspec.structs.replace(problem, remedy=f"{problem.remedy} {UNTOUCHED}, {follows}.")


def unreachable(where: str, *evidence: str) -> HoldfastError:
    """The store cannot be asked what it has, and without it nobody knows where training stood."""
    return failure(
        "checkpoint-store-unreachable",
        "the store of checkpoints does not answer",
        exit_code=ExitCode.STORAGE,
        where=where,
        evidence=evidence,
        remedy="See whether the address is right and lets this user in. Nothing there was changed.",
        fault=Fault.CLUSTER,
    )
