"""Who holds up the others by flight recorders, from whole dumps and from what an event keeps of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import pytest
from msgspec.structs import replace

from holdfast.diagnose.flight_verdict import HangKind, find_culprits, hang_verdicts
from holdfast.diagnose.structured.flight_recorder import CollectiveEntry, FlightDump, GroupPosition, merged
from holdfast.diagnose.structured.flight_summary import MAX_CALLS, MAX_GROUPS, from_summary, summarise
from holdfast.events.encoding import encode

WORLD = frozenset(range(4))


def group(
    enqueued: int,
    *,
    pending: int = 0,
    ops: Mapping[int, str] | None = None,
    started: bool = False,
    completed: int | None = None,
) -> GroupPosition:
    """A position with the calls up to `enqueued`, all-reduces unless `ops` says otherwise."""
    calls = {
        seq: CollectiveEntry(
            seq=seq,
            op=(ops or {}).get(seq, "all_reduce"),
            sizes="[[4]] Float",
            done=not pending or seq < pending,
            started=started if pending and seq >= pending else False,
        )
        for seq in range(max(1, enqueued - 9), enqueued + 1)
    }
    done = (pending - 1 if pending else enqueued) if completed is None else completed
    return GroupPosition(calls=calls, enqueued=enqueued, completed=done, pending=pending)


def dump(
    rank: int,
    groups: Mapping[str, GroupPosition],
    members: Mapping[str, frozenset[int]] | None = None,
    point_to_point: tuple[str, ...] = (),
) -> FlightDump:
    return FlightDump(
        source=f"dump-{rank}", rank=rank, members=members or {}, groups=groups, point_to_point=point_to_point
    )


@dataclass(frozen=True, kw_only=True)
class Hang:
    dumps: Sequence[FlightDump]
    verdict: tuple[HangKind, int | None] | None
    """Kind and rank; None if the recorders do not decide."""
    excused: tuple[int, ...] = ()


INSIDE, FREE = group(9, pending=9), group(8)

HANGS = {
    "a rank that never entered": Hang(
        dumps=[dump(rank, {"0": FREE if rank == 2 else INSIDE}) for rank in WORLD], verdict=(HangKind.BEHIND, 2)
    ),
    # NCCL's calls return once they are enqueued: how far a host has come says nothing by itself.
    "hosts that are ahead of the GPUs by different numbers of calls": Hang(
        dumps=[
            dump(0, {"0": group(40, pending=17)}),
            dump(1, {"0": group(16)}),
            dump(2, {"0": group(38, pending=17)}),
            dump(3, {"0": group(17, pending=17)}),
        ],
        verdict=(HangKind.BEHIND, 1),
    ),
    "a collective that has not begun on one GPU": Hang(
        dumps=[dump(rank, {"0": group(22 + rank, pending=21, started=rank != 3)}) for rank in WORLD],
        verdict=(HangKind.NOT_STARTED, 3),
    ),
    "a collective that runs on all GPUs": Hang(
        dumps=[dump(rank, {"0": group(21, pending=21, started=True)}) for rank in WORLD], verdict=None
    ),
    "another call": Hang(
        dumps=[dump(rank, {"0": group(9, pending=9, ops={9: "broadcast"} if rank == 1 else {})}) for rank in WORLD],
        verdict=(HangKind.MISMATCH, 1),
    ),
    # The root of a broadcast does not wait for its receivers.
    "another call, from which the rank went on to the next": Hang(
        dumps=[
            dump(rank, {"0": group(10, pending=10, ops={9: "broadcast"}) if rank == 1 else INSIDE}) for rank in WORLD
        ],
        verdict=(HangKind.MISMATCH, 1),
    ),
    "two ranks against two": Hang(
        dumps=[dump(rank, {"0": group(9, pending=9, ops={9: "barrier"} if rank > 1 else {})}) for rank in WORLD],
        verdict=None,
    ),
    "a rank alone in a group that the recorders of others do not show": Hang(
        dumps=[dump(rank, {"0": FREE, "1": group(1, pending=1)} if rank == 3 else {"0": INSIDE}) for rank in WORLD],
        verdict=(HangKind.CROSSED, 3),
    ),
    "a rank that waits in a group of two for one that hangs": Hang(
        dumps=[
            dump(0, {"dp": group(5, pending=5)}, {"dp": frozenset({0, 2})}),
            dump(1, {"dp2": group(4), "tp": group(8)}, {"tp": frozenset({1, 2}), "dp2": frozenset({1, 3})}),
            dump(2, {"dp": group(4), "tp": group(9, pending=9)}, {"dp": frozenset({0, 2}), "tp": frozenset({1, 2})}),
            dump(3, {"dp2": group(5, pending=5)}, {"dp2": frozenset({1, 3})}),
        ],
        verdict=(HangKind.BEHIND, 1),
    ),
    # torch's split_group gives the groups that it makes one name.
    "groups of one name with other ranks": Hang(
        dumps=[
            dump(0, {"1": group(7, pending=7)}, {"1": frozenset({0, 1})}),
            dump(1, {"1": group(6)}, {"1": frozenset({0, 1})}),
            dump(2, {"1": group(3)}, {"1": frozenset({2, 3})}),
            dump(3, {"1": group(3)}, {"1": frozenset({2, 3})}),
        ],
        verdict=(HangKind.BEHIND, 1),
    ),
    "a rank without a dump": Hang(
        dumps=[dump(rank, {"0": INSIDE}) for rank in (0, 1, 3)], verdict=(HangKind.ABSENT, 2)
    ),
    "a rank that waits for a message": Hang(
        dumps=[
            dump(0, {"0": INSIDE}),
            dump(1, {"0": FREE}, point_to_point=("recv 1<-2",)),
            dump(2, {"0": FREE}),
            dump(3, {"0": INSIDE}),
        ],
        verdict=(HangKind.BEHIND, 2),
    ),
    "a rank that waits for other replicas, in a group without a name": Hang(
        dumps=[dump(rank, {"0": FREE, "": group(4, pending=4)} if rank == 0 else {"0": INSIDE}) for rank in WORLD],
        verdict=None,
    ),
    "a rank whose stack shows that it waits for other replicas": Hang(
        dumps=[dump(rank, {"0": FREE if rank == 0 else INSIDE}) for rank in WORLD], verdict=None, excused=(0,)
    ),
    "ranks that wait for nothing": Hang(dumps=[dump(rank, {"0": FREE}) for rank in WORLD], verdict=None),
    "a single rank": Hang(dumps=[dump(0, {"0": INSIDE})], verdict=None),
}


def whole(dump: FlightDump) -> FlightDump:
    return dump


def as_reported(dump: FlightDump) -> FlightDump:
    return from_summary(dump.rank, summarise(dump), dump.source)


@pytest.mark.parametrize("given", [whole, as_reported])
@pytest.mark.parametrize("hang", HANGS.values(), ids=HANGS)
def test_culprit_by_what_each_rank_entered(hang: Hang, given: Callable[[FlightDump], FlightDump]) -> None:
    found = find_culprits([given(each) for each in hang.dumps], WORLD, hang.excused)
    assert {(verdict.kind, verdict.rank) for verdict in found} == ({hang.verdict} if hang.verdict else set())


def test_gloo_that_completed_calls_out_of_order_waits_in_the_first_that_is_open() -> None:
    behind = dump(1, {"0": group(9)})
    waits = [dump(rank, {"0": group(11, pending=10, completed=11)}) for rank in (0, 2)]
    (verdict,) = find_culprits([behind, *waits])
    assert (verdict.rank, verdict.seq) == (1, 10)
    assert verdict.text.startswith("ranks 0, 2 in collective 10 of group 0 (all_reduce [[4]] Float); rank 1 never")


def test_group_with_backends_for_cpu_and_gpu_has_two_positions() -> None:
    both = merged([dump(0, {"0": INSIDE}), dump(0, {"0": FREE, "1": FREE})])
    assert both.groups == {"0": INSIDE, "0#1": FREE, "1": FREE}


def test_report_is_bounded_whatever_the_recorder_holds() -> None:
    name = "a very long name of a group " * 20
    groups = {f"{number} {name}": group(500 + number, pending=1 if number > 90 else 0) for number in range(100)}
    members = {each: frozenset(range(0, 20_000, 2)) for each in groups}
    report = summarise(dump(0, groups, members, point_to_point=("send 0->1",) * 50))
    assert len(report) == MAX_GROUPS
    assert all(len(each.calls) <= MAX_CALLS for each in report)
    assert len(encode(report)) < 8192
    assert all(each.pending or each.point_to_point for each in report[:10])


def test_absurd_ranks_of_a_report_are_not_expanded() -> None:
    (report,) = summarise(dump(0, {"0": FREE}, {"0": frozenset({0, 1})}))
    assert from_summary(0, [replace(report, ranks=((0, 2**50),))]).members == {}


def test_ten_thousand_ranks_are_judged_at_once() -> None:
    world = frozenset(range(10_000))
    (waits,), (free,) = (summarise(dump(0, {"0": position}, {"0": world})) for position in (INSIDE, FREE))
    dumps = [from_summary(rank, [free if rank == 4711 else waits]) for rank in sorted(world)]
    assert [verdict.rank for verdict in hang_verdicts(dumps, world)] == [4711]
