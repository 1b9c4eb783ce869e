"""Who takes the next step together, decided from what is known."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given
from msgspec.structs import replace

from holdfast.lighthouse.quorum import (
    HEARTBEAT_TIMEOUT_S,
    RESTART_WAIT_S,
    START_WAIT_S,
    Member,
    PendingRequest,
    Quorum,
    QuorumState,
    compute_quorum,
    next_quorum_id,
)

NOW = 100.0
NAMES = ("0:a", "1:b", "2:c")


def member(name: str, *, step: int = 5, shrink_only: bool = False, commit_failures: int = 0) -> Member:
    return Member(replica_id=name, step=step, shrink_only=shrink_only, commit_failures=commit_failures)


def quorum(*names: str) -> Quorum:
    return Quorum(quorum_id=7, members=tuple(map(member, names)), created_at=0.0)


def state_of(
    *asking: Member,
    alive: tuple[str, ...] = (),
    previous: Quorum | None = None,
    least: int = 1,
    expected: int = 0,
    waited_s: float = 0.0,
) -> QuorumState:
    names = {*alive, *(one.replica_id for one in asking)}
    return QuorumState(
        min_replicas=least,
        last_heartbeat=dict.fromkeys(names, NOW),
        requests={one.replica_id: PendingRequest(member=one, since=NOW - waited_s) for one in asking},
        expected_replicas=expected,
        previous=previous,
    )


def ids_of(told: QuorumState) -> tuple[str, ...] | str:
    members = compute_quorum(told, NOW)
    return members if isinstance(members, str) else tuple(one.replica_id for one in members)


A, B, C = map(member, NAMES)


def test_those_of_the_last_quorum_continue_without_waiting_for_a_joiner() -> None:
    assert ids_of(state_of(A, B, alive=("2:c",), previous=quorum("0:a", "1:b"))) == ("0:a", "1:b")


def test_joiner_that_asks_is_taken_in() -> None:
    assert ids_of(state_of(A, B, C, previous=quorum("0:a", "1:b"))) == NAMES


def test_member_that_is_lost_is_not_waited_for() -> None:
    before = quorum(*NAMES)
    assert ids_of(state_of(A, B, alive=("2:c",), previous=before)) == "2:c have yet to ask"
    assert ids_of(state_of(A, B, previous=before)) == ("0:a", "1:b")


def test_member_that_misses_its_heartbeats_is_not_waited_for() -> None:
    told = state_of(A, B, previous=quorum(*NAMES))
    late = replace(told, last_heartbeat={**told.last_heartbeat, "2:c": NOW - HEARTBEAT_TIMEOUT_S})
    assert ids_of(late) == ("0:a", "1:b")


def test_half_of_those_that_live_do_not_continue_alone() -> None:
    assert ids_of(state_of(A, alive=("1:b",))) == "1 of 2 replicas that live ask"


def test_fewer_than_the_least_wait() -> None:
    assert ids_of(state_of(A, previous=quorum("0:a", "1:b"), least=2)) == "1 of at least 2 replicas ask"


def test_one_that_shrinks_lets_no_joiner_in() -> None:
    shrinking = member("0:a", shrink_only=True)
    assert ids_of(state_of(shrinking, B, C, previous=quorum("0:a", "1:b"))) == ("0:a", "1:b")


def test_first_step_waits_for_all_that_were_started() -> None:
    new = member("0:a", step=0)
    assert isinstance(ids_of(state_of(new, expected=2)), str)
    assert ids_of(state_of(new, expected=2, waited_s=START_WAIT_S)) == ("0:a",)


def test_first_that_is_back_where_all_were_lost_waits_for_all_that_were_started() -> None:
    back, before = member("0:b", step=0), quorum("0:a", "1:b")
    assert isinstance(ids_of(state_of(back, expected=2, previous=before)), str)
    assert ids_of(state_of(back, expected=2, previous=before, waited_s=START_WAIT_S)) == ("0:b",)
    assert ids_of(state_of(back, member("1:c", step=0), expected=2, previous=before)) == ("0:b", "1:c")


def test_new_service_waits_a_moment_for_those_at_work() -> None:
    assert isinstance(ids_of(state_of(A, expected=2)), str)
    assert ids_of(state_of(A, expected=2, waited_s=RESTART_WAIT_S)) == ("0:a",)


def test_number_rises_whenever_connections_must_be_made_anew() -> None:
    before = quorum("0:a", "1:b")
    assert next_quorum_id(None, (A,), 9) == 9
    assert next_quorum_id(before, (A, B), 9) == 7
    assert next_quorum_id(before, (A,), 9) == 8
    assert next_quorum_id(before, (A, member("1:b", commit_failures=1)), 9) == 8


@given(
    st.sets(st.sampled_from(NAMES)),
    st.sets(st.sampled_from(NAMES)),
    st.sets(st.sampled_from(NAMES)),
    st.integers(1, 3),
    st.integers(0, 3),
    st.floats(0, 100),
)
def test_quorum_is_of_those_that_ask_and_of_the_least_at_least(
    asking: set[str], alive: set[str], before: set[str], least: int, expected: int, waited_s: float
) -> None:
    previous = quorum(*sorted(before)) if before else None
    told = state_of(
        *map(member, sorted(asking)),
        alive=tuple(alive),
        previous=previous,
        least=least,
        expected=expected,
        waited_s=waited_s,
    )
    names = ids_of(told)
    if not isinstance(names, str):
        assert names == tuple(sorted(asking))
        assert len(names) >= least
        assert (before and before <= asking) or 2 * len(asking) > len(alive | asking)
    elif len(asking) >= least and asking >= alive and waited_s >= START_WAIT_S:
        raise AssertionError(f"all that live ask, and nobody goes on: {names}")
