"""Which copies are gone on from: the same step on every rank, or storage, whichever nodes were lost."""

from __future__ import annotations

from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.train.handover import Origin
from holdfast.train.placement import place
from holdfast.train.recall import Kept, chosen
from holdfast.train.tenure import Writer


def origin(step: int, attempt: int = 0, world_size: int = 2) -> Origin:
    return Origin(Writer(run="r", attempt=attempt), step, world_size)


def lying(nodes: int, per_node: int, lost: set[int], steps: dict[int, set[int]], world_size: int) -> list[list[Kept]]:
    """What each rank's node has left: its own copies and those it keeps, of each step those of some ranks."""
    keepers = place(nodes, per_node, ()).keepers
    parts: list[list[Kept]] = [[] for _ in range(nodes * per_node)]
    for step, ranks in steps.items():
        for rank in ranks:
            for holder in {rank, keepers[rank]}:
                if holder // per_node not in lost:
                    parts[holder].append(Kept(rank, origin(step, world_size=world_size)))
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
    choice = chosen(parts)
    keepers = place(nodes, per_node, ()).keepers
    survives = all(not {rank // per_node, keepers[rank] // per_node} <= lost for rank in range(world_size))
    assert (choice is not None) == survives
    if choice is not None:
        assert choice.origin.step == (8 if len(under_way) == world_size else 7)
        for rank, holder in enumerate(choice.holders):
            assert Kept(rank, choice.origin) in parts[holder]
            assert holder == rank or rank // per_node in lost


def test_single_lost_node_never_costs_more_than_the_copy_under_way() -> None:
    for nodes in range(2, 7):
        for lost in range(nodes):
            choice = chosen(lying(nodes, 2, {lost}, {3: set(range(2 * nodes)), 4: {0}}, 2 * nodes))
            assert choice is not None
            assert choice.origin.step == 3


def test_copies_of_another_number_of_ranks_are_not_gone_on_from() -> None:
    of_three = origin(3, world_size=3)
    assert chosen([[Kept(0, of_three), Kept(2, of_three)], [Kept(1, of_three)]]) is None
    assert chosen([[Kept(0, origin(3))], [Kept(1, origin(4))]]) is None
    assert chosen([[], []]) is None


def test_of_one_step_the_later_attempt_counts_and_the_newer_step_before_that() -> None:
    earlier, later = origin(5, attempt=0), origin(4, attempt=1)
    both = [[Kept(rank, each) for each in (earlier, later, origin(5, attempt=2))] for rank in (0, 1)]
    choice = chosen(both)
    assert choice is not None
    assert choice.origin == origin(5, attempt=2)


groups_of = st.integers(2, 5).flatmap(
    lambda nodes: st.tuples(st.just(nodes), st.sets(st.frozensets(st.integers(0, nodes - 1), min_size=2), max_size=4))
)


@given(groups_of)
def test_copies_lie_on_another_node_outside_of_its_groups_wherever_all_can(
    layout: tuple[int, set[frozenset[int]]],
) -> None:
    nodes, groups = layout
    placed = place(nodes, 1, groups)
    assert sorted(placed.keepers) == list(range(nodes))
    assert all(keeper != node for node, keeper in enumerate(placed.keepers))
    near = [
        {other for group in groups if node in group and len(group) < nodes for other in group} for node in range(nodes)
    ]
    assert placed.within == tuple(node for node, keeper in enumerate(placed.keepers) if keeper in near[node])
    apart = (
        order
        for order in permutations(range(nodes))
        if all(keeper != node and keeper not in near[node] for node, keeper in enumerate(order))
    )
    assert (placed.within == ()) == (next(apart, None) is not None)


def test_grid_of_groups_is_kept_along_its_diagonal() -> None:
    rows, columns = [{0, 1}, {2, 3}], [{0, 2}, {1, 3}]
    placed = place(4, 1, map(frozenset, (*rows, *columns)))
    assert placed.keepers == (3, 2, 1, 0)
    assert placed.within == ()


def test_ranks_of_a_node_have_theirs_kept_by_their_like_on_another() -> None:
    assert place(2, 2, [frozenset(range(4))]).keepers == (2, 3, 0, 1)
    assert place(1, 3, ()).keepers == (0, 1, 2)
    assert place(3, 1, ()).ward(0) == 2
