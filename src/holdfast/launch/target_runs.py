"""What a target itself knows of its runs, whichever machine started them."""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

from holdfast.errors import ExitCode, HoldfastError, failure
from holdfast.findings import Finding

NOTHING_ARRIVED = "nothing of it has arrived yet"
"""Reason for lost contact in the folder of a run until its copy from the target is complete for the first time."""


class TargetRunPhase(StrEnum):
    """Phase of a run, as far as the target's objects show it."""

    PENDING = "pending"
    """None of its nodes runs."""
    RUNNING = "running"
    STOPPING = "stopping"
    """Its objects are being deleted."""
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


class TargetRun(Struct, frozen=True, kw_only=True):
    """One run of a target."""

    run: str
    """Its id."""
    phase: TargetRunPhase
    created_at: float
    """Unix time in seconds."""
    finished_at: float | None = None
    user: str = ""
    """Who started it; empty if that is not recorded."""
    nodes: int | None = None
    """How many nodes it has; None if that is not recorded."""
    running_nodes: int | None = None
    """How many of them run; None if this user may not list them."""
    where: str = ""
    """What represents it there, such as `jobset/demo-k3m9tz`."""
    applied_by_others: bool = False
    """Whether others apply and delete its objects, such as a GitOps tool, which would apply them again."""


class TargetRuns(Struct, frozen=True, kw_only=True):
    """A target's runs, newest first."""

    runs: tuple[TargetRun, ...]
    findings: tuple[Finding, ...] = ()


def run_not_on_target(run: str | None, target: str) -> HoldfastError:
    """The error for a run of which a target has no objects."""
    return failure(
        "run-not-found",
        f"there is no run{'' if run is None else f' {run!r}'} on {target}",
        exit_code=ExitCode.NOT_FOUND,
        where=target,
        remedy=f"`holdfast ps --on {target}` lists its runs. The objects of a run are deleted a day after its end, and "
        "immediately if it is cancelled.",
    )
