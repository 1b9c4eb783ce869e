"""Deletes what runs that are over left behind: their folders on this machine, or their objects on a target.

A folder with checkpoints is deleted only if its run is named. Volumes are never deleted.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path

from msgspec import Struct

from holdfast.events.log import UnsupportedFormat
from holdfast.job.targets import TargetSpec
from holdfast.launch.target import is_alive, open_target
from holdfast.launch.target_runs import TargetRunPhase, TargetRuns
from holdfast.report.run_row import read_run_row
from holdfast.run_dir import RunDir

ENDED = (TargetRunPhase.SUCCEEDED, TargetRunPhase.FAILED, TargetRunPhase.CANCELLED)


class Leftover(Struct, frozen=True, kw_only=True):
    """What a run left behind."""

    run: str
    kept: str = ""
    """Why it is not deleted; empty if it is."""
    bytes: int | None = None
    """Its size on this machine's disk; None for objects on a target."""
    where: str = ""


def prune_folders(
    runs: Sequence[RunDir], *, now: float, older_than_s: float, named: Collection[str], dry_run: bool
) -> tuple[Leftover, ...]:
    """Delete folders of runs that ended `older_than_s` ago or earlier, or are named; returns all but younger ones."""
    found: list[Leftover] = []
    for run in runs:
        if named and run.run_id not in named:
            continue
        kept = _reason_to_keep(run, now=now, older_than_s=0.0 if named else older_than_s, is_named=bool(named))
        if kept is None:
            continue
        size = _disk_bytes(run.path)
        if not kept and not dry_run:
            kept = _delete(run)
        found.append(Leftover(run=run.run_id, kept=kept, bytes=size, where=str(run.path)))
    return tuple(found)


def prune_objects(
    spec: TargetSpec,
    there: TargetRuns,
    *,
    now: float,
    older_than_s: float,
    named: Collection[str],
    dry_run: bool,
) -> tuple[Leftover, ...]:
    """Delete the objects of a target's runs that are over; raises HoldfastError if the target refuses."""
    found: list[Leftover] = []
    for run in there.runs:
        if run.run not in named if named else now - (run.finished_at or run.created_at) < older_than_s:
            continue
        kept = "" if run.phase in ENDED else f"it is {run.phase}"
        if run.applied_by_others:
            kept = "its objects were applied from a tree: delete them there"
        if not kept and not dry_run:
            open_target(spec.kind).delete_objects(spec, run)
        if named or not kept:
            found.append(Leftover(run=run.run, kept=kept, where=run.where))
    return tuple(found)


def _reason_to_keep(run: RunDir, *, now: float, older_than_s: float, is_named: bool) -> str | None:
    """Why a folder stays; empty if it is to be deleted, None if its run ended too recently to mention it."""
    try:
        if run.path.stat().st_uid != os.geteuid():
            return "it belongs to another user"
        if is_alive(run):
            return "the run is alive"
        finished_at = read_run_row(run).finished_at
    except (UnsupportedFormat, LookupError, OSError) as error:
        return f"its log cannot be read: {' '.join(str(error).split())[:200]}"
    if finished_at is None:
        return "the run is not over"
    if now - finished_at < older_than_s:
        return None
    if not is_named and _has_files(run.checkpoints):
        return "it has checkpoints, so it is deleted only if you name the run"
    return ""


def _delete(run: RunDir) -> str:
    """Delete a folder while no other process can take up the run; returns why it stays, if it does."""
    lock = run.lock()
    if lock is None:
        return "the run is alive"
    try:
        shutil.rmtree(run.path)
    except OSError as error:
        return f"it could not be deleted completely: {error}"
    finally:
        os.close(lock)
    return ""


def _has_files(folder: Path) -> bool:
    return any(names for _, _, names in os.walk(folder))


def _disk_bytes(folder: Path) -> int:
    """Bytes on disk; logs are sparse."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_blocks * 512
            except OSError:  # it is gone by now
                continue
    return total
