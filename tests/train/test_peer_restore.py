"""Which copies are gone on from: the same step on every rank, or storage, whichever nodes were lost."""

from __future__ import annotations

from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.train.checkpoint.writer_fence import WriterId
from holdfast.train.ft.backup_placement import assign_backups
from holdfast.train.ft.memory_snapshot import SnapshotId
from holdfast.train.ft.peer_restore import HeldSnapshot, choose_newest


def origin(step: int, attempt: int = 0, world_size: int = 2) -> SnapshotId:
    return SnapshotId(WriterId(run="r", attempt=attempt), step, world_size)


def lying(
    nodes: int, per_node: int, lost: set[int], steps: dict[int, set[int]], world_size: int
) -> list[list[HeldSnapshot]]:
    """What each rank's node has left: its own copies and those it keeps, of each step those of some ranks."""
    backup_ranks = assign_backups(nodes, per_node, ()).backup_ranks
    parts: list[list[HeldSnapshot]] = [[] for _ in range(nodes * per_node)]
    for step, ranks in steps.items():
        for rank in ranks:
            for holder in {rank, backup_ranks[rank]}:
                if holder // per_node not in lost:
                    parts[holder].append(HeldSnapshot(rank, origin(step, world_size=world_size)))
    return parts


@given(
    nodes=st.integers(2, 6),
    per_node=st.integers(1, 3),
    data=st.data(),
)
def test_whichever_nodes_are_lost_all_ranks_get_one_step_or_none_gets_any(
    nodes: int, per_node: int, data: st.DataObject
) -> None:
    world_size = nodes * per_node
    lost = data.draw(st.sets(st.integers(0, nodes - 1)))
    under_way = data.draw(st.sets(st.integers(0, world_size - 1)))
    parts = lying(nodes, per_node, lost, {7: set(range(world_size)), 8: under_way}, world_size)
    choice = choose_newest(parts)
    backup_ranks = assign_backups(nodes, per_node, ()).backup_ranks
    survives = all(not {rank // per_node, backup_ranks[rank] // per_node} <= lost for rank in range(world_size))
    assert (choice is not None) == survives
    if choice is not None:
        assert choice.snapshot_id.step == (8 if len(under_way) == world_size else 7)
        for rank, holder in enumerate(choice.holders):
            assert HeldSnapshot(rank, choice.snapshot_id) in parts[holder]
            assert holder == rank or rank // per_node in lost


def test_single_lost_node_never_costs_more_than_the_copy_under_way() -> None:
    for nodes in range(2, 7):
        for lost in range(nodes):
            choice = choose_newest(lying(nodes, 2, {lost}, {3: set(range(2 * nodes)), 4: {0}}, 2 * nodes))
            assert choice is not None
            assert choice.snapshot_id.step == 3


def test_copies_of_another_number_of_ranks_are_not_gone_on_from() -> None:
    of_three = origin(3, world_size=3)
    assert choose_newest([[HeldSnapshot(0, of_three), HeldSnapshot(2, of_three)], [HeldSnapshot(1, of_three)]]) is None
    assert choose_newest([[HeldSnapshot(0, origin(3))], [HeldSnapshot(1, origin(4))]]) is None
    assert choose_newest([[], []]) is None


def test_of_one_step_the_later_attempt_counts_and_the_newer_step_before_that() -> None:
    earlier, later = origin(5, attempt=0), origin(4, attempt=1)
    both = [[HeldSnapshot(rank, each) for each in (earlier, later, origin(5, attempt=2))] for rank in (0, 1)]
    choice = choose_newest(both)
    assert choice is not None
    assert choice.snapshot_id == origin(5, attempt=2)


groups_of = st.integers(2, 5).flatmap(
    lambda nodes: st.tuples(st.just(nodes), st.sets(st.frozensets(st.integers(0, nodes - 1), min_size=2), max_size=4))
)


@given(groups_of)
def test_copies_lie_on_another_node_outside_of_its_groups_wherever_all_can(
    layout: tuple[int, set[frozenset[int]]],
) -> None:
    nodes, groups = layout
    placed = assign_backups(nodes, 1, groups)
    assert sorted(placed.backup_ranks) == list(range(nodes))
    assert all(backup != node for node, backup in enumerate(placed.backup_ranks))
    near = [
        {other for group in groups if node in group and len(group) < nodes for other in group} for node in range(nodes)
    ]
    assert placed.within_group == tuple(node for node, backup in enumerate(placed.backup_ranks) if backup in near[node])
    apart = (
        order
        for order in permutations(range(nodes))
        if all(backup != node and backup not in near[node] for node, backup in enumerate(order))
    )
    assert (placed.within_group == ()) == (next(apart, None) is not None)


def test_grid_of_groups_is_kept_along_its_diagonal() -> None:
    rows, columns = [{0, 1}, {2, 3}], [{0, 2}, {1, 3}]
    placed = assign_backups(4, 1, map(frozenset, (*rows, *columns)))
    assert placed.backup_ranks == (3, 2, 1, 0)
    assert placed.within_group == ()


def test_ranks_of_a_node_have_theirs_kept_by_their_like_on_another() -> None:
    assert assign_backups(2, 2, [frozenset(range(4))]).backup_ranks == (2, 3, 0, 1)
    assert assign_backups(1, 3, ()).backup_ranks == (0, 1, 2)
    assert assign_backups(3, 1, ()).primary_of(0) == 2
