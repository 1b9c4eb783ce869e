"""Checks of the folders that ranks and the agent write to: room, and whether a write reaches the disk in time."""

from __future__ import annotations

import errno
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path, PurePath

from msgspec import Struct

from holdfast.findings import Finding, Owner, Severity
from holdfast.os_errors import disk_usage, os_error_finding, probe_disk
from holdfast.preflight.node_view import NodeView

LOW_CHECKPOINT_BYTES = 10 << 30
"""Less free space than this holds no checkpoint of a model that needs a GPU: 1e9 parameters with Adam's state in
float32 are 12 GB."""
LOW_BYTES = 1 << 30
"""Less free space than this fills up with logs, core files and caches within a run."""
LOW_FILES = 10_000
"""Fewer free inodes than this are used up by some thousand checkpoint shards, or by one compiler cache."""
CHECKPOINTS = "checkpoints"
WRITE_BYTES = 1 << 20
SLOW_FSYNC_S = 1.0
"""A disk takes some 10 ms, a busy network file system some 100 ms."""


class _Use(Struct, frozen=True, kw_only=True):
    """A folder of the node that the job uses."""

    name: str
    folder: Path
    """The nearest that exists: who writes first makes the rest."""
    low_bytes: int
    written: bool = True
    """Whether ranks or the agent surely write there."""


def disk_space(view: NodeView) -> Iterator[Finding]:
    """There is room for checkpoints, logs, and what ranks write where they start."""
    seen: set[int] = set()
    for use in _uses(view):
        device = use.folder.stat().st_dev
        if device not in seen:  # the first of a file system needs the most
            seen.add(device)
            yield from _room(use)


def checkpoint_folder(view: NodeView) -> Path | None:
    """The nearest folder to that of checkpoints which exists; None if they go to an object store."""
    return next((use.folder for use in _uses(view) if use.name.startswith(CHECKPOINTS)), None)


def _uses(view: NodeView) -> Iterator[_Use]:
    wanted = view.wanted
    checkpoints = LOW_CHECKPOINT_BYTES if wanted.gpus else LOW_BYTES
    for name, path, low_bytes, written in (
        (CHECKPOINTS, wanted.checkpoints, checkpoints, True),
        ("logs", wanted.logs, LOW_BYTES, True),
        ("the folder in which ranks start", wanted.workdir, LOW_BYTES, False),
    ):
        # Object stores have no folder here; shipped code has none yet.
        if path and "://" not in path and (PurePath(path).is_absolute() or wanted.workdir):
            folder = view.root / str(PurePath(wanted.workdir or "/", path)).lstrip("/")
            nearest = next(each for each in (folder, *folder.parents) if os.path.exists(each))
            yield _Use(name=f"{name} ({path})", folder=nearest, low_bytes=low_bytes, written=written)


def _room(use: _Use) -> Iterator[Finding]:
    refusal = probe_disk(use.folder)
    if refusal is not None and refusal.errno == errno.EROFS:
        return  # disk_write reports it where it matters
    if refusal is not None and use.written:
        yield os_error_finding(refusal, f"there is no room for {use.name}", use.folder)
        return
    size = os.statvfs(use.folder)
    free_bytes, free_files = size.f_bavail * size.f_frsize, size.f_favail
    if size.f_blocks and free_bytes < use.low_bytes:
        short = f"{free_bytes >> 20:,} MiB are free"
    elif size.f_files and free_files < LOW_FILES:  # btrfs and some network file systems have no number of files
        short = f"{free_files:,} more files can be made"
    else:
        return
    yield Finding(
        code="disk-nearly-full",
        severity=Severity.WARNING,
        what=f"{short} for {use.name}",
        where=str(use.folder),
        evidence=disk_usage(use.folder),
        remedy="Free some space there (`df -h`, `df -i`), or point the job at another file system.",
        owner=Owner.CLUSTER,
    )


def disk_write(view: NodeView, clock_s: Callable[[], float] = time.monotonic) -> Iterator[Finding]:
    """A file can be written where checkpoints and logs go, and reaches the disk within a second."""
    seen: set[Path] = set()
    for use in _uses(view):
        if not use.written or use.folder in seen:
            continue
        seen.add(use.folder)
        try:
            took_s = _fsync_time_s(use.folder, clock_s)
        except OSError as error:
            yield os_error_finding(error, f"no file can be written for {use.name}", use.folder)
            continue
        if took_s > SLOW_FSYNC_S:
            yield Finding(
                code="slow-fsync",
                severity=Severity.WARNING,
                what=f"{WRITE_BYTES >> 20} MiB took {took_s:.1f} s to reach the disk of {use.name}",
                where=str(use.folder),
                evidence=disk_usage(use.folder),
                remedy="See what else writes there (`iostat -x 1`, the file system's own statistics), or write to a "
                "faster one: every checkpoint waits for this disk.",
                owner=Owner.CLUSTER,
            )


def _fsync_time_s(folder: Path, clock_s: Callable[[], float]) -> float:
    """Write a file without a name, which disappears also if this process is killed, and wait for the disk."""
    before_s = clock_s()
    with tempfile.TemporaryFile(prefix=".holdfast-check-", dir=folder, buffering=0) as file:
        left = memoryview(bytes(WRITE_BYTES))
        while left:
            left = left[file.write(left) :]
        os.fsync(file.fileno())
    return clock_s() - before_s
