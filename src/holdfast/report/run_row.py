"""Owns the line that a list of runs has for each: what is left to say of a run when all else may be forgotten.

Of a run that is over it never changes, so it is kept beside its log and nobody folds that again for a list.
"""

from __future__ import annotations

import msgspec

from holdfast.report.run_status import RunPhase, RunStatus


class RunRow(msgspec.Struct, frozen=True, kw_only=True):
    """One run in a line."""

    job: str
    phase: RunPhase
    created_at: float | None
    finished_at: float | None
    restarts: int
    exit_code: int | None
    nodes: int
    ranks: int
    step: int | None
    took_s: float | None
    """From its beginning to its end, or until now."""
    log_bytes: int = 0
    """The length of the log it was made of: one that was written since says more."""


def make_run_row(status: RunStatus, *, log_bytes: int) -> RunRow:
    """A status in a line; `log_bytes` is how much of a log it was made of."""
    return RunRow(
        job=status.job,
        phase=status.phase,
        created_at=status.created_at,
        finished_at=status.finished_at,
        restarts=status.restarts,
        exit_code=status.exit_code,
        nodes=len(status.nodes),
        ranks=sum(replica.world_size for replica in status.replicas.values()),
        step=status.leader.step,
        took_s=None if status.created_at is None else (status.finished_at or status.now) - status.created_at,
        log_bytes=log_bytes,
    )
