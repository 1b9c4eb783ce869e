"""Requests an update of a run's code, and waits for the first step with it.

The controller carries it out (control/rollout.py).
"""

from __future__ import annotations

import time
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from holdfast.controller_client import UPDATE, follow_request, refuse_finished, send_request
from holdfast.errors import ExitCode, HoldfastError, failure
from holdfast.events import AttemptStarted, StepCommitted, UpdateEnded, UpdateOutcome, UpdateRequested
from holdfast.findings import Owner
from holdfast.job.run_spec import RunSpec
from holdfast.launch.code.package_code import package_code
from holdfast.launch.target import open_target
from holdfast.report.status_reducer import read_status
from holdfast.run_dir import RunDir


class UpdateResult(Struct, frozen=True, kw_only=True):
    """The result of a requested update."""

    digest: str
    previous_digest: str
    """Both are empty for code in place."""
    step: StepCommitted | None = None
    """The first step with the new code, if it was waited for."""


def update(run: RunDir, *, code: Path | None = None, after_s: float | None = 0.0, timeout_s: float) -> UpdateResult:
    """Have a run's ranks resume with other code from their current step; by default with the current files.

    With `after_s` they are stopped for it after so many seconds, unless they restart before; with None only a restart
    applies it. At 0 the call returns with the first step of the new code. Raises HoldfastError if that step does not
    come within `timeout_s` seconds, or if the code cannot be shipped; then nothing was stopped.
    """
    refuse_finished(run)
    if after_s == 0.0:
        _refuse_without_steps(run)
    request = _update_requested(run, code, after_s)
    updated = UpdateResult(digest=request.digest, previous_digest=request.previous_digest)
    if after_s != 0.0:
        send_request(run, request)
        return updated
    attempts: set[tuple[int, int]] = set()
    for _, event in follow_request(run, request, UPDATE, timeout_s):
        match event:
            case AttemptStarted(code_digest=request.digest):
                attempts.add((event.replica, event.attempt))
            case StepCommitted() if (event.replica, event.attempt) in attempts:
                return replace(updated, step=event)
            case UpdateEnded() if event.outcome is not UpdateOutcome.APPLIED:
                raise _update_failed(run, event)
            case _:
                pass
    raise AssertionError("follow_request ends with the result or raises")


def _refuse_without_steps(run: RunDir) -> None:
    """Raise if ranks would stop without a state transfer, for a first step that no rank would report."""
    if any(replica.step is not None for replica in read_status(run).replicas.values()):
        return
    raise failure(
        "update-without-steps",
        f"no rank of {run.run_id} has reported a step, so an update would stop the program and start it from the "
        "beginning, or from its own checkpoint",
        exit_code=ExitCode.CANNOT_RUN_HERE,
        where=run.run_id,
        remedy="If it has a holdfast.train Session, wait for its first step. If not, `holdfast update --when restart` "
        "has it run the new code from its next restart on.",
        owner=Owner.USER,
    )


def _update_requested(run: RunDir, code: Path | None, after_s: float | None) -> UpdateRequested:
    """The update request, with its archive in the run's folder."""
    before, former = RunSpec.read(run.job), read_status(run).code
    if not open_target(before.target_kind, where=run.job).can_update_code:
        raise failure(
            "not-supported",
            f"runs on a target with `kind: {before.target_kind}` cannot be updated yet",
            exit_code=ExitCode.CANNOT_RUN_HERE,
            remedy="Cancel it and start it again: it resumes from its newest checkpoint.",
        )
    if before.code is None and code is not None:
        raise failure(
            "code-in-place",
            f"the ranks of {run.run_id} run in place, and not from a copy of the code",
            exit_code=ExitCode.CANNOT_RUN_HERE,
            where=before.base,
            remedy="Change the files there and leave `--code` out; a target with `code: shipped` ships copies.",
        )
    if before.code is None:
        return UpdateRequested(at=time.time(), after_s=after_s)
    shipped = package_code(before.job, Path(before.base) if code is None else code.absolute(), run.code)
    if shipped.digest == former:
        raise failure(
            "code-unchanged",
            f"{run.run_id} runs this very code already",
            exit_code=ExitCode.CANNOT_RUN_HERE,
            where=str(code or before.base),
            evidence=(f"sha256 {former}",),
            remedy="Change it first, or name another folder with `--code`.",
        )
    return UpdateRequested(
        at=time.time(),
        digest=shipped.digest,
        previous_digest=former,
        bytes=shipped.bytes,
        files=shipped.files,
        cwd=shipped.cwd,
        after_s=after_s,
    )


def _update_failed(run: RunDir, ended: UpdateEnded) -> HoldfastError:
    found = ended.finding
    return failure(
        "update-failed",
        f"the update of {run.run_id} was {ended.outcome}{f': {found.what}' if found else ''}",
        exit_code=ExitCode.UNAVAILABLE,
        where=run.run_id,
        evidence=found.evidence if found else (),
        remedy=f"The run continues with the code it had. {found.remedy if found else ''}",
    )
