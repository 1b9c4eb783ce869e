"""Prepares a run that resumes another one, on the same target or another: its job, code and newest checkpoint.

The new run saves to the folder that the former one saved to, so nothing is copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from holdfast.errors import ExitCode, HoldfastError, failure
from holdfast.events import AttemptStarted, CheckpointCommitted, Outcome, RunFinished, StepCommitted, UpdateRequested
from holdfast.events.log import EventReader
from holdfast.findings import Finding, Owner, Severity
from holdfast.job.loader import LoadedJob
from holdfast.job.run_spec import CodeArchive, ResumedRun, RunSpec
from holdfast.launch.code.archive import archive_path
from holdfast.launch.target import Resumption, open_target
from holdfast.run_dir import RunDir


class FormerRun(Struct, frozen=True, kw_only=True):
    """A run that is to be resumed, from its log."""

    folder: RunDir
    accepted: RunSpec
    newest: ResumedRun
    """Its newest checkpoint; if it saved none, that which it resumed itself."""
    code: CodeArchive | None
    """The code that its ranks ran last; None if that was the files in place."""
    last_step: int
    failed: bool

    @property
    def run_id(self) -> str:
        return self.folder.run_id

    @property
    def job_data(self) -> Mapping[str, Any]:
        """Its job as the data of a job file."""
        return self.accepted.job.model_dump(mode="json", exclude_defaults=True)

    @property
    def base(self) -> Path:
        """Folder that its relative paths start from here."""
        return open_target(self.accepted.target_kind).base_here(self.accepted)

    @property
    def has_archive(self) -> bool:
        """Whether its code is on this machine as it was."""
        return self.code is not None and archive_path(self.folder.code, self.code.digest).exists()


def read_former_run(run: RunDir) -> FormerRun:
    """The run, if it is over and has a checkpoint; raises HoldfastError."""
    accepted = RunSpec.read(run.job)
    archives = {accepted.code.digest: accepted.code} if accepted.code else {}
    newest, ended = accepted.resumed, None
    digest, last_step, world_sizes = "", 0, dict[int, int]()
    for event in EventReader(run.events).read():
        match event:
            case AttemptStarted():
                digest, world_sizes[event.replica] = event.code_digest, event.world_size
            case UpdateRequested() if event.digest:
                archives[event.digest] = CodeArchive(
                    digest=event.digest, bytes=event.bytes, files=event.files, cwd=event.cwd
                )
            case StepCommitted():
                last_step = event.step
            case CheckpointCommitted():
                world_size = world_sizes.get(event.replica, accepted.job.replica_world_size)
                newest = ResumedRun(run=run.run_id, step=event.step, checkpoint=event.path, world_size=world_size)
            case RunFinished():
                ended = event
            case _:
                pass
    if ended is None:
        raise _not_over(run)
    if newest is None:
        raise _nothing_to_resume(run, accepted)
    return FormerRun(
        folder=run,
        accepted=accepted,
        newest=newest.model_copy(update={"run": run.run_id}),
        code=archives.get(digest),
        last_step=last_step,
        failed=ended.outcome is Outcome.FAILED,
    )


def resumed_job(former: FormerRun, loaded: LoadedJob) -> tuple[LoadedJob, ResumedRun]:
    """The job with the former run's checkpoints, and the newest of these.

    If `loaded` names another `checkpoint.path` than the former job, the user has copied them there.
    """
    named, newest = loaded.job.checkpoint.path, former.newest
    if named is not None and named != former.accepted.job.checkpoint.path:
        folder = named if "://" in named else Path(former.base.absolute(), named)
        return loaded, newest.model_copy(update={"checkpoint": f"{folder}/{_split(newest.checkpoint)[1]}"})
    checkpoint = loaded.job.checkpoint.model_copy(update={"path": _split(newest.checkpoint)[0]})
    return replace(loaded, job=loaded.job.model_copy(update={"checkpoint": checkpoint})), newest


def _split(checkpoint: str) -> tuple[str, str]:
    """Folder or URL of checkpoints, and the name of one in it."""
    folder, _, name = checkpoint.rpartition("/")
    return folder, name


def resumption(former: FormerRun, resumed: ResumedRun) -> Resumption:
    """What the new run continues."""
    return Resumption(resumed=resumed, code=former.code if former.has_archive else None, archives=former.folder.code)


def resume_findings(former: FormerRun, loaded: LoadedJob, resumed: ResumedRun, target: str) -> tuple[Finding, ...]:
    """What continues, what does not, and what cannot, as far as this machine knows it."""
    moved = _split(resumed.checkpoint)[0] != _split(former.newest.checkpoint)[0]
    return (
        _announced(former, resumed),
        *(() if moved else _out_of_reach(former, target)),
        *_not_uploaded(former),
        *_code_not_kept(former),
        *_world_size(former, loaded, resumed),
    )


def _announced(former: FormerRun, resumed: ResumedRun) -> Finding:
    again = max(0, former.last_step - resumed.step)
    return Finding(
        code="run-resumed",
        severity=Severity.INFO,
        what=f"the run resumes {former.run_id} after step {resumed.step}",
        where=resumed.checkpoint,
        evidence=(f"steps to compute again: {again}", *_peer_copies(former.accepted)),
        remedy="Nothing. It saves to the same folder.",
    )


def _out_of_reach(former: FormerRun, target: str) -> Iterator[Finding]:
    """Checkpoints on the disks of nodes, or in a cluster's volume."""
    if "://" in former.newest.checkpoint:
        return
    where = open_target(former.accepted.target_kind).unreached_checkpoints(former.accepted, target)
    if not where:
        return
    yield Finding(
        code="checkpoints-out-of-reach",
        what=f"the checkpoints of {former.run_id} are {where}, and the new run does not reach them",
        where=former.newest.checkpoint,
        remedy="Copy the checkpoint to a folder or store that the new nodes reach, if one node has all of it, and add "
        "`--set checkpoint.path=FOLDER`. Next time name such a folder as `checkpoint.path` from the start.",
    )


