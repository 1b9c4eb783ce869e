"""One row of `holdfast ps`.

The row of a finished run never changes, so it is cached next to the event log, which then need not be read again.
"""

from __future__ import annotations

import contextlib

import msgspec

from holdfast.host.files import atomic_write, read_small
from holdfast.report.run_status import RunPhase, RunStatus
from holdfast.report.status_reducer import read_status
from holdfast.run_dir import RunDir


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
    waiting_for: str = ""
    """Why no rank is running; empty if the run waits for nothing, or is over."""
    log_bytes: int = 0
    """Length of the log it was made from; a longer log makes the row stale."""


def read_run_row(run: RunDir) -> RunRow:
    """The row of a run."""
    try:
        log_bytes = run.events.stat().st_size
    except FileNotFoundError:
        log_bytes = 0
    with contextlib.suppress(OSError, msgspec.MsgspecError):  # there is none, or none that this version can read
        known = msgspec.json.decode(read_small(run.run_row), type=RunRow)
        if known.log_bytes == log_bytes:
            return known
    row = _make_row(read_status(run), log_bytes)
    if row.finished_at is not None:
        with contextlib.suppress(OSError):  # an unwritable folder costs time, nothing else
            atomic_write(run.run_row, msgspec.json.encode(row))
    return row


def _make_row(status: RunStatus, log_bytes: int) -> RunRow:
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
        waiting_for="" if status.finished_at is not None else status.waiting_for,
        log_bytes=log_bytes,
    )
