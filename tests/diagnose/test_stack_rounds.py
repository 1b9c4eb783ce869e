"""Which ranks several dumps of a slow job name."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.diagnose.rank_stack import Stack
from holdfast.diagnose.stack_groups import describe_stacks, group_stacks, to_event
from holdfast.diagnose.stack_rounds import ROUNDS, RoundsVerdict, judge_rounds
from holdfast.job.parallel_layout import ParallelLayout

SYNC: Stack = ("all_reduce (distributed_c10d.py)", "step (train.py:9)")
READS: Stack = ("read (data.py:7)", "step (train.py:3)")
COMPUTES: Stack = ("forward (layers.py)", "step (train.py:4)")


def judged(rounds: list[dict[int, Stack]], layout: ParallelLayout | None = None) -> RoundsVerdict:
    return judge_rounds([group_stacks(each, layout) for each in rounds], layout)


@settings(max_examples=20, deadline=None)
@given(
    ranks=st.integers(4, 16),
    slow=st.data(),
    times=st.integers(3, ROUNDS),
)
def test_rank_for_which_all_others_wait_in_most_dumps_is_named(ranks: int, slow: st.DataObject, times: int) -> None:
    rank = slow.draw(st.integers(0, ranks - 1))
    waiting: dict[int, Stack] = {**dict.fromkeys(range(ranks), SYNC), rank: READS}
    computing: dict[int, Stack] = dict.fromkeys(range(ranks), COMPUTES)
    rounds = slow.draw(st.permutations([waiting] * times + [computing] * (ROUNDS - times)))
    found = judged(rounds)
    assert (found.verdict.suspects, found.times, found.rounds) == ((rank,), times, ROUNDS)
    assert rank in next(group.ranks for group in found.verdict.groups if group.stack == READS)


@settings(max_examples=20, deadline=None)
@given(ranks=st.integers(2, 16), times=st.integers(0, 2))
def test_rank_that_is_last_in_fewer_dumps_is_not_named(ranks: int, times: int) -> None:
    waiting: dict[int, Stack] = {**dict.fromkeys(range(ranks), SYNC), 1: READS}
    computing: dict[int, Stack] = dict.fromkeys(range(ranks), COMPUTES)
    assert judged([waiting] * times + [computing] * (ROUNDS - times)).verdict.suspects == ()


def test_one_of_two_ranks_must_be_last_in_four_dumps() -> None:
    waiting: dict[int, Stack] = {0: READS, 1: SYNC}
    computing: dict[int, Stack] = {0: COMPUTES, 1: COMPUTES}
    assert judged([waiting] * 3 + [computing] * 2).verdict.suspects == ()
    assert judged([waiting] * 4 + [computing]).verdict.suspects == (0,)


def test_rank_that_differs_while_the_others_compute_is_not_named() -> None:
    apart: dict[int, Stack] = {**dict.fromkeys(range(8), COMPUTES), 1: READS}
    assert judged([apart] * ROUNDS).verdict.suspects == ()


def test_group_that_stands_out_in_most_dumps_is_named_as_the_smallest_that_covers_it() -> None:
    layout = ParallelLayout(tp=2, dp=4)
    in_group: dict[int, Stack] = dict.fromkeys(range(8), SYNC)
    slow: dict[int, Stack] = {**in_group, 4: READS, 5: READS}
    found = judged([slow, in_group, slow, slow, in_group])
    assert found.verdict.suspects == (4, 5)
    whole = judge_rounds([group_stacks(each) for each in (slow, in_group, slow, slow, in_group)], layout)
    assert whole.verdict.origin is not None
    assert whole.verdict.origin.name == "the tp group of ranks 4-5"
    event = to_event(whole.verdict, at=1.0, replica=1, attempt=0, nodes=(2,), rounds=whole.rounds, times=whole.times)
    assert describe_stacks(event) == (
        "stacks: 6 ranks (0-3, 6-7) of replica 1 in all_reduce (distributed_c10d.py) < step (train.py:9)",
        "stacks: 2 ranks (4-5) of replica 1 in read (data.py:7) < step (train.py:3)",
        "stacks: in 3 of 5 dumps the others wait for the tp group of ranks 4-5 of replica 1 on node 2",
    )


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("share", [0.3, 0.5, 0.7])
def test_healthy_ranks_are_rarely_named(ranks: int, share: float) -> None:
    """Each dump shows some ranks in a wait, or all but one that happens to be last."""
    dice = random.Random(f"{ranks} {share}")
    named = 0
    for _ in range(150):
        rounds: list[dict[int, Stack]] = []
        for _ in range(ROUNDS):
            last = dice.randrange(ranks)
            apart = dice.random() < 0.5
            in_step = {rank: rank != last if apart else dice.random() < share for rank in range(ranks)}
            rounds.append({rank: SYNC if waits else COMPUTES for rank, waits in in_step.items()})
        named += bool(judged(rounds).verdict.suspects)
    assert named <= 0.1 * 150
