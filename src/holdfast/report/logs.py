"""Owns one readable view of what all ranks wrote: a file per rank, line by line, whatever bytes they hold.

Ranks write without time stamps, so their lines have no common order: what is there already comes rank by rank, the one
that failed first before the others; what comes later comes as it comes. Refuses to own the writing (agent).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from holdfast.events import AnyEvent, RecoveryDecided
from holdfast.folder import RunFolder
from holdfast.report.words import LONGEST_LINE, clean

BLOCK_BYTES = 1 << 20
LONGEST_PENDING_BYTES = 1 << 16
"""A line without an end is shown in pieces of this size."""

_FILE = re.compile(r"(?:replica-(?P<replica>\d+)-)?attempt-(?P<attempt>\d+)/rank-(?P<rank>\d+)\.log")


@dataclass(frozen=True, kw_only=True, order=True)
class RankLog:
    """Which rank's output, of which attempt."""

    attempt: int
    replica: int
    rank: int


@dataclass(frozen=True, kw_only=True)
class LogLine:
    """One line, with who wrote it."""

    source: RankLog
    text: str
    failed_first: bool = False
    """Whether the rank is the one whose failure ended the attempt."""


def first_failures(events: Iterable[AnyEvent]) -> frozenset[RankLog]:
    """The rank that failed first in each attempt that a rank's failure ended."""
    return frozenset(
        RankLog(attempt=event.attempt, replica=event.replica, rank=event.first_rank)
        for event in events
        if isinstance(event, RecoveryDecided) and event.first_rank is not None
    )


def rank_logs(run: RunFolder) -> dict[RankLog, Path]:
    """Every rank's file that exists, in order."""
    root = run.path / "logs"
    found: dict[RankLog, Path] = {}
    for path in root.glob("*/rank-*.log"):
        match = _FILE.fullmatch(path.relative_to(root).as_posix())
        if match:
            replica = int(match["replica"] or 0)
            found[RankLog(attempt=int(match["attempt"]), replica=replica, rank=int(match["rank"]))] = path
    return dict(sorted(found.items()))


class MergedLog:
    """Reads the files of a run that may still be going on: each `read()` yields what has come since the last."""

    def __init__(
        self, run: RunFolder, *, rank: int | None = None, from_attempt: int = 0, to_attempt: int | None = None
    ) -> None:
        self._run = run
        self._rank = rank
        self._from, self._to = from_attempt, to_attempt
        self._tails: dict[RankLog, _Tail] = {}

    def read(self, failed: frozenset[RankLog] = frozenset(), *, to_the_end: bool = False) -> Iterator[LogLine]:
        """New lines, those of ranks in `failed` first; `to_the_end` gives out last lines that have no end as well."""
        for source, path in rank_logs(self._run).items():
            if source not in self._tails and self._wanted(source):
                self._tails[source] = _Tail(path)
        ordered = sorted(self._tails, key=lambda source: (source.attempt, source not in failed, source))
        for source in ordered:
            for text in self._tails[source].read(to_the_end=to_the_end):
                yield LogLine(source=source, text=text, failed_first=source in failed)

    def _wanted(self, source: RankLog) -> bool:
        last = self._to is None or source.attempt <= self._to
        return self._from <= source.attempt and last and self._rank in (None, source.rank)


class _Tail:
    """One growing file, cut into lines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._pending = b""

    def read(self, *, to_the_end: bool) -> Iterator[str]:
        try:
            file = self._path.open("rb")
        except OSError:
            return
        with file:
            file.seek(self._offset)
            while block := file.read(BLOCK_BYTES):
                self._offset += len(block)
                *lines, self._pending = (self._pending + block).split(b"\n")
                yield from map(_text, lines)
                if len(self._pending) > LONGEST_PENDING_BYTES:
                    yield _text(self._pending)
                    self._pending = b""
        if to_the_end and self._pending:
            yield _text(self._pending)
            self._pending = b""


def _text(line: bytes) -> str:
    """A line as a terminal would leave it: what a carriage return overwrites is dropped."""
    shown = next((piece for piece in reversed(line.split(b"\r")) if piece), b"")
    text = clean(shown[: 4 * LONGEST_LINE].decode("utf-8", "replace"))
    return text if len(shown) <= 4 * LONGEST_LINE else f"{text} ({len(shown):,} bytes in all)"
