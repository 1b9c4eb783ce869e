"""Reads torch's flight recorder dumps, as pickle or JSON, and compares those of several ranks.

Each rank dumps the collectives that it has enqueued. Compared, they show the rank that made another call than the
others, or that never made one in which the others wait. Written for versions 2.0 to 2.10 of the dump's format (torch
2.4 to 2.15); missing fields are tolerated.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, cast

from holdfast.diagnose.fact import Fact, ProcessRef
from holdfast.diagnose.log_chunk import LogSource
from holdfast.diagnose.rules import hang_records
from holdfast.diagnose.rules.rule import Rule
from holdfast.diagnose.structured import safe_pickle

MAX_RANKS_LISTED = 16
"""Ranks that are listed by number."""

_LARGEST = 2**63
_TEXT_LENGTH, _ITEMS = 300, 16
_RANK = re.compile(r"(\d+)(?:\.\w+)?$")
_NUMBERS = re.compile(r"\d+")
_VARIABLE_SIZE = ("all_to_all", "alltoall", "gather", "scatter", "send", "recv", "coalesced", "barrier")
"""Operations in which ranks may pass tensors of different sizes; `all_gather` and `reduce_scatter` too."""
_LIBRARY_PATHS = ("/torch/", "/site-packages/", "/dist-packages/")


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveEntry:
    """One collective that a rank has enqueued."""

    seq: int
    op: str
    sizes: str
    done: bool
    at: float
    """Unix seconds."""
    where: str
    """`file:line` of the user's own code, where frames were recorded."""

    def __str__(self) -> str:
        return f"{self.op} {self.sizes}".strip() + (f" at {self.where}" if self.where else "")


@dataclass(frozen=True, kw_only=True)
class GroupPosition:
    """The position of a rank in one process group."""

    calls: Mapping[int, CollectiveEntry]
    enqueued: int
    completed: int

    @property
    def is_waiting(self) -> bool:
        """Whether it is in a collective that has not finished."""
        return self.completed < self.enqueued


@dataclass(frozen=True, kw_only=True)
class FlightDump:
    """What one rank's recorder held."""

    source: str
    rank: int
    members: Mapping[str, frozenset[int]]
    """Ranks of each process group by its name, where the dump has them."""
    groups: Mapping[str, GroupPosition]


def is_dump(head: bytes) -> bool:
    """Whether a file with this beginning is a dump."""
    start = head.lstrip()[:1]
    pickle = head[:1] == b"\x80" and head[1:2] <= b"\x05"
    return (pickle or start == b"{") and any(
        key in head for key in (b"pg_config", b"collective_seq_id", b"nccl_comm_state", b"comm_lib_version")
    )


def read(source: LogSource, data: bytes) -> FlightDump | None:
    """A dump; None when it is not one, is damaged, or does not name its rank."""
    rank = source.rank
    if rank is None:
        found = _RANK.search(PurePath(source.name).name)
        rank = int(found[1][:9]) if found else None
    try:
        document = safe_pickle.read(data) if data[:1] == b"\x80" else json.loads(data)
    except (safe_pickle.UnsafePickle, ValueError, RecursionError):
        return None
    if rank is None or not isinstance(document, dict):
        return None
    fields = cast("dict[str, Any]", document)
    calls: dict[str, dict[int, CollectiveEntry]] = defaultdict(dict)
    ids: dict[str, str] = {}
    for entry in _dicts(fields.get("entries")):
        group, call = _group(entry), _call(entry)
        ids[_text(entry.get("pg_id"))] = group
        if call is not None:
            calls[group][call.seq] = call
    members = _members(fields.get("pg_config"))
    statuses = {ids.get(key, key): status for key, status in _named(fields.get("pg_status")).items()}
    groups = {
        group: _position(calls.get(group, {}), statuses.get(group, {})) for group in calls.keys() | statuses.keys()
    }
    if len(groups) == 1 and len(members) == 1:  # torch 2.10 and later: Gloo's group has no name in pg_config
        members = {next(iter(groups)): next(iter(members.values()))}
    return FlightDump(source=source.name, rank=rank, members=members, groups=groups)


