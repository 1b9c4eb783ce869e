"""Measures the file system of checkpoints from one node: bandwidth, the time to reach the disk, and file operations.

All nodes measure at the same time, so that a shared file system shows what it gives to all of them together.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path

from holdfast.events.probe_results import StorageRates

BLOCK = bytes(4 << 20)
BLOCKS_PER_SYNC = 16
"""A slow disk has few bytes to wait for when the time is over."""
MOST_BYTES = 1 << 30
"""Bytes written at most."""
SHARE_OF_FREE = 0.5
"""Of the free bytes all nodes together write at most this share: a run may save there meanwhile."""
MOST_FILES = 2000
SYNCS = 16
SYNC_BYTES = 4096


def measure(folder: Path, node: int, seconds: float, *, nodes: int = 1) -> StorageRates:
    """Measure the folder's file system for about so many seconds; leaves no files. Raises OSError if it refuses.

    `nodes` measure at the same time. Files have no name, or are in a folder that is removed, so that nothing of a job
    can be overwritten.
    """
    part_s = seconds / 4
    disk = os.statvfs(folder)
    most_bytes = min(MOST_BYTES, int(SHARE_OF_FREE * disk.f_bavail * disk.f_frsize / nodes))
    with tempfile.TemporaryFile(prefix=".holdfast-probe-", dir=folder, buffering=0) as file:
        written_bytes, write_s = _write(file.fileno(), part_s, most_bytes)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        read_bytes, read_s = _read(file.fileno(), part_s)
        sync_s = _syncs(file.fileno(), part_s)
    return StorageRates(
        node=node,
        folder=str(folder),
        write_mb_s=written_bytes / write_s / 1e6,
        read_mb_s=read_bytes / read_s / 1e6,
        sync_s=sync_s,
        files_per_s=_files_per_s(folder, part_s),
    )


def _write(file: int, seconds: float, most_bytes: int) -> tuple[int, float]:
    """Bytes written, at least a small write's, and the seconds until they are on the disk."""
    began, written_bytes = time.monotonic(), 0
    most_bytes = max(SYNC_BYTES, most_bytes)
    while written_bytes < most_bytes and (not written_bytes or time.monotonic() - began < seconds):
        for _ in range(BLOCKS_PER_SYNC):
            written_bytes += os.write(file, BLOCK[: most_bytes - written_bytes])
        os.fsync(file)
    return written_bytes, time.monotonic() - began


def _read(file: int, seconds: float) -> tuple[int, float]:
    began, read_bytes = time.monotonic(), 0
    while time.monotonic() - began < seconds and (data := os.pread(file, len(BLOCK), read_bytes)):
        read_bytes += len(data)
    return read_bytes, time.monotonic() - began


def _syncs(file: int, seconds: float) -> float:
    """The median time of a small write that reaches the disk."""
    began, took_s = time.monotonic(), list[float]()
    while len(took_s) < SYNCS and (not took_s or time.monotonic() - began < seconds):
        before = time.monotonic()
        os.pwrite(file, BLOCK[:SYNC_BYTES], 0)
        os.fsync(file)
        took_s.append(time.monotonic() - before)
    return statistics.median(took_s)


def _files_per_s(folder: Path, seconds: float) -> float:
    """Files that are created, looked up and deleted per second."""
    with tempfile.TemporaryDirectory(prefix=".holdfast-probe-", dir=folder) as made:
        began, files = time.monotonic(), 0
        while files < MOST_FILES and time.monotonic() - began < seconds:
            path = Path(made, str(files))
            path.touch()
            path.stat()
            path.unlink()
            files += 1
        return files / (time.monotonic() - began)
