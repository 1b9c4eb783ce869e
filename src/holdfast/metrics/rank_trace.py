"""Reads the trace file of one rank, as torch's profiler writes it (Kineto, Chrome's Trace Event Format)."""

from __future__ import annotations

import gzip
import re
import zlib
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from holdfast.host.files import open_regular
from holdfast.metrics.profiler_events import ProfilerEvent

MAX_JSON_BYTES = 1 << 30
"""Most bytes of an uncompressed trace; an event has about 200."""
_HOST_COLLECTIVE = re.compile(r"(gloo|mpi|ucc):")


class UnreadableTrace(ValueError):
    """The file is no trace of torch's profiler."""


class TraceEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of `traceEvents`; `ts` and `dur` are microseconds."""

    ph: str
    """Phase: X a complete event, M metadata, i an instant, s and f the two ends of a flow."""
    name: str = ""
    cat: str = ""
    pid: int | str = 0
    tid: int | str = 0
    ts: float = 0.0
    dur: float = 0.0
    id: int | str | None = None
    bp: str | None = None
    s: str | None = None
    args: dict[str, Any] = msgspec.field(default_factory=dict)


class _File(msgspec.Struct, frozen=True, kw_only=True):
    trace_events: list[TraceEvent] = msgspec.field(name="traceEvents")
    base_ns: int = msgspec.field(name="baseTimeNanoseconds", default=0)
    host_name: str = ""


class RankTrace(Struct, frozen=True, kw_only=True):
    """The trace of one rank; times become Unix time by adding `base_ns`, on the clock of its node."""

    rank: int
    node: str
    host: str
    """Name of the machine or container; ranks with the same one share a clock."""
    base_ns: int
    entries: tuple[TraceEvent, ...]

    def time_ns(self, ts: float) -> int:
        """Unix nanoseconds of a `ts`."""
        return self.base_ns + round(ts * 1000)

    def events(self) -> list[ProfilerEvent]:
        """The complete events, to be classified."""
        return [
            ProfilerEvent(
                name=entry.name,
                activity=entry.cat,
                thread=entry.tid,
                begin=self.time_ns(entry.ts),
                end=self.time_ns(entry.ts + entry.dur),
                correlation=_correlation(entry.args),
                is_async=bool(_HOST_COLLECTIVE.match(entry.name)),
            )
            for entry in self.entries
            if entry.ph == "X"
        ]


def _correlation(args: dict[str, Any]) -> int:
    number = args.get("correlation", 0)
    return number if isinstance(number, int) else 0


def read_rank_trace(path: Path, *, rank: int, node: str) -> RankTrace:
    """Read a compressed trace; raises UnreadableTrace and OSError."""
    try:
        with open_regular(path) as raw, gzip.GzipFile(fileobj=raw) as file:
            data = file.read(MAX_JSON_BYTES + 1)
        if len(data) > MAX_JSON_BYTES:
            raise UnreadableTrace(f"{path}: more than {MAX_JSON_BYTES:,} bytes uncompressed")
        return parse_rank_trace(data, rank=rank, node=node)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UnreadableTrace(f"{path}: {error}") from error


def parse_rank_trace(data: bytes, *, rank: int, node: str) -> RankTrace:
    """Parse an uncompressed trace; raises UnreadableTrace."""
    try:
        found = msgspec.json.decode(data, type=_File)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UnreadableTrace(f"the trace of rank {rank}: {error}") from error
    return RankTrace(
        rank=rank, node=node, host=found.host_name, base_ns=found.base_ns, entries=tuple(found.trace_events)
    )