def compare(dumps: Sequence[FlightDump]) -> Iterator[Fact]:
    """The findings of several ranks' dumps: a mismatch, who is behind, who is missing, or that all wait together."""
    ranks = {dump.rank: dump for dump in dumps}
    if len(ranks) < 2:
        return
    groups = sorted({group for dump in ranks.values() for group in dump.groups})
    waiting = {
        rank: {group for group, position in dump.groups.items() if position.is_waiting} for rank, dump in ranks.items()
    }
    for group in groups:
        known = {rank: dump.groups[group] for rank, dump in ranks.items() if group in dump.groups}
        named = [dump.members[group] for dump in ranks.values() if group in dump.members]
        members = frozenset(known).union(*named)
        yield from _compare_group(group, known, members, ranks, waiting)


def _compare_group(
    group: str,
    known: Mapping[int, GroupPosition],
    members: frozenset[int],
    ranks: Mapping[int, FlightDump],
    waiting: Mapping[int, set[str]],
) -> Iterator[Fact]:
    if mismatch := _mismatch(group, known, ranks):
        yield mismatch
        return
    reached = max((position.enqueued for position in known.values()), default=0)
    waits = sorted(rank for rank, position in known.items() if position.enqueued == reached and position.is_waiting)
    if not waits:
        return
    call = known[waits[0]].calls.get(reached)
    inside = f"{_list(waits)} in collective {reached} of group {group}" + (f" ({call})" if call else "")
    present = {rank: known[rank].enqueued if rank in known else 0 for rank in members & ranks.keys()}
    behind = sorted(rank for rank, enqueued in present.items() if enqueued < reached)
    absent = sorted(members - ranks.keys())
    # A rank that waits in another group is blocked itself: the rank that blocks it is found there.
    free = [rank for rank in behind if not waiting[rank] - {group}]
    values = {"group": group, "seq": str(reached), "op": call.op if call else "a collective"}
    at = call.at if call else None

    def fact(rule: Rule, rank: int, text: str) -> Fact:
        source = ranks[rank].source if rank in ranks else ranks[waits[0]].source
        return Fact(rule=rule, source=source, line=0, text=text, process=ProcessRef(rank=rank), at=at, values=values)

    for rank in free[:MAX_RANKS_LISTED]:
        last = known[rank].calls.get(known[rank].enqueued) if rank in known else None
        text = f"rank {rank} never entered it; its last was {present[rank]}" + (f" ({last})" if last else "")
        yield fact(hang_records.FLIGHT_BEHIND, rank, f"{inside}; {text}")
    if not behind:
        for rank in absent[:MAX_RANKS_LISTED]:
            yield fact(hang_records.FLIGHT_ABSENT, rank, f"{inside}; rank {rank} has left no dump")
    if not behind and not absent:
        yield fact(hang_records.FLIGHT_ALL_WAITING, waits[0], f"{inside}; every rank of the group has entered it")


def _mismatch(group: str, known: Mapping[int, GroupPosition], ranks: Mapping[int, FlightDump]) -> Fact | None:
    """The first collective of a group that differed between its ranks."""
    for seq in sorted({seq for position in known.values() for seq in position.calls}):
        calls = {rank: position.calls[seq] for rank, position in known.items() if seq in position.calls}
        shapes = {rank: _shape(call) for rank, call in calls.items()}
        counts = Counter(shapes.values())
        if len(counts) < 2:
            continue
        most = counts.most_common(1)[0]
        others = sorted(rank for rank, shape in shapes.items() if shape != most[0])
        listed = "; ".join(
            f"{_list(sorted(rank for rank in shapes if shapes[rank] == shape))}: "
            f"{next(call for rank, call in calls.items() if shapes[rank] == shape)}"
            for shape in counts
        )
        odd = others[0] if most[1] > len(others) else None
        return Fact(
            rule=hang_records.FLIGHT_MISMATCH,
            source=ranks[others[0]].source,
            line=0,
            text=f"collective {seq} of group {group}: {listed}"[:1000],
            process=ProcessRef(rank=odd),
            at=min(call.at for call in calls.values()),
            values={"group": group, "seq": str(seq)},
        )
    return None


