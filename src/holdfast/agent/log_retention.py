"""Log retention on a node: keeps the newest `max_bytes` of each rank's output, over all of its attempts.

A rank writes to its file directly, so the agent can neither rename nor truncate the file. Instead the agent punches a
hole at the head: offsets stay the same, readers continue, and the rank waits for nothing. See docs/decisions/0010.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from holdfast.findings import Finding, Severity
from holdfast.host import sparse_files
from holdfast.run_dir import earlier_logs

HOLE_ALIGN_BYTES = 1 << 20
"""Holes end at a multiple of this, which the block sizes of all file systems divide."""
MAX_PUNCH_BYTES = 256 << 20
"""Most bytes punched per call, which may take tens of milliseconds and blocks the rank's own writes."""
POLL_S = 1.0
"""Longest time between two polls of the files, in seconds."""
MIN_POLL_S = 0.02


class LogRetention:
    """Trims the logs of a node's ranks; calls `report_finding` once, when the first byte is dropped or cannot be."""

    def __init__(self, report_finding: Callable[[Finding], None]) -> None:
        self._report_finding = report_finding
        self._logs: dict[Path, _RankOutput] = {}
        self._reported: set[str] = set()

    def add(self, who: str, path: Path, max_bytes: int) -> None:
        """Keep only the newest `max_bytes` of a rank's output to `path`, old and new."""
        try:
            self._logs[path] = _RankOutput(who, path, max_bytes)
        except OSError as error:
            self._report_once(_log_retention_off(who, path, error))

    def remove(self, path: Path) -> None:
        """The writers of `path` have ended: trim it a last time."""
        output = self._logs.pop(path, None)
        if output is not None:
            self._trim(output)

    async def run(self) -> None:
        """Poll the files forever; the faster they grow, the more often."""
        while True:
            room_s = [self._trim(output) for output in self._logs.values()]
            await asyncio.sleep(max(MIN_POLL_S, min([POLL_S, *room_s])))

    def _trim(self, output: _RankOutput) -> float:
        """Trim the output; return the seconds until the next trim is due."""
        try:
            if output.trim():
                self._report_once(_log_truncated(output))
        except OSError as error:
            self._report_once(_log_retention_off(output.who, output.path, error))
            return POLL_S
        return output.seconds_to_limit()

    def _report_once(self, finding: Finding) -> None:
        if finding.code not in self._reported:
            self._reported.add(finding.code)
            self._report_finding(finding)


class _RankOutput:
    """One rank's output: the current file and those of its earlier attempts."""

    def __init__(self, who: str, path: Path, max_bytes: int) -> None:
        self.who = who
        self.path = path
        self.max_bytes = max_bytes
        self._slack = max(max_bytes // 8, HOLE_ALIGN_BYTES)
        self._files = [_LogFile(earlier) for earlier in earlier_logs(path)] + [_LogFile(path)]
        self._polled_at = time.monotonic()
        self._bytes_a_second = 0.0

    def trim(self) -> bool:
        """Drop the oldest data beyond the limit once there is enough of it; return whether any was dropped."""
        live = self._files[-1]
        size, now = live.size, time.monotonic()
        live.refresh()
        self._bytes_a_second = max(0, live.size - size) / max(now - self._polled_at, 1e-3)
        self._polled_at = now
        if self._excess_bytes() < self._slack:
            return False
        for earlier in self._files[:-1]:
            earlier.punch(self._excess_bytes(), ended=True)
        live.punch(self._excess_bytes(), ended=False)
        return True

    def seconds_to_limit(self) -> float:
        """Seconds until the slack is used up at the recent write rate."""
        return (self._slack - self._excess_bytes()) / max(self._bytes_a_second, 1.0)

    def _excess_bytes(self) -> int:
        return sum(file.size - file.start for file in self._files) - self.max_bytes


class _LogFile:
    """One file and the offset at which its data starts."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.size = self.start = 0
        self.refresh()
        if self.size:
            with path.open("rb") as file:
                self.start = sparse_files.next_data(file.fileno(), 0)

    def refresh(self) -> None:
        try:
            self.size = self._path.stat().st_size
        except FileNotFoundError:
            self.size = 0
        self.start = min(self.start, self.size)

    def punch(self, count: int, *, ended: bool) -> None:
        """Free the first `count` bytes, in whole blocks; all of them if the file has ended."""
        whole = ended and self.start + count >= self.size
        end = -(-self.size // HOLE_ALIGN_BYTES) if whole else (self.start + count) // HOLE_ALIGN_BYTES
        if end * HOLE_ALIGN_BYTES <= self.start:
            return
        with self._path.open("r+b") as file:
            while self.start < end * HOLE_ALIGN_BYTES:
                length = min(end * HOLE_ALIGN_BYTES - self.start, MAX_PUNCH_BYTES)
                sparse_files.punch_hole(file.fileno(), self.start, length)
                self.start += length
        self.start = min(self.start, self.size)


def _log_truncated(output: _RankOutput) -> Finding:
    return Finding(
        code="log-truncated",
        severity=Severity.WARNING,
        what=f"{output.who} has written more than its log may hold; from here on the oldest of it is dropped",
        where=str(output.path),
        evidence=(f"logs.max_bytes is {output.max_bytes:,}, for each rank, over all attempts",),
        remedy="Print less, or raise `logs.max_bytes`.",
    )


def _log_retention_off(who: str, path: Path, error: OSError) -> Finding:
    return Finding(
        code="log-retention-off",
        severity=Severity.WARNING,
        what=f"the log of {who} cannot be limited to `logs.max_bytes`, so all its output stays on the disk",
        where=str(path),
        evidence=(str(error),),
        remedy="Print less, or set HOLDFAST_HOME to a folder on ext4, xfs, btrfs, tmpfs or NFS 4.2: they punch holes.",
    )
