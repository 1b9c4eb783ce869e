"""Reduces a flight recorder's dump to what an event holds, and back: each group's position and current collective."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from itertools import chain

from holdfast.diagnose.structured.flight_recorder import CollectiveEntry, FlightDump, GroupPosition
from holdfast.events import CollectiveCall, GroupCollectives, Ranges, from_ranges, to_ranges

MAX_GROUPS = 16
"""Groups in an event; those in which the rank waits come first."""
MAX_CALLS = 3
"""Collectives of a group in an event: the one in which the rank waits, and those before it, which may not have matched
those of other ranks."""
MAX_TEXT_CHARS = 100
MAX_RANGES = 32
"""Ranges that describe a group's ranks; the ranks of a group that needs more are left out."""

_MAX_RANKS = 1 << 20
"""No job has more ranks, whatever a message says."""


def summarise(dump: FlightDump) -> tuple[GroupCollectives, ...]:
    """The positions of a rank, at most `MAX_GROUPS`."""
    waits = (GroupCollectives(group="", point_to_point=op[:MAX_TEXT_CHARS]) for op in dump.point_to_point[:1])
    groups = sorted(dump.groups.items(), key=lambda item: (item[1].pending == 0, -item[1].enqueued, item[0]))
    positions = (_summary(name, position, dump.members.get(name, frozenset())) for name, position in groups)
    return tuple(chain(waits, positions))[:MAX_GROUPS]


def _summary(group: str, position: GroupPosition, members: frozenset[int]) -> GroupCollectives:
    ranks, current = to_ranges(members), position.pending or position.enqueued
    calls = (position.calls.get(seq) for seq in range(current - MAX_CALLS + 1, current + 1))
    return GroupCollectives(
        group=group[:MAX_TEXT_CHARS],
        ranks=ranks if len(ranks) <= MAX_RANGES else (),
        enqueued=position.enqueued,
        completed=position.completed,
        pending=position.pending,
        calls=tuple(map(_call, filter(None, calls))),
    )


def _call(call: CollectiveEntry) -> CollectiveCall:
    return CollectiveCall(
        seq=call.seq,
        op=call.op[:MAX_TEXT_CHARS],
        sizes=call.sizes[:MAX_TEXT_CHARS],
        where=call.where[-MAX_TEXT_CHARS:],
        started=call.started,
        done=call.done,
    )


def from_summary(rank: int, collectives: Iterable[GroupCollectives], source: str = "") -> FlightDump:
    """The dump of a rank, as far as its summary goes."""
    collectives = list(collectives)
    return FlightDump(
        source=source,
        rank=rank,
        members={each.group: ranks for each in collectives if (ranks := _members(each.ranks))},
        groups={each.group: _position(each) for each in collectives if not each.point_to_point},
        point_to_point=tuple(each.point_to_point for each in collectives if each.point_to_point),
    )


@lru_cache(maxsize=1024)
def _members(ranks: Ranges) -> frozenset[int]:
    """The ranks in these ranges, one set for all ranks of a group; none if they are absurd."""
    absurd = any(not 0 <= first <= last < _MAX_RANKS for first, last in ranks)
    return frozenset() if absurd else frozenset(from_ranges(ranks))


def _position(of: GroupCollectives) -> GroupPosition:
    calls = {
        call.seq: CollectiveEntry(
            seq=call.seq, op=call.op, sizes=call.sizes, where=call.where, started=call.started, done=call.done
        )
        for call in of.calls
    }
    return GroupPosition(calls=calls, enqueued=of.enqueued, completed=of.completed, pending=of.pending)