def _shape(call: CollectiveEntry) -> tuple[str, str]:
    """The fields that must be equal on all ranks."""
    return (call.op, "" if any(word in call.op for word in _VARIABLE_SIZE) else call.sizes)


def _list(ranks: Sequence[int]) -> str:
    listed = ", ".join(map(str, ranks[:MAX_RANKS_LISTED]))
    more = f" and {len(ranks) - MAX_RANKS_LISTED} more" if len(ranks) > MAX_RANKS_LISTED else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {listed}{more}"


# Validation of a dump's fields


def _dicts(value: object) -> Iterator[dict[str, Any]]:
    items: Iterable[object] = cast("list[object]", value) if isinstance(value, list) else ()
    yield from (cast("dict[str, Any]", item) for item in items if isinstance(item, dict))


def _named(value: object) -> dict[str, dict[str, Any]]:
    items = cast("dict[object, object]", value) if isinstance(value, dict) else {}
    return {_text(key): cast("dict[str, Any]", item) for key, item in items.items() if isinstance(item, dict)}


def _number(value: object) -> int:
    try:
        number = int(cast("Any", value))
    except (TypeError, ValueError, OverflowError):
        return 0
    return number if abs(number) < _LARGEST else 0


def _text(value: object, depth: int = 2) -> str:
    """A scalar, or nested lists of scalars, in few characters: shared parts could make it endless."""
    match value:
        case str():
            return value[:_TEXT_LENGTH].encode("utf-8", "replace").decode()
        case int() | float():
            return str(value) if abs(value) < _LARGEST else "…"
        case list() | tuple() if depth:
            items = cast("Sequence[object]", value)
            return f"[{', '.join(_text(item, depth - 1) for item in items[:_ITEMS])}{', …' * (len(items) > _ITEMS)}]"
        case _:
            return ""


def _group(entry: Mapping[str, Any]) -> str:
    group = entry.get("process_group")
    return _text(
        cast("Sequence[object]", group)[0] if isinstance(group, list | tuple) and group else entry.get("pg_id")
    )


def _call(entry: Mapping[str, Any]) -> CollectiveEntry | None:
    """A collective; None for point-to-point calls, which two ranks name differently."""
    if entry.get("is_p2p"):
        return None
    kinds = _text(entry.get("input_dtypes"))[1:-1]
    return CollectiveEntry(
        seq=_number(entry.get("collective_seq_id", entry.get("seq_id"))),
        op=sys.intern(_text(entry.get("profiling_name")).rpartition(":")[2]),
        sizes=sys.intern(f"{_text(entry.get('input_sizes'))} {kinds}".strip()),
        done=entry.get("state") == "completed" or bool(entry.get("retired")),
        at=_number(entry.get("time_created_ns")) / 1e9,
        where=_location(entry.get("frames")),
    )


def _location(frames: object) -> str:
    for frame in _dicts(frames):
        name = _text(frame.get("filename"))
        if not any(part in name for part in _LIBRARY_PATHS):
            return sys.intern(f"{name}:{_number(frame.get('line'))}")
    return ""


def _members(value: object) -> dict[str, frozenset[int]]:
    found = {key: _ranks(config.get("ranks")) for key, config in _named(value).items()}
    named = {(_text(config.get("name")) or key): _ranks(config.get("ranks")) for key, config in _named(value).items()}
    return {key: ranks for key, ranks in (found | named).items() if ranks}


def _ranks(value: object) -> frozenset[int]:
    """The ranks of `[0, 1, 2]`, which is text in a dump."""
    text = value[:1_000_000] if isinstance(value, str) else _text(value)
    return frozenset(int(number[:9]) for number in _NUMBERS.findall(text))


def _position(calls: Mapping[int, CollectiveEntry], status: Mapping[str, Any]) -> GroupPosition:
    enqueued = max(_number(status.get("last_enqueued_collective")), max(calls, default=0))
    done = max((seq for seq, call in calls.items() if call.done), default=0)
    completed = max(_number(status.get("last_completed_collective")), done)
    return GroupPosition(calls=calls, enqueued=enqueued, completed=completed)
