"""Owns what an update of a run asks for, and the wait for the first step of its code.

How the run takes it in is the controller's (control/updates.py).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

from holdfast.asking import UPDATE, after, ask, refuse_finished
from holdfast.errors import ExitCode, HoldfastError, failure
from holdfast.events import AttemptStarted, StepCommitted, UpdateEnded, UpdateOutcome, UpdateRequested
from holdfast.findings import Fault
from holdfast.folder import RunFolder
from holdfast.job.accepted import Accepted
from holdfast.job.profile import KUBERNETES
from holdfast.launch.code.shipping import ship
from holdfast.report.advance import status_of


@dataclass(frozen=True, kw_only=True)
class Updated:
    """What came of an update that was asked for."""

    digest: str
    former: str
    """Both are empty where code lies in place."""
    step: StepCommitted | None = None
    """The first with the new code, where that was waited for."""


def update(run: RunFolder, *, code: Path | None = None, after_s: float | None = 0.0, within_s: float) -> Updated:
    """Have a run's ranks go on with other code, from the step they are at; by itself what lies there now.

    With `after_s` they are stopped for it so many seconds later, unless they restart before; with None only then. At 0
    it returns with the first step of the new code. Raises HoldfastError where that does not come within `within_s`
    seconds, and where the code cannot be shipped; then nothing was stopped.
    """
    refuse_finished(run)
    if after_s == 0.0:
        _refuse_without_steps(run)
    request = _update_requested(run, code, after_s)
    updated = Updated(digest=request.digest, former=request.former)
    if after_s != 0.0:
        ask(run, request)
        return updated
    attempts: set[tuple[int, int]] = set()
    for _, event in after(run, request, UPDATE, within_s):
        match event:
            case AttemptStarted(code=request.digest):
                attempts.add((event.replica, event.attempt))
            case StepCommitted() if (event.replica, event.attempt) in attempts:
                return replace(updated, step=event)
            case UpdateEnded() if event.outcome is not UpdateOutcome.APPLIED:
                raise _not_updated(run, event)
            case _:
                pass
    raise AssertionError("it is waited for until it is there or will not be")


def _refuse_without_steps(run: RunFolder) -> None:
    """Raise where ranks would be stopped without handing anything over, for a first step that nobody would report."""
    if any(replica.step is not None for replica in status_of(run).replicas.values()):
        return
    raise failure(
        "update-without-steps",
        f"no rank of {run.run} has reported a step, so an update would stop the program and start it from the "
        "beginning, or from a checkpoint of its own",
        exit_code=ExitCode.IMPOSSIBLE,
        where=run.run,
        remedy="If it has a holdfast.train Session, wait for its first step. If not, `holdfast update --when restart` "
        "has it run the new code from its next restart on.",
        fault=Fault.USER,
    )


def _update_requested(run: RunFolder, code: Path | None, after_s: float | None) -> UpdateRequested:
    """What to ask for, with its archive in the run's folder."""
    before, former = Accepted.read(run.job), status_of(run).code
    if before.backend == KUBERNETES:
        remedy = "Cancel it and start it again: it goes on from its newest checkpoint."
        raise failure(
            "not-yet", "runs on Kubernetes cannot be updated yet", exit_code=ExitCode.IMPOSSIBLE, remedy=remedy
        )
    if before.code is None and code is not None:
        raise failure(
            "code-in-place",
            f"the ranks of {run.run} run in place, and not from a copy of the code",
            exit_code=ExitCode.IMPOSSIBLE,
            where=before.base,
            remedy="Change the files there and leave `--code` out; a profile with `code: shipped` ships copies.",
        )
    if before.code is None:
        return UpdateRequested(at=time.time(), after_s=after_s)
    shipped = ship(before.job, Path(before.base) if code is None else code.absolute(), run.code)
    if shipped.digest == former:
        raise failure(
            "code-unchanged",
            f"{run.run} runs this very code already",
            exit_code=ExitCode.IMPOSSIBLE,
            where=str(code or before.base),
            evidence=(f"sha256 {former}",),
            remedy="Change it first, or name another folder with `--code`.",
        )
    return UpdateRequested(
        at=time.time(),
        digest=shipped.digest,
        former=former,
        bytes=shipped.bytes,
        files=shipped.files,
        cwd=shipped.cwd,
        after_s=after_s,
    )


def _not_updated(run: RunFolder, ended: UpdateEnded) -> HoldfastError:
    found = ended.finding
    return failure(
        "update-failed",
        f"the update of {run.run} was {ended.outcome}{f': {found.what}' if found else ''}",
        exit_code=ExitCode.UNAVAILABLE,
        where=run.run,
        evidence=found.evidence if found else (),
        remedy=f"The run goes on with the code it had. {found.remedy if found else ''}",
    )
