"""Two replays name one bad node among any number of nodes, and never a healthy one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.watch.dual_phase import BadNodes, Group, find_bad, plan


def digests(groups: tuple[Group, ...], bad: set[int]) -> dict[Group, int | None]:
    """Groups of one size agree unless they have a bad node; then their state is another one, or they do not end."""
    return {
        group: len(group) if bad.isdisjoint(group) else None if min(group) % 2 else 1000 + min(group)
        for group in groups
    }


def found(count: int, bad: set[int]) -> BadNodes:
    replays = plan(range(count))
    return find_bad(replays, digests(replays.first, bad), digests(replays.second, bad))


@given(st.integers(1, 500))
def test_each_node_is_in_one_group_of_each_replay_and_two_groups_share_one_node_at_most(count: int) -> None:
    nodes = range(10, 10 + count)
    replays = plan(nodes)
    for groups in replays:
        assert sorted(node for group in groups for node in group) == [*nodes]
        assert max(map(len, groups)) - min(map(len, groups)) <= 1
    assert all(len({*row} & {*column}) <= 1 for row in replays.first for column in replays.second)


def test_one_bad_node_among_three_or_more_is_found_in_two_replays() -> None:
    for count in (*range(3, 60), 128, 1000, 2049):
        for bad in range(count) if count < 60 else (0, count // 2, count - 1):
            assert found(count, {bad}) == BadNodes(certain=(bad,)), (count, bad)


@given(st.integers(25, 400), st.data())
def test_of_several_bad_nodes_none_is_missed_and_no_healthy_one_is_certain(count: int, data: st.DataObject) -> None:
    bad = data.draw(st.sets(st.integers(0, count - 1), min_size=2, max_size=3))
    answer = found(count, bad)
    assert {*answer.certain} <= bad
    if len(answer.certain) < len(bad):
        assert bad & {*answer.suspects}


def test_two_bad_nodes_among_three_groups_of_a_size_are_suspects() -> None:
    """In both replays the groups of 0 and 107 are of the three larger ones, of which then no majority agrees."""
    assert {0, 107} <= {*found(214, {0, 107}).suspects}


def test_nobody_is_named_where_all_groups_end_alike() -> None:
    assert {found(count, set()) for count in range(1, 50)} == {BadNodes()}
