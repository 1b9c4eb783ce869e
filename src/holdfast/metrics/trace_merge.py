"""Merges the traces of several ranks into one that Perfetto loads. Pure functions.

The clocks of two machines differ, and a trace has its own machine's. A collective that needs every rank, such as an
all-reduce, ends on all of them at nearly the same time, and nowhere before it has begun everywhere. The median of the
differences of the ends is the offset of two clocks, half the spread of the middle half its error, and the second rule
bounds both.
"""

from __future__ import annotations

import json
import re
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct

from holdfast.metrics.profiler_events import ProfilerEvent
from holdfast.metrics.rank_trace import RankTrace, TraceEvent
from holdfast.metrics.step_breakdown import Span

MAX_FLOW_ID = 1 << 32
_TOGETHER = re.compile(r"all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|barrier", re.IGNORECASE)
"""Collectives that need every rank; a broadcast ends on its source first."""
_METADATA = ("process_name", "process_labels", "process_sort_index", "thread_name", "thread_sort_index")
_OWN_PROCESSES = ("Spans", "Traces", "")
"""Kineto's rows about the recording itself."""


class ClockOffset(Struct, frozen=True, kw_only=True):
    """How far the clock of a rank's node is ahead of that of the first rank, and by how much that may be wrong."""

    ahead_ns: int = 0
    error_ns: int = 0
    collectives: int = 0
    """From how many it was estimated; 0: both ranks have the same clock, or share no collective."""


def clock_offsets(traces: Sequence[RankTrace]) -> dict[int, ClockOffset]:
    """The offset of each rank's clock, by rank; that of the first is 0."""
    first, *others = traces
    known = _collectives(first)
    return {first.rank: ClockOffset()} | {
        other.rank: ClockOffset() if other.host and other.host == first.host else _offset(known, _collectives(other))
        for other in others
    }


def _offset(ours: Mapping[tuple[str, int], Span], theirs: Mapping[tuple[str, int], Span]) -> ClockOffset:
    both = [(ours[key], theirs[key]) for key in ours.keys() & theirs.keys()]
    if not both:
        return ClockOffset()
    ends = sorted(their[1] - our[1] for our, their in both)
    least = max(their[0] - our[1] for our, their in both)
    most = min(their[1] - our[0] for our, their in both)
    ahead = min(max(round(statistics.median(ends)), least), max(least, most))
    quarter = len(ends) // 4
    return ClockOffset(ahead_ns=ahead, error_ns=(ends[-1 - quarter] - ends[quarter]) // 2, collectives=len(both))


def _collectives(trace: RankTrace) -> dict[tuple[str, int], Span]:
    """Collectives that need every rank, by name and number."""
    found: dict[str, list[ProfilerEvent]] = defaultdict(list)
    for event in trace.events():
        if event.is_communication and _TOGETHER.search(event.name):
            found[event.name].append(event)
    return {
        (name, number): event.span
        for name, events in found.items()
        for number, event in enumerate(sorted(events, key=lambda event: event.end))
    }


def merged_trace(traces: Sequence[RankTrace], offsets: Mapping[int, ClockOffset]) -> Iterator[bytes]:
    """The lines of one JSON file: processes by rank, events by time.

    Its times are microseconds from the first event, on the clock of the first rank.
    """
    traces = sorted(traces, key=lambda trace: trace.rank)
    rows = [row for trace in traces for row in _rows(trace, offsets[trace.rank].ahead_ns)]
    rows.sort(key=lambda row: row[0])
    start = rows[0][0] if rows else 0
    names = [each for trace in traces for each in _names(trace)]
    about = {"displayTimeUnit": "ms", "baseTimeNanoseconds": start}
    yield json.dumps(about).encode()[:-1] + b', "traceEvents": [\n'
    for place, event in enumerate((*names, *({**row, "ts": (at - start) / 1000} for at, row in rows))):
        yield (b",\n" if place else b"") + json.dumps(event).encode()
    yield b"\n]}\n"


def _rows(trace: RankTrace, ahead_ns: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Times of the events on the first rank's clock, and the rest of them."""
    pids = _pids(trace)
    for entry in trace.entries:
        if entry.ph == "M" or entry.pid in _OWN_PROCESSES:
            continue
        yield trace.time_ns(entry.ts) - ahead_ns, _row(entry, pids[entry.pid], trace.rank)


def _row(entry: TraceEvent, pid: int, rank: int) -> dict[str, Any]:
    row: dict[str, Any] = {"ph": entry.ph, "name": entry.name, "cat": entry.cat, "pid": pid, "tid": entry.tid}
    if entry.ph == "X":
        row["dur"] = entry.dur
    if isinstance(entry.id, int):
        row["id"] = rank * MAX_FLOW_ID + entry.id % MAX_FLOW_ID  # flows of two ranks are not connected
    elif entry.id is not None:
        row["id"] = f"{rank}.{entry.id}"
    row |= {name: value for name, value in (("bp", entry.bp), ("s", entry.s)) if value is not None}
    return row | ({"args": entry.args} if entry.args else {})


def _pids(trace: RankTrace) -> dict[int | str, int]:
    """New numbers of a rank's processes: the ranks of two nodes may have the same ones."""
    known = dict.fromkeys(entry.pid for entry in trace.entries if entry.pid not in _OWN_PROCESSES)
    ordered = sorted(known, key=lambda pid: (pid != _host_process(trace), str(pid)))
    return {pid: (trace.rank + 1) * 1000 + place for place, pid in enumerate(ordered)}


def _host_process(trace: RankTrace) -> int | str | None:
    """The process of the rank; the others are its devices."""
    return next((entry.pid for entry in trace.entries if entry.ph == "X" and entry.cat == "cpu_op"), None)


def _names(trace: RankTrace) -> Iterator[dict[str, Any]]:
    """Metadata that names and sorts a rank's processes and threads."""
    host = _host_process(trace)
    for pid, number in _pids(trace).items():
        name = f"rank {trace.rank} · {trace.node}" + ("" if pid == host else f" · GPU {pid}")
        yield _metadata("process_name", number, 0, {"name": name})
        yield _metadata("process_sort_index", number, 0, {"sort_index": number})
    pids = _pids(trace)
    for entry in trace.entries:
        if entry.ph == "M" and entry.name.startswith("thread_") and entry.name in _METADATA and entry.pid in pids:
            yield _metadata(entry.name, pids[entry.pid], entry.tid, entry.args)


def _metadata(name: str, pid: int, tid: int | str, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": args}
