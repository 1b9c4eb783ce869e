"""Sets of nodes and ranks behave as Python's sets."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from holdfast.control import machine
from holdfast.control.node_set import NodeSet, RankSet

numbers = st.sets(st.integers(0, 300))


@given(numbers, numbers, st.integers(0, 300))
def test_sets_are_those_of_python(one: set[int], other: set[int], number: int) -> None:
    ours, theirs = NodeSet.of(one), NodeSet.of(other)
    assert list(ours) == sorted(one)
    assert (len(ours), bool(ours), number in ours) == (len(one), bool(one), number in one)
    assert set(ours | theirs) == one | other
    assert set(ours & theirs) == one & other
    assert set(ours - theirs) == one - other
    assert (ours <= theirs) == (one <= other)
    assert set(ours.with_member(number)) == one | {number}
    assert set(ours.with_member(number, False)) == one - {number}


def test_span_is_consecutive_ranks() -> None:
    assert list(RankSet.span(5, 3)) == [5, 6, 7]


def test_event_is_of_the_run_of_a_node_or_of_a_replica() -> None:
    tables = (machine.RUN_HANDLERS, machine.NODE_HANDLERS, machine.REPLICA_HANDLERS)
    assert len(set().union(*tables)) == sum(map(len, tables))
