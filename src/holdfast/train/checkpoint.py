"""Owns checkpoints on disk: written beside the old ones, sealed at once, verified before they are believed.

A checkpoint is a folder `step-00000042`: tensors as torch.distributed.checkpoint lays them out (each rank its share),
`host-00000.pt` per rank (random numbers, scheduler, the user's own state), and the seal, which names the format, the
step, and every file's size and checksum. It is written elsewhere and renamed once everything is on disk, so a folder
of the final name is complete whenever the writer died. Refuses to own when one is taken (session.py), and who may
commit one (tenure.py).
"""

from __future__ import annotations

import os
import re
import shutil
import warnings
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypedDict

import msgspec
import torch

# These take 0.1 s to import once an optimiser has brought in torch._dynamo (2.6 s), as every one does when it is made.
# The ignores: torch says PathLike without saying of what.
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load  # pyright: ignore[reportUnknownVariableType]
from torch.distributed.checkpoint.state_dict_saver import save  # pyright: ignore[reportUnknownVariableType]
from torch.nn import Module
from torch.optim import Optimizer

from holdfast.errors import ExitCode, HoldfastError, failure
from holdfast.findings import Fault, Finding, Severity
from holdfast.shortage import lacking, room, shortage_in, shortage_of
from holdfast.train import rng, seal
from holdfast.train.ranks import Ranks
from holdfast.train.seal import FileSum, Seal
from holdfast.train.tenure import SUPERSEDED, Tenure, Writer

ALONE = Writer()
"""A process that was started by nobody who counts its attempts."""

_COMPLETE = re.compile(r"step-(\d{8,})")


class Stateful(Protocol):
    """What a scheduler, a sampler, or anything of the user's offers in order to be saved with the model."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object: ...


@dataclass(frozen=True, kw_only=True)
class Training:
    """Everything of a training loop's that a checkpoint holds, beside the step and the random numbers."""

    model: Module
    optimizer: Optimizer
    scheduler: Stateful | None = None
    extra: Stateful | None = None


class Host(TypedDict):
    """One rank's own part: what is not the model's or the optimiser's."""

    random: rng.RandomState
    scheduler: dict[str, Any] | None
    extra: dict[str, Any] | None


class Restored(NamedTuple):
    """What came of looking for a checkpoint."""

    step: int
    """0 where there is none."""
    noticed: list[Finding]
    """What is to be said of it; on rank 0."""
    samples: int | None = None
    """Samples that its steps took, where that is known."""


