"""Submits a run whose controller is in its allocation, and asks Slurm what became of it."""

from __future__ import annotations

import os
import time
from functools import lru_cache

from holdfast.errors import ExitCode, HoldfastError, failure
from holdfast.findings import Finding, Owner, Severity
from holdfast.host.files import atomic_write, read_line
from holdfast.job.run_spec import RunSpec
from holdfast.launch.quarantine_file import QuarantineFile
from holdfast.launch.slurm import slurm_commands
from holdfast.launch.slurm.batch_script import NOT_SHARED, controller_script
from holdfast.launch.slurm.slurm_backend import JOB_NAME
from holdfast.launch.slurm.slurm_commands import SlurmJob
from holdfast.run_dir import RunDir

ASK_AGAIN_S = 2.0
"""Least time between two questions to Slurm about a job: a client that follows a run would ask ten times a second."""
END_TIMEOUT_S = 60.0
"""Longest wait for a cancelled job; Slurm kills what ignores SIGTERM for 30 s (`KillWait`)."""
SCRIPT_NAME = "batch.sh"
"""File in the run's folder with its batch script, to look at and to submit by hand."""


def submit_run(run: RunDir, accepted: RunSpec) -> None:
    """Submit a run's batch script; raises HoldfastError if it has a controller, or Slurm refuses it."""
    lock = run.lock()
    if lock is None:
        raise failure(
            "start-failed",
            f"{run.run_id} has a controller already",
            exit_code=ExitCode.UNAVAILABLE,
            remedy=f"holdfast attach {run.run_id}",
        )
    try:
        avoided = {row.machine for row in QuarantineFile(accepted.target).read()[0].active(time.time())}
        script = controller_script(accepted, run, avoided)
        atomic_write(run.path / SCRIPT_NAME, script.encode())
        atomic_write(run.path / JOB_NAME, slurm_commands.submit(script).encode())
    finally:
        os.close(lock)


def is_live(run: RunDir) -> bool:
    """Whether Slurm runs, or will run, a run's controller; also if Slurm does not answer."""
    try:
        job = _job(run)
    except HoldfastError:
        return True
    return job is not None and job.is_live


def no_controller(run: RunDir) -> HoldfastError | None:
    """Why a run has no controller now; None if that is starting."""
    number = _number(run)
    try:
        job = _job(run)
    except HoldfastError as unknown:
        return unknown
    if job is not None and job.is_live:
        return None if job.state != "PENDING" else _pending(run, number, job)
    if job is not None and job.exit_status == NOT_SHARED:
        return failure(
            "run-folder-not-shared",
            f"{job.batch_host}, the first node of Slurm job {number}, does not see the folder of {run.run_id}",
            exit_code=ExitCode.CANNOT_RUN_HERE,
            where=str(run.path),
            evidence=(f"its batch script has ended with exit status {NOT_SHARED}",),
            remedy="Set HOLDFAST_HOME to a folder on a file system that this machine and all nodes share, and start "
            f"another run. `holdfast cancel --force {run.run_id}` ends this one.",
        )
    state = f"{job.state}, {job.reason}, exit status {job.exit_status}" if job else "Slurm no longer knows it"
    return failure(
        "allocation-ended",
        f"Slurm job {number} of {run.run_id} has ended, and Slurm does not start it again",
        exit_code=ExitCode.UNAVAILABLE,
        where=str(batch_log := run.path / "batch.log"),
        evidence=(state, *run.log_tail(batch_log), *run.controller_log_tail()),
        remedy=f"`holdfast attach {run.run_id}` submits it again, and it resumes; `holdfast cancel --force "
        f"{run.run_id}` ends it.",
        owner=Owner.CLUSTER,
    )


def _pending(run: RunDir, number: str, job: SlurmJob) -> HoldfastError:
    waits = Finding(
        code="allocation-pending",
        severity=Severity.WARNING,
        what=f"Slurm job {number} of {run.run_id} is {job.explain()}",
        where=run.run_id,
        remedy=f"`squeue --job {number} --start` shows when Slurm expects to start it.",
        owner=Owner.CLUSTER,
    )
    return HoldfastError((waits,), ExitCode.UNAVAILABLE)


def end_job(run: RunDir) -> None:
    """End a run's job, and wait until no process of it is left; raises HoldfastError if that does not come."""
    number = _number(run)
    if not number:
        return
    slurm_commands.cancel(number)
    deadline = time.monotonic() + END_TIMEOUT_S
    while (job := slurm_commands.show(number)) is not None and job.is_live:
        if time.monotonic() > deadline:
            raise failure(
                "processes-not-exiting",
                f"Slurm job {number} of {run.run_id} was cancelled, and has not ended",
                exit_code=ExitCode.UNAVAILABLE,
                where=run.run_id,
                evidence=(f"it is {job.state} for {END_TIMEOUT_S:g} s",),
                remedy=f"See `scontrol show job {number}`, and ask again.",
                owner=Owner.CLUSTER,
            )
        time.sleep(0.2)


def _number(run: RunDir) -> str:
    try:
        return read_line(run.path / JOB_NAME)
    except OSError:
        return ""


def _job(run: RunDir) -> SlurmJob | None:
    """The run's job, as Slurm showed it at most ASK_AGAIN_S ago; None if there is none.

    Raises HoldfastError if Slurm did not answer then.
    """
    number = _number(run)
    found = _shown(number, int(time.monotonic() / ASK_AGAIN_S)) if number else None
    if isinstance(found, HoldfastError):
        raise found
    return found


@lru_cache(maxsize=64)
def _shown(number: str, _period: int) -> SlurmJob | HoldfastError | None:
    try:
        return slurm_commands.show(number)
    except HoldfastError as error:
        return error
