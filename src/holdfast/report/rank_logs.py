"""Merges the log files of all ranks into one stream of lines.

Rank output has no timestamps, so its lines have no common order. Existing output is read rank by rank, the first
failed rank first; new output in arrival order, one block per rank in turn, so that no rank waits for another. The
agent writes the files; log_tail.py reads one file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from msgspec import Struct

from holdfast.events import AnyEvent, RecoveryDecided
from holdfast.report.log_tail import LogTail, TailChunk, last_lines
from holdfast.run_dir import RunDir

LIST_INTERVAL_S = 0.25
"""Minimum time between two listings of the files."""
PREVIEW_LIST_INTERVAL_S = 1.0
"""The same for a preview."""

_FOLDER = re.compile(r"(?:replica-(?P<replica>\d{1,9})-)?attempt-(?P<attempt>\d{1,9})")
_FILE = re.compile(r"rank-(?P<rank>\d{1,9})\.log")


class RankLog(Struct, frozen=True, kw_only=True, order=True):
    """The log of one rank in one attempt."""

    attempt: int
    replica: int
    rank: int


class RankChunk(Struct, frozen=True, kw_only=True):
    """Lines with the rank that wrote them."""

    source: RankLog
    chunk: TailChunk
    failed_first: bool = False
    """Whether this rank's failure ended the attempt."""


def first_failures(events: Iterable[AnyEvent]) -> frozenset[RankLog]:
    """The first failed rank of each attempt that ended by a rank failure."""
    return frozenset(
        RankLog(
            attempt=event.attempt,
            replica=event.replica,
            rank=event.first_failed_rank if event.log_owner_rank is None else event.log_owner_rank,
        )
        for event in events
        if isinstance(event, RecoveryDecided) and event.first_failed_rank is not None
    )


def find_rank_logs(run: RunDir, *, from_attempt: int = 0) -> dict[RankLog, Path]:
    """All existing rank log files, in order."""
    root = run.logs
    found: dict[RankLog, Path] = {}
    for folder in os.listdir(root) if root.is_dir() else ():
        match = _FOLDER.fullmatch(folder)
        if match is None or int(match["attempt"]) < from_attempt:
            continue
        for name in _names(root / folder):
            if file := _FILE.fullmatch(name):
                attempt, replica, rank = int(match["attempt"]), int(match["replica"] or 0), int(file["rank"])
                found[RankLog(attempt=attempt, replica=replica, rank=rank)] = root / folder / name
    return dict(sorted(found.items()))


class LogPreview:
    """The latest output of a running run, from the first rank that has written anything."""

    def __init__(self, run: RunDir, lines: int) -> None:
        self._run = run
        self._lines = lines
        self._listed_at = float("-inf")
        self._latest: tuple[RankLog, Path] | None = None

    def poll(self, now: float) -> tuple[RankLog, list[str]] | None:
        """The rank and its last lines; None if no rank has written. `now` is monotonic seconds."""
        if now - self._listed_at >= PREVIEW_LIST_INTERVAL_S:
            self._listed_at = now
            self._latest = self._first_of_latest()
        if self._latest is None:
            return None
        source, path = self._latest
        return source, last_lines(path, self._lines)

    def _first_of_latest(self) -> tuple[RankLog, Path] | None:
        found = find_rank_logs(self._run)
        attempt = max((source.attempt for source in found), default=0)
        written = (item for item in found.items() if item[0].attempt == attempt and item[1].lstat().st_size > 0)
        return next(written, None)


def _names(folder: Path) -> list[str]:
    """Names in a folder; empty if it does not exist."""
    try:
        return os.listdir(folder)
    except OSError:
        return []


class MergedLog:
    """Reads the log files of a run that may still be running.

    `ranks`, as (replica, rank) pairs, and the attempts select the files; without `from_attempt` it starts with each
    replica's latest attempt. `last_lines` limits files that exist at the first poll to their last lines. Times are
    monotonic seconds.
    """

    def __init__(
        self,
        run: RunDir,
        *,
        ranks: Collection[tuple[int, int]] | None = None,
        from_attempt: int | None = 0,
        to_attempt: int | None = None,
        last_lines: int | None = None,
        colours: bool = False,
    ) -> None:
        self._run = run
        self._ranks = ranks
        self._from, self._to = from_attempt or 0, to_attempt
        self._latest = _latest(find_rank_logs(run)) if from_attempt is None else {}
        self._last_lines = last_lines
        self._colours = colours
        self._tails: dict[RankLog, LogTail] = {}
        self._finished: set[RankLog] = set()
        """Files read to the end; a later attempt of the replica has started, so they get no more output."""
        self._listed_at = float("-inf")

    def poll(self, now: float, failed: Collection[RankLog] = ()) -> Iterator[RankChunk]:
        """Yield at most one new block of each file since the last poll, ranks in `failed` first."""
        self._list(now)
        newest = _latest(self._tails)
        for source, tail in self._ordered(failed):
            piece = tail.read(now)
            if piece is None and source.attempt < newest[source.replica]:
                piece = tail.flush()
                self._finished.add(source)
                del self._tails[source]
            elif piece is None:
                piece = tail.poll_partial(now)
            if piece is not None:
                yield RankChunk(source=source, chunk=piece, failed_first=source in failed)

    def drain(self, now: float, failed: Collection[RankLog] = ()) -> Iterator[RankChunk]:
        """Yield all remaining output, file by file, including incomplete lines; used when not following (any more)."""
        self._listed_at = float("-inf")
        self._list(now)
        for source, tail in self._ordered(failed):
            end = tail.size  # otherwise a rank that writes faster than this reads would keep it running
            while tail.offset < end and (piece := tail.read(now)):
                yield RankChunk(source=source, chunk=piece, failed_first=source in failed)
            if piece := tail.flush():
                yield RankChunk(source=source, chunk=piece, failed_first=source in failed)

    def _list(self, now: float) -> None:
        if now - self._listed_at < LIST_INTERVAL_S:
            return
        first = self._listed_at == float("-inf") and not self._tails
        self._listed_at = now
        for source, path in find_rank_logs(self._run, from_attempt=self._from).items():
            if source not in self._tails and source not in self._finished and self._wanted(source):
                last_lines = self._last_lines if first else None
                self._tails[source] = LogTail(path, colours=self._colours, last_lines=last_lines)

    def _ordered(self, failed: Collection[RankLog]) -> list[tuple[RankLog, LogTail]]:
        return sorted(self._tails.items(), key=lambda item: (item[0].attempt, item[0] not in failed, item[0]))

    def _wanted(self, source: RankLog) -> bool:
        first, last = self._latest.get(source.replica, self._from), self._to
        in_time = first <= source.attempt and (last is None or source.attempt <= last)
        return in_time and (self._ranks is None or (source.replica, source.rank) in self._ranks)


def _latest(sources: Iterable[RankLog]) -> dict[int, int]:
    """Each replica's latest attempt."""
    latest: dict[int, int] = {}
    for source in sources:
        latest[source.replica] = max(source.attempt, latest.get(source.replica, 0))
    return latest
