"""Groups the stacks of all ranks of a hang, and names the smallest parallel group in which it began.

After ByteRobust (SOSP 2025), section 5: equal stacks form a group, the largest counts as healthy, the others are
outliers. In a hang most outliers only wait for others, directly or through a chain, and a chain crosses the parallel
groups: a rank that stops in one layer holds up its tensor-parallel group, its pipeline, and in the end everyone. So of
the outliers that need not be waiting for another rank, the one for which most ranks wait is the origin. These are:

- a group whose ranks have all entered one call: its communication is broken;
- a rank that waits for no other;
- two stages of a pipeline between which a message is lost: the sender waits for the receiver, or has gone on;
- a rank whose stack could not be read.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice

from msgspec import Struct
from msgspec.structs import replace

from holdfast.diagnose.rank_stack import Stack
from holdfast.diagnose.wait_axes import Wait, waits_for
from holdfast.events import EqualStacks, Ranges, StacksCompared, to_ranges
from holdfast.findings import replica_suffix
from holdfast.job.parallel_layout import Axis, ParallelGroup, ParallelLayout, format_spans

MAX_GROUPS_SHOWN = 8
MAX_FRAMES_SHOWN = 3
MAX_CANDIDATES = 64
"""Sets of ranks that are examined, each in about 20 ms for 16,384 ranks."""
MAX_BUSY_SHARE = 0.5
"""Above this share of outliers that wait for no other, ranks compute rather than hang, and none of them stands out."""

_AXES = {Wait.TP: Axis.TP, Wait.CP: Axis.CP, Wait.EP: Axis.EP, Wait.DP: Axis.DP}
_STAGES = {Wait.PREVIOUS_STAGE: (-1,), Wait.NEXT_STAGE: (1,), Wait.OTHER_STAGE: (-1, 1)}


class StackGroup(Struct, frozen=True, kw_only=True):
    """Ranks with the same stack."""

    stack: Stack
    ranks: tuple[int, ...]
    waits_for: Wait


class StackVerdict(Struct, frozen=True, kw_only=True):
    """What the stacks of all ranks show together."""

    groups: tuple[StackGroup, ...]
    """The largest first, which counts as healthy."""
    missing: tuple[int, ...] = ()
    """Ranks whose stack could not be read."""
    suspects: tuple[int, ...] = ()
    """The outliers that no other rank explains; empty if none stands out."""
    origin: ParallelGroup | None = None
    """The smallest parallel group that covers the suspects; None if there are none, or the layout is unknown."""
    affected: ParallelGroup | None = None
    """The smallest group that covers all outliers."""

    @property
    def outliers(self) -> tuple[int, ...]:
        """Ranks whose stack is not the most frequent."""
        return tuple(sorted(rank for group in self.groups[1:] for rank in group.ranks))


def group_stacks(
    stacks: Mapping[int, Stack], layout: ParallelLayout | None = None, *, world_size: int | None = None
) -> StackVerdict:
    """Compare one stack per rank; an empty one is a stack that could not be read."""
    by_stack: dict[Stack, list[int]] = defaultdict(list)
    for rank in sorted(stacks):
        by_stack[stacks[rank]].append(rank)
    absent = {*by_stack.pop((), ()), *(set(range(world_size or 0)) - stacks.keys())}
    missing = tuple(sorted(absent))
    groups = tuple(
        StackGroup(stack=stack, ranks=tuple(ranks), waits_for=waits_for(stack))
        for stack, ranks in sorted(by_stack.items(), key=lambda each: _order(*each))
    )
    if len(groups) < 2:
        return StackVerdict(groups=groups, missing=missing)
    if layout is None:
        busy = [rank for group in groups[1:] if group.waits_for is Wait.NONE for rank in group.ranks]
        few = len(busy) <= MAX_BUSY_SHARE * sum(len(group.ranks) for group in groups)
        return StackVerdict(groups=groups, missing=missing, suspects=tuple(sorted(busy)) if few else ())
    if groups[-1].ranks[0] >= layout.world_size or max(stacks) >= layout.world_size:
        return group_stacks(stacks, world_size=world_size)  # the program does not run as its job says
    suspects = _Origin(groups, absent, layout).suspects()
    verdict = StackVerdict(groups=groups, missing=missing, suspects=tuple(sorted(suspects)))
    return replace(
        verdict,
        origin=layout.smallest_group(suspects) if suspects else None,
        affected=layout.smallest_group({*verdict.outliers, *suspects}),
    )


def _order(stack: Stack, ranks: Sequence[int]) -> tuple[int, bool, int]:
    """The largest group first; of equally many ranks, those that wait for others are healthy."""
    return -len(ranks), waits_for(stack) is Wait.NONE, ranks[0]


class _Origin:
    """Finds the outliers for which the others wait."""

    def __init__(self, groups: Sequence[StackGroup], missing: Collection[int], layout: ParallelLayout) -> None:
        self._groups = groups
        self._missing = missing
        self._layout = layout
        self._group_of = {rank: number for number, group in enumerate(groups) for rank in group.ranks}
        self._wait = [group.waits_for for group in groups]

    def suspects(self) -> frozenset[int]:
        """The candidate for which most ranks wait; of several, the first kind."""
        found, most = frozenset[int](), 0
        for candidate, axis in islice(self._candidates(), MAX_CANDIDATES):
            count = len(self._waiting_for(candidate, axis))
            if count > most and (count > 1 or len(candidate) > 1):
                found, most = candidate, count
        return found or self._unexplained()

    def _candidates(self) -> Iterator[tuple[frozenset[int], Axis | None]]:
        """Sets of ranks in which the hang may have begun, the surest kind first; with the axis of their call."""
        yield from self._whole_groups(unread=())
        yield from ((frozenset({rank}), None) for rank in self._busy)
        yield from ((pair, None) for pair in self._lost_messages((Wait.PREVIOUS_STAGE, Wait.NEXT_STAGE)))
        yield from self._whole_groups(unread=self._missing)
        yield from ((group, None) for group in self._unnamed_groups())
        yield from ((frozenset({rank}), None) for rank in sorted(self._missing))
        yield from ((pair, None) for pair in self._lost_messages((Wait.OTHER_STAGE,)))

    @cached_property
    def _busy(self) -> list[int]:
        """Outliers that wait for no other."""
        return [rank for group in self._groups[1:] if group.waits_for is Wait.NONE for rank in group.ranks]

    def _whole_groups(self, unread: Collection[int]) -> Iterator[tuple[frozenset[int], Axis]]:
        """Parallel groups whose ranks have all entered the call in which they wait; `unread` ones may have."""
        for group in self._groups:
            if (axis := _AXES.get(group.waits_for)) is None:
                continue
            entered = Counter(self._layout.first(axis, rank) for rank in group.ranks)
            may_have = Counter(self._layout.first(axis, rank) for rank in unread)
            for first, count in entered.items():
                if count + may_have[first] == self._layout.size(axis) > 1 and count > may_have[first]:
                    yield frozenset(self._layout.group(axis, first)), axis

    def _unnamed_groups(self) -> Iterator[frozenset[int]]:
        """Groups of outliers in calls that show no axis, if they fill a parallel group; the smallest first."""
        for group in reversed(self._groups[1:]):
            if group.waits_for is Wait.UNKNOWN_GROUP:
                whole = self._layout.smallest_group(group.ranks)
                if len(whole.axes) == 1 and whole.ranks == group.ranks:
                    yield frozenset(group.ranks)

    def _lost_messages(self, waits: Collection[Wait]) -> Iterator[frozenset[int]]:
        """Each rank that waits for a message of another stage, with the rank there, which waits too or has gone on."""
        for number, group in enumerate(self._groups):
            for rank in group.ranks if self._wait[number] in waits else ():
                for other in self._awaited_stages(rank):
                    if rank in self._awaited_stages(other) or self._is_past_pipeline(other):
                        yield frozenset({rank, other})

    def _is_past_pipeline(self, rank: int) -> bool:
        """Whether a rank may have sent all messages of its step: it waits with its gradients, or with most ranks."""
        number = self._group_of.get(rank)
        if number is None:
            return False
        return self._wait[number] in (Wait.DP, Wait.ALL) or (number == 0 and self._wait[number] is Wait.UNKNOWN_GROUP)

    def _awaited_stages(self, rank: int) -> list[int]:
        """The ranks of neighbouring stages for which a rank may wait."""
        number = self._group_of.get(rank)
        offsets = () if number is None else _STAGES.get(self._wait[number], ())
        return [
            other
            for offset in offsets
            if 0 <= (other := rank + offset * self._layout.stage_size) < self._layout.world_size
        ]

    def _waiting_for(self, candidate: frozenset[int], call: Axis | None) -> set[int]:
        """The candidate, and all ranks that wait for it, directly or through others.

        `call` is the axis along which its ranks without a stack wait; None if they need not wait.
        """
        found, queue = set(candidate), [*candidate]
        seen: set[tuple[Axis, int]] = set()
        size = self._layout.stage_size
        while queue:
            rank = queue.pop()
            number = self._group_of.get(rank)
            if number is not None:
                own = _AXES.get(self._wait[number])
            elif rank in candidate and call is Axis.DP:
                continue  # with its gradients complete it has passed all other calls of its step
            else:
                own = call if rank in candidate else None
            late: list[int] = []
            for axis in self._axes:
                if axis is own:
                    continue  # a rank that has entered a call does not hold up the others in it
                key = (axis, self._layout.first(axis, rank))
                if key not in seen:
                    seen.add(key)
                    late += self._waiters.get(key, ())
            late += (other for other in (rank - size, rank + size) if rank in self._awaited_stages(other))
            queue += (fresh := set(late) - found)
            found |= fresh
        return found

    @cached_property
    def _axes(self) -> tuple[Axis, ...]:
        return tuple(axis for axis in _AXES.values() if self._layout.size(axis) > 1)

    @cached_property
    def _waiters(self) -> dict[tuple[Axis, int], list[int]]:
        """The ranks of each parallel group that wait in it, or may; by axis and first rank."""
        found: dict[tuple[Axis, int], list[int]] = defaultdict(list)
        for number, group in enumerate(self._groups):
            axis = _AXES.get(group.waits_for)
            any_axis = self._axes if number and group.waits_for is Wait.UNKNOWN_GROUP else ()
            for each in any_axis if axis is None else (axis,):
                for rank in group.ranks:
                    found[each, self._layout.first(each, rank)].append(rank)
        return found

    def _unexplained(self) -> frozenset[int]:
        """Where no rank waits for a candidate: the ranks that wait for no other, if they are few."""
        return frozenset(self._busy if len(self._busy) <= MAX_BUSY_SHARE * len(self._group_of) else ())


def to_event(
    verdict: StackVerdict,
    *,
    at: float,
    replica: int,
    attempt: int,
    nodes: Iterable[int],
    rounds: int = 1,
    times: int = 0,
) -> StacksCompared:
    """The verdict as the run's log keeps it; `nodes` are those of the suspects."""
    shown = verdict.groups[:MAX_GROUPS_SHOWN]
    wider = verdict.affected is not None and verdict.affected != verdict.origin
    return StacksCompared(
        at=at,
        replica=replica,
        attempt=attempt,
        groups=tuple(EqualStacks(ranks=to_ranges(group.ranks), frames=group.stack) for group in shown),
        more_groups=len(verdict.groups) - len(shown),
        missing=to_ranges(verdict.missing),
        suspects=to_ranges(verdict.suspects),
        nodes=to_ranges(nodes),
        origin=verdict.origin.name if verdict.origin else "",
        affected=verdict.affected.name if verdict.affected and wider else "",
        rounds=rounds,
        times=times,
    )


