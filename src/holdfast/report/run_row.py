"""One row of `holdfast ps`.

The row of a finished run never changes, so it is cached next to the event log, which then need not be read again.
"""

from __future__ import annotations

import msgspec

from holdfast.report.run_status import RunPhase, RunStatus


class RunRow(msgspec.Struct, frozen=True, kw_only=True):
    """One run as a row."""

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
    """Seconds from start to end, or until now."""
    log_bytes: int = 0
    """Length of the log it was made from; a longer log makes the row stale."""


def make_run_row(status: RunStatus, *, log_bytes: int) -> RunRow:
    """Make a row from a status; `log_bytes` is the length of the log behind it."""
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