def _not_uploaded(former: FormerRun) -> Iterator[Finding]:
    """A run that failed may have left its newest checkpoint on the nodes, from where it is uploaded to a store."""
    saved = former.accepted.job.checkpoint
    if former.failed and (saved.local or saved.is_remote):
        yield Finding(
            code="checkpoint-not-uploaded",
            severity=Severity.WARNING,
            what=f"the newest checkpoint of {former.run_id} may not have reached {saved.path or 'its folder'}",
            where=former.newest.checkpoint,
            evidence=("the run failed, and checkpoints are uploaded in the background",),
            remedy="Nothing: the run resumes from the newest that is there, which may be an earlier one.",
        )


def _code_not_kept(former: FormerRun) -> Iterator[Finding]:
    if former.has_archive:
        return
    what = (
        f"the archive of the code of {former.run_id} is no longer on this machine"
        if former.code
        else f"the ranks of {former.run_id} ran its files in place"
    )
    yield Finding(
        code="resumed-code-not-kept",
        severity=Severity.WARNING if former.code else Severity.INFO,
        what=f"{what}, so the new run has the files as they are now",
        where=str(former.base.absolute()),
        remedy="Nothing, if they are what should run. A target with `code: shipped` keeps a copy.",
    )


def _world_size(former: FormerRun, loaded: LoadedJob, resumed: ResumedRun) -> Iterator[Finding]:
    was, now = resumed.world_size, loaded.job.replica_world_size
    if was == now:
        return
    yield Finding(
        code="world-size-changed",
        severity=Severity.WARNING,
        what=f"the checkpoint was saved by {was} ranks and {now} resume from it: not all state carries over",
        where="nodes",
        evidence=(
            "exact: a Session's model, optimizer and data position",
            "not: random numbers, samples that the loop selects itself, objects in `state` that are no modules",
        ),
        remedy=f"Nothing, if that will do. {was} ranks would continue bit-exactly.",
    )


def _not_over(run: RunDir) -> HoldfastError:
    return failure(
        "run-not-over",
        f"{run.run_id} is not over, and two runs cannot save to one folder",
        exit_code=ExitCode.USAGE,
        where=run.run_id,
        remedy=f"`holdfast cancel {run.run_id}` has its ranks save a checkpoint and ends it.",
    )


def _peer_copies(accepted: RunSpec) -> tuple[str, ...]:
    return ("copies in the memory of nodes ended with the run",) if accepted.job.recovery.peer_checkpoints else ()


def _nothing_to_resume(run: RunDir, accepted: RunSpec) -> HoldfastError:
    return failure(
        "nothing-to-resume",
        f"{run.run_id} reported no checkpoint",
        exit_code=ExitCode.CANNOT_RUN_HERE,
        where=run.run_id,
        evidence=_peer_copies(accepted),
        remedy="Start its job again: `holdfast run JOB.yaml --on TARGET`. With a holdfast.train Session, "
        "`checkpoint.every` saves while it runs.",
        owner=Owner.USER,
    )