def describe_stacks(compared: StacksCompared) -> tuple[str, ...]:
    """Lines of evidence: the groups of stacks, and where the hang began."""
    suffix = replica_suffix(compared.replica)
    lines = [
        f"stacks: {describe_group(group.ranks, group.frames[:MAX_FRAMES_SHOWN], suffix)}" for group in compared.groups
    ]
    lines += [f"stacks: {compared.more_groups} more kinds"] * bool(compared.more_groups)
    if compared.missing:
        lines.append(f"stacks: none of rank {format_spans(compared.missing)}{replica_suffix(compared.replica)}")
    return (*lines, *(f"stacks: {line}" for line in describe_origin(compared)))


def describe_origin(compared: StacksCompared) -> tuple[str, ...]:
    """Where the hang began, and which group has all ranks that differ; empty if no rank stands out.

    Of several dumps, in how many the others wait for the suspects.
    """
    if not compared.suspects:
        return (f"no rank stands out in {compared.rounds} dumps",) if compared.rounds > 1 else ()
    origin = (compared.origin or f"rank {format_spans(compared.suspects)}") + replica_suffix(compared.replica)
    on = f" on node {format_spans(compared.nodes)}" if compared.nodes else ""
    if compared.rounds > 1:
        return (f"in {compared.times} of {compared.rounds} dumps the others wait for {origin}{on}",)
    within = (f"all that differ are in {compared.affected}",) if compared.affected else ()
    return (f"the others wait for {origin}{on}", *within)


def describe_group(ranks: Ranges, frames: Stack, suffix: str) -> str:
    """`2 ranks (0, 3) in all_reduce (distributed_c10d.py) < step (train.py:12)`."""
    count = sum(last - first + 1 for first, last in ranks)
    who = f"rank {format_spans(ranks)}" if count == 1 else f"{count} ranks ({format_spans(ranks)})"
    return f"{who}{suffix} in {' < '.join(frames)}"
