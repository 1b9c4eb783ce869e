"""Decides from the flight recorders of several ranks which of them holds up the others.

The only place that does: control/root_cause.py asks it for a live run, pipeline.py for files. In each process group,
ranks wait in the first collective that they have not completed. The culprit is a rank that made another call there, or
never made it and waits nowhere itself. A rank that waits in another group is blocked by a rank of that group.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from enum import IntEnum
from functools import cached_property
from itertools import permutations

from msgspec import Struct
from msgspec.structs import replace

from holdfast.diagnose.structured.flight_recorder import CollectiveEntry, FlightDump, GroupPosition, merged

MAX_RANKS_LISTED = 16
"""Ranks that are listed by number."""
_MAX_TEXT = 1000
_VARIABLE_SIZE = ("all_to_all", "alltoall", "gather", "scatter", "send", "recv", "coalesced", "barrier")
"""Operations in which ranks may pass tensors of different sizes; `all_gather` and `reduce_scatter` too."""


class HangKind(IntEnum):
    """What the recorders show; the smaller, the more they show."""

    MISMATCH = 0
    """A rank made another call than the others."""
    BEHIND = 1
    """A rank never entered a collective in which others wait, and waits nowhere itself."""
    CROSSED = 2
    """A rank waits in one group for ranks that wait for it in another."""
    NOT_STARTED = 3
    """All entered the collective, and it has begun on the devices of some of them only."""
    ABSENT = 4
    """A rank of the group left no dump, and all others wait."""
    ALL_WAITING = 5
    """All entered the collective, and none completed it."""


class HangVerdict(Struct, frozen=True, kw_only=True):
    """What the recorders show of one group."""

    kind: HangKind
    rank: int | None
    """The rank that holds up the others; None if that is open."""
    group: str
    seq: int
    """The number of the collective in which ranks wait."""
    op: str
    text: str
    at: float | None
    """Unix seconds of the call in which ranks wait."""
    source: str
    """The dump that shows it."""

    @property
    def culprit(self) -> int | None:
        """The rank to blame; None if all ranks wait alike."""
        return None if self.kind is HangKind.ALL_WAITING else self.rank


class _Group(Struct, frozen=True, kw_only=True, dict=True):
    name: str
    positions: Mapping[int, GroupPosition]
    members: frozenset[int]
    """Its ranks, as far as they are known."""
    members_known: bool

    @cached_property
    def pending(self) -> int:
        """The collective in which ranks wait; 0 if none does."""
        return min((each.pending for each in self.positions.values() if each.pending), default=0)

    @cached_property
    def inside(self) -> list[int]:
        """The ranks that wait in that collective."""
        return sorted(rank for rank, position in self.positions.items() if 0 < position.pending <= self.pending)

    def entered(self, rank: int) -> int:
        """The last collective that a rank entered."""
        return self.positions[rank].enqueued if rank in self.positions else 0


def find_culprits(
    dumps: Sequence[FlightDump], ranks: Collection[int] = (), excused: Collection[int] = ()
) -> list[HangVerdict]:
    """The verdicts that name a rank, all of the kind that shows most; empty if the recorders do not decide."""
    named = [verdict for verdict in hang_verdicts(dumps, ranks, excused) if verdict.culprit is not None]
    return [verdict for verdict in named if verdict.kind is named[0].kind]


def hang_verdicts(
    dumps: Sequence[FlightDump], ranks: Collection[int] = (), excused: Collection[int] = ()
) -> list[HangVerdict]:
    """What the recorders show of each group in which ranks wait, that which shows most first.

    `ranks` are all ranks that run, where they are known: one without a dump may be absent from a group of all others.
    `excused` are ranks that wait for something which no recorder shows.
    """
    by_rank: dict[int, list[FlightDump]] = defaultdict(list)
    for dump in sorted(dumps, key=lambda dump: dump.source):
        by_rank[dump.rank].append(dump)
    known = {rank: merged(own) for rank, own in sorted(by_rank.items())}
    if len(known) < 2:
        return []
    groups = list(_groups(known, frozenset(ranks)))
    waiting = {rank: _waits_in(rank, dump, groups, rank in excused) for rank, dump in known.items()}
    found = [
        verdict
        for number, group in enumerate(groups)
        for verdict in _verdicts_of(group, known, {rank for rank in known if waiting[rank] - {number}})
    ]
    if all(verdict.rank is None or verdict.kind is HangKind.ALL_WAITING for verdict in found):
        found += _crossed(groups, known, all_dumped=known.keys() >= set(ranks))
    return sorted(found, key=lambda verdict: verdict.kind)


def _groups(known: Mapping[int, FlightDump], ranks: frozenset[int]) -> Iterator[_Group]:
    """The process groups of these ranks; groups of the same name with different ranks are separate."""
    for name in sorted({name for dump in known.values() for name in dump.groups if name}):
        positions = {rank: dump.groups[name] for rank, dump in known.items() if name in dump.groups}
        named = {rank: known[rank].members[name] for rank in positions if name in known[rank].members}
        several = set(named.values())
        if len(several) < 2:
            members = frozenset(positions).union(*several)
            everywhere = members >= known.keys()
            members = members | ranks if everywhere else members
            yield _Group(name=name, positions=positions, members=members, members_known=bool(several))
            continue
        for members in sorted(several, key=sorted):
            own = {rank: position for rank, position in positions.items() if named.get(rank) == members}
            yield _Group(name=name, positions=own, members=members, members_known=True)


def _waits_in(rank: int, dump: FlightDump, groups: Sequence[_Group], excused: bool) -> set[int]:
    """The groups in which a rank waits, by number; -1 for what is no collective of a named group."""
    inside = {
        number for number, group in enumerate(groups) if rank in group.positions and group.positions[rank].pending
    }
    unnamed = any(position.pending for name, position in dump.groups.items() if not name)
    return inside | {-1} if unnamed or dump.point_to_point or excused else inside


def _verdicts_of(group: _Group, known: Mapping[int, FlightDump], blocked: set[int]) -> Iterator[HangVerdict]:
    """The verdicts on one group; `blocked` are the ranks that wait elsewhere."""
    if mismatch := _mismatch(group, known):
        yield mismatch
        return
    inside = group.inside
    if not inside:
        return
    behind = sorted(rank for rank in group.members & known.keys() if group.entered(rank) < group.pending)
    absent = sorted(group.members - known.keys())
    waits = _waits(group)
    for rank in [rank for rank in behind if rank not in blocked][:MAX_RANKS_LISTED]:
        last = group.positions[rank].calls.get(group.entered(rank)) if rank in group.positions else None
        text = f"rank {rank} never entered it; its last was {group.entered(rank)}" + (f" ({last})" if last else "")
        yield _verdict(HangKind.BEHIND, rank, group, known, f"{waits}; {text}")
    if behind:
        return
    for rank in absent[:MAX_RANKS_LISTED]:
        yield _verdict(HangKind.ABSENT, rank, group, known, f"{waits}; rank {rank} has left no dump")
    if absent:
        return
    idle = [rank for rank in inside if not _has_started(group.positions[rank])]
    if len(idle) < len(inside):
        for rank in [rank for rank in idle if rank not in blocked][:MAX_RANKS_LISTED]:
            text = f"it has not begun on the device of rank {rank}, as it has on those of others"
            yield _verdict(HangKind.NOT_STARTED, rank, group, known, f"{waits}; {text}")
        if idle:
            return
    text = f"{waits}; every rank of the group has entered it"
    yield _verdict(HangKind.ALL_WAITING, inside[0], group, known, text)


def _has_started(position: GroupPosition) -> bool:
    return position.current is not None and position.current.started


def _mismatch(group: _Group, known: Mapping[int, FlightDump]) -> HangVerdict | None:
    """The first collective of a group that differed between its ranks."""
    calls_by_seq: dict[int, dict[int, CollectiveEntry]] = defaultdict(dict)
    for rank, position in group.positions.items():
        for seq, call in position.calls.items():
            calls_by_seq[seq][rank] = call
    for seq, calls in sorted(calls_by_seq.items()):
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
        text = f"collective {seq} of group {group.name}: {listed}"
        first = replace(_verdict(HangKind.MISMATCH, others[0], group, known, text), rank=odd)
        return replace(first, seq=seq, at=min(call.at for call in calls.values()) or None)
    return None


def _shape(call: CollectiveEntry) -> tuple[str, str]:
    """The fields that must be equal on all ranks."""
    return (call.op, "" if any(word in call.op for word in _VARIABLE_SIZE) else call.sizes)


def _crossed(groups: Sequence[_Group], known: Mapping[int, FlightDump], all_dumped: bool) -> Iterator[HangVerdict]:
    """Ranks that wait in one group for ranks which wait for them in another: the fewer are to blame.

    A recorder shows a group only to ranks that have used it. One with unknown ranks may wait for any rank, unless that
    may be a rank without a dump.
    """
    waits = sorted((group for group in groups if group.inside), key=lambda group: len(group.inside), reverse=True)
    for group, other in permutations(waits, 2):
        elsewhere = set(other.inside) - set(group.inside)
        apart = sorted(rank for rank in elsewhere if rank in group.members and group.entered(rank) < group.pending)
        waited_for = any(rank in other.members and other.entered(rank) < other.pending for rank in group.inside)
        if apart and (waited_for or (all_dumped and not other.members_known)):
            verdict = _verdict(HangKind.CROSSED, apart[0], group, known, f"{_waits(group)}; {_waits(other)}")
            if len(apart) < len(group.inside):
                yield from (replace(verdict, rank=rank) for rank in apart[:MAX_RANKS_LISTED])
            else:
                yield replace(verdict, rank=None)
            return


def _verdict(kind: HangKind, rank: int, group: _Group, known: Mapping[int, FlightDump], text: str) -> HangVerdict:
    inside = group.inside
    call = group.positions[inside[0]].current if inside else None
    return HangVerdict(
        kind=kind,
        rank=rank,
        group=group.name,
        seq=group.pending,
        op=call.op if call else "a collective",
        text=text[:_MAX_TEXT],
        at=call.at or None if call else None,
        source=known[rank if rank in known else inside[0]].source,
    )


def _waits(group: _Group) -> str:
    call = group.positions[group.inside[0]].current
    shown = f" ({call})" if call else ""
    return f"{_list(group.inside)} in collective {group.pending} of group {group.name}{shown}"


def _list(ranks: Sequence[int]) -> str:
    listed = ", ".join(map(str, ranks[:MAX_RANKS_LISTED]))
    more = f" and {len(ranks) - MAX_RANKS_LISTED} more" if len(ranks) > MAX_RANKS_LISTED else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {listed}{more}"