class Checkpoints:
    """The checkpoints of one run in a folder that all its ranks reach; all ranks call `restore` and `save` together."""

    def __init__(self, folder: Path, *, keep: int, training: Training, ranks: Ranks, writer: Writer = ALONE) -> None:
        self.folder = folder
        self._tenure = Tenure(folder, writer)
        self._keep = keep
        self._training = training
        self._ranks = ranks

    def path(self, step: int) -> Path:
        """Where the complete checkpoint of a step lies."""
        return self.folder / f"step-{step:08d}"

    def restore(self) -> Restored:
        """Load the newest complete checkpoint."""
        newest, noticed = self._newest() if self._ranks.rank == 0 else (None, [])
        newest = self._ranks.from_first(newest)
        if newest is None:
            return Restored(0, noticed)
        self._load_tensors(newest)
        self._load_host(newest)
        if self._ranks.rank == 0 and newest.world_size != self._ranks.world_size:
            noticed.append(_world_changed(newest, self._ranks.world_size))
        return Restored(newest.step, noticed, newest.samples)

    def save(self, step: int, samples: int | None = None) -> Path:
        """Write and seal one: complete, for every rank, when this returns; a failure is raised on all of them alike."""
        partial = self._tenure.partial(self.path(step))
        sealed = Seal(step=step, world_size=self._ranks.world_size, samples=samples, files={})
        written = self._ranks.to_first(self._write(partial))
        problem = self._ranks.from_first(self._commit(sealed, partial, written) if self._ranks.rank == 0 else None)
        if problem is not None:
            raise HoldfastError((problem,), ExitCode.REFUSED if problem.code == SUPERSEDED else ExitCode.STORAGE)
        return self.path(step)

    def _write(self, partial: Path) -> dict[str, FileSum] | Finding:
        """Write this rank's part and see it to disk; returns its files' sums, or what went wrong."""
        rank, group = self._ranks.rank, self._ranks.group
        try:
            with _one_process_is_meant():
                save(self._tensors(), checkpoint_id=partial, process_group=group, no_dist=group is None)
            with (partial / _host_file(rank)).open("wb") as file:
                torch.save(self._host(), file)
                file.flush()
                os.fsync(file.fileno())
            index = [partial / ".metadata"] if rank == 0 else []
            return seal.sums([*partial.glob(f"__{rank}_*"), partial / _host_file(rank), *index])
        except (OSError, RuntimeError, CheckpointException) as error:
            return _failed(partial, rank, error)

    def _tensors(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self._training.model, self._training.optimizer)
        return {"model": model, "optimizer": optimizer}

    def _host(self) -> Host:
        scheduler, extra = self._training.scheduler, self._training.extra
        return Host(
            random=rng.capture(),
            scheduler=scheduler.state_dict() if scheduler else None,
            extra=extra.state_dict() if extra else None,
        )

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
            for old in self._complete()[self._keep :]:
                self._tenure.drop(old)
        except (HoldfastError, OSError) as error:
            problem = error.findings[0] if isinstance(error, HoldfastError) else _failed(partial, 0, error)
            shutil.rmtree(partial, ignore_errors=True)
            return problem
        return None

    def _complete(self) -> list[Path]:
        """Folders of the final name, newest first."""
        named = [path for path in self.folder.glob("step-*") if _COMPLETE.fullmatch(path.name)]
        return sorted(named, key=lambda path: int(path.name.removeprefix("step-")), reverse=True)

    def _newest(self) -> tuple[Seal | None, list[Finding]]:
        """Take the folder over, and find the newest one that is what its seal says."""
        with suppress(OSError):  # where nothing can be written, nobody commits; the first checkpoint will say so
            self._tenure.take_over()
        noticed: list[Finding] = []
        for path in self._complete():
            found = seal.verified(path)
            if isinstance(found, Seal):
                return found, noticed
            noticed.append(_set_aside(path, found))
        return None, noticed

    def _load_tensors(self, sealed: Seal) -> None:
        path, group, tensors = self.path(sealed.step), self._ranks.group, self._tensors()
        try:
            with _one_process_is_meant():
                load(tensors, checkpoint_id=path, process_group=group, no_dist=group is None)
        except CheckpointException as error:
            raise failure(
                "checkpoint-does-not-fit",
                f"the checkpoint of step {sealed.step} cannot be loaded into this model and optimiser",
                exit_code=ExitCode.IMPOSSIBLE,
                where=str(path),
                evidence=(str(error),),
                remedy="train the model it was saved from, or set `checkpoint.path` in the job to another folder",
            ) from error
        set_state_dict(
            self._training.model,
            self._training.optimizer,
            model_state_dict=tensors["model"],
            optim_state_dict=tensors["optimizer"],
        )

    def _load_host(self, sealed: Seal) -> None:
        """A rank beyond those that saved takes rank 0's part."""
        own = self._ranks.rank if self._ranks.rank < sealed.world_size else 0
        # Unpickled in full, since the user's own state may be anything: the folder is as trusted as the code.
        host: Host = torch.load(self.path(sealed.step) / _host_file(own), weights_only=False)
        if self._training.scheduler and host["scheduler"] is not None:
            self._training.scheduler.load_state_dict(host["scheduler"])
        if self._training.extra and host["extra"] is not None:
            self._training.extra.load_state_dict(host["extra"])
        rng.restore(host["random"])


@contextmanager
def _one_process_is_meant() -> Generator[None]:
    """Keep torch from warning that without a process group it takes this process for the only one: it is."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _host_file(rank: int) -> str:
    return f"host-{rank:05d}.pt"


def _failed(partial: Path, rank: int, error: BaseException) -> Finding:
    """Why a checkpoint could not be written; torch may not say that the disk is full, so the disk is looked at."""
    full = lacking(partial, "")
    row = shortage_of(error) or shortage_in(full.evidence[0] if full else str(error))
    finding = Finding(
        code="checkpoint-failed",
        what=f"the checkpoint {partial.stem} could not be written{f': {row.what}' if row else ''}",
        where=str(partial.parent),
        evidence=(f"rank {rank}: {error}", *room(partial)),
        remedy="look for space and permissions there; the older checkpoints are untouched",
        fault=Fault.CLUSTER,
    )
    if row is None:
        return finding
    remedy = f"{row.remedy} The older checkpoints are untouched, and the next is tried when it is due."
    return msgspec.structs.replace(finding, code=row.code, remedy=remedy)


def _set_aside(path: Path, damage: str) -> Finding:
    """Take a damaged checkpoint out of the count of those kept, without destroying the evidence."""
    aside = path.with_name(f"{path.name}.damaged")
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)
    return Finding(
        code="checkpoint-damaged",
        severity=Severity.WARNING,
        what=f"the checkpoint {path.name} is damaged and was set aside",
        where=str(aside),
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
