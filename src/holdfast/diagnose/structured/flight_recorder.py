"""Reads torch's flight recorder dumps, as pickle or JSON: the collectives that a rank has entered.

flight_verdict.py compares those of several ranks. Written for versions 2.0 to 2.10 of the dump's format (torch 2.4 to
2.15); missing fields are tolerated. NCCL's entries have a state. Those of Gloo stay `scheduled` for ever; their
completion shows as `retired` and in the group's status.
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any, cast

from msgspec import Struct
from msgspec.structs import replace

from holdfast.diagnose.log_chunk import LogSource
from holdfast.diagnose.structured import safe_pickle

_LARGEST = 2**63
_TEXT_LENGTH, _ITEMS = 300, 16
_RANK = re.compile(r"(\d+)(?:\.\w+)?$")
_NUMBERS = re.compile(r"\d+")
_LIBRARY_PATHS = ("/torch/", "/site-packages/", "/dist-packages/")


class CollectiveEntry(Struct, frozen=True, kw_only=True):
    """One collective that a rank has enqueued."""

    seq: int
    op: str
    sizes: str
    done: bool
    started: bool = False
    """Whether it has begun on the device; Gloo never shows it."""
    at: float = 0.0
    """Unix seconds."""
    where: str = ""
    """`file:line` of the user's own code, where frames were recorded."""

    def __str__(self) -> str:
        return f"{self.op} {self.sizes}".strip() + (f" at {self.where}" if self.where else "")


class GroupPosition(Struct, frozen=True, kw_only=True):
    """The position of a rank in one process group."""

    calls: Mapping[int, CollectiveEntry]
    enqueued: int
    completed: int
    pending: int = 0
    """The first collective that it has entered and not completed; 0 if there is none."""

    @property
    def current(self) -> CollectiveEntry | None:
        """The collective that it waits in, or else its last one, if the recorder still has it."""
        return self.calls.get(self.pending or self.enqueued)


class FlightDump(Struct, frozen=True, kw_only=True):
    """What one rank's recorder held."""

    source: str
    rank: int
    members: Mapping[str, frozenset[int]]
    """Ranks of each process group by its name, where the dump has them."""
    groups: Mapping[str, GroupPosition]
    """Its positions by group; the name is empty for groups that torch does not know by name."""
    point_to_point: tuple[str, ...] = ()
    """Sends and receives that have not finished, such as `recv 1<-0`."""


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
    point_to_point: list[str] = []
    for entry in _dicts(fields.get("entries")):
        group, call = _group(entry), _call(entry)
        ids[_text(entry.get("pg_id"))] = group
        if entry.get("is_p2p"):
            if not call.done:
                point_to_point.append(call.op)
        else:
            calls[group][call.seq] = call
    members = _members(fields.get("pg_config"))
    statuses = {ids.get(key, key): status for key, status in _named(fields.get("pg_status")).items()}
    groups = {
        group: _position(calls.get(group, {}), statuses.get(group, {})) for group in calls.keys() | statuses.keys()
    }
    if len(groups) == 1 and len(members) == 1:  # torch 2.10 and later: Gloo's group has no name in pg_config
        members = {next(iter(groups)): next(iter(members.values()))}
    waits = tuple(point_to_point[-_ITEMS:])
    return FlightDump(source=source.name, rank=rank, members=members, groups=groups, point_to_point=waits)


def merged(dumps: Sequence[FlightDump]) -> FlightDump:
    """The dumps of several recorders of one rank as one.

    A group with backends for CPU and GPU has a position in two recorders, which count apart.
    """
    members: dict[str, frozenset[int]] = {}
    groups: dict[str, GroupPosition] = {}
    for number, dump in enumerate(dumps):
        names = {name: name if name not in groups else f"{name}#{number}" for name in dump.groups}
        groups |= {names[name]: position for name, position in dump.groups.items()}
        members |= {names.get(name, name): ranks for name, ranks in dump.members.items()}
    waits = tuple(op for dump in dumps for op in dump.point_to_point)
    return replace(dumps[0], members=members, groups=groups, point_to_point=waits)


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


def _call(entry: Mapping[str, Any]) -> CollectiveEntry:
    kinds = _text(entry.get("input_dtypes"))[1:-1]
    return CollectiveEntry(
        seq=_number(entry.get("collective_seq_id", entry.get("seq_id"))),
        op=sys.intern(_text(entry.get("profiling_name")).rpartition(":")[2]),
        sizes=sys.intern(f"{_text(entry.get('input_sizes'))} {kinds}".strip()),
        done=entry.get("state") == "completed" or bool(entry.get("retired")),
        started=entry.get("state") in ("started", "completed"),
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
    # Two threads may complete Gloo's out of order.
    pending = min((seq for seq, call in calls.items() if not call.done), default=0)
    if not pending and completed < enqueued:
        pending = completed + 1
    return GroupPosition(calls=calls, enqueued=enqueued, completed=completed, pending=pending)
