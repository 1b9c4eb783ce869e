"""Where a hang began, by the stacks of all ranks."""

from __future__ import annotations

import random

from bench.stack_groups import FAULTS, Job, dumps, is_right, plant

from holdfast.diagnose.rank_stack import Stack
from holdfast.diagnose.stack_groups import describe_stacks, group_stacks, to_event
from holdfast.job.parallel_layout import ParallelLayout

SYNC: Stack = ("reduce_scatter_tensor (distributed_c10d.py)", "finish_grad_sync (param_and_grad_buffer.py)")
TP: Stack = ("all_reduce (distributed_c10d.py)", "_reduce (mappings.py)", "step (train.py:9)")
RECV: Stack = ("_communicate (p2p_communication.py)", "recv_forward (p2p_communication.py)")
READS: Stack = ("read (data.py:7)", "step (train.py:3)")
LAYOUT = ParallelLayout(tp=2, dp=2, pp=2)
"""Ranks 0-3 are the first stage; tp groups are (0, 1), (2, 3), (4, 5), (6, 7)."""


def lines(stacks: dict[int, Stack], layout: ParallelLayout | None = LAYOUT) -> tuple[str, ...]:
    verdict = group_stacks(stacks, layout, world_size=8)
    return describe_stacks(to_event(verdict, at=1.0, replica=0, attempt=0, nodes=(0,)))


def test_rank_for_which_its_group_and_its_pipeline_wait_is_named_and_not_those() -> None:
    stacks = {0: READS, 1: TP, 4: RECV, 5: RECV, 2: SYNC, 3: SYNC, 6: SYNC, 7: SYNC}
    verdict = group_stacks(stacks, LAYOUT)
    assert (verdict.suspects, verdict.outliers) == ((0,), (0, 1, 4, 5))
    assert verdict.affected is not None
    assert verdict.affected.name == "the tpxpp group of ranks 0-1, 4-5"
    assert lines(stacks) == (
        "stacks: 4 ranks (2-3, 6-7) in reduce_scatter_tensor (distributed_c10d.py)"
        " < finish_grad_sync (param_and_grad_buffer.py)",
        "stacks: 2 ranks (4-5) in _communicate (p2p_communication.py) < recv_forward (p2p_communication.py)",
        "stacks: rank 1 in all_reduce (distributed_c10d.py) < _reduce (mappings.py) < step (train.py:9)",
        "stacks: rank 0 in read (data.py:7) < step (train.py:3)",
        "stacks: the others wait for rank 0 on node 0",
        "stacks: all that differ are in the tpxpp group of ranks 0-1, 4-5",
    )


def test_group_whose_ranks_have_all_entered_the_call_is_named() -> None:
    stacks = {0: TP, 1: TP, 4: RECV, 5: RECV, 2: SYNC, 3: SYNC, 6: SYNC, 7: SYNC}
    verdict = group_stacks(stacks, LAYOUT)
    assert verdict.origin is not None
    assert verdict.origin.name == "the tp group of ranks 0-1"


def test_rank_without_a_stack_is_named_where_others_wait_for_it_and_nothing_else_explains_them() -> None:
    stacks: dict[int, Stack] = {0: (), 1: SYNC, 2: RECV, 3: SYNC}
    verdict = group_stacks(stacks, ParallelLayout(dp=2, pp=2))
    assert (verdict.suspects, verdict.missing) == ((0,), (0,))
    # Rank 0 may as well have entered the call in which all others of its group are.
    whole: dict[int, Stack] = {0: (), 1: TP, 2: TP, 3: TP, 4: SYNC, 5: SYNC, 6: SYNC, 7: SYNC}
    assert group_stacks(whole, ParallelLayout(tp=4, dp=2)).suspects == (0, 1, 2, 3)
    assert lines(whole, ParallelLayout(tp=4, dp=2))[-2] == "stacks: none of rank 0"


def test_equal_stacks_name_nobody_and_without_a_layout_only_a_rank_that_does_not_wait_is() -> None:
    assert group_stacks(dict.fromkeys(range(8), TP), LAYOUT).suspects == ()
    assert group_stacks({}, LAYOUT).groups == ()
    apart = {**dict.fromkeys(range(8), SYNC), 5: READS}
    assert group_stacks(apart).suspects == (5,)
    assert group_stacks(apart).origin is None
    busy: dict[int, Stack] = {rank: (f"work (train.py:{rank})",) for rank in range(8)}
    assert group_stacks(busy).suspects == ()
    assert group_stacks({**apart, 11: TP}, LAYOUT).origin is None  # more ranks than the layout has


def test_of_as_many_ranks_those_that_wait_count_as_healthy_whichever_they_are() -> None:
    assert group_stacks({0: READS, 1: SYNC}).suspects == (0,)
    assert group_stacks({0: SYNC, 1: READS}).suspects == (1,)


def test_ranks_of_a_later_replica_are_named_with_it() -> None:
    verdict = group_stacks({0: READS, 1: SYNC, 2: SYNC})
    shown = describe_stacks(to_event(verdict, at=1.0, replica=1, attempt=0, nodes=(3,)))
    assert shown == (
        "stacks: 2 ranks (1-2) of replica 1 in reduce_scatter_tensor (distributed_c10d.py)"
        " < finish_grad_sync (param_and_grad_buffer.py)",
        "stacks: rank 0 of replica 1 in read (data.py:7) < step (train.py:3)",
        "stacks: the others wait for rank 0 of replica 1 on node 3",
    )


def test_generated_hangs_are_right_without_noise() -> None:
    dice = random.Random(7)
    job = Job(ParallelLayout(tp=2, cp=2, ep=4, dp=4, pp=4))
    for kind in FAULTS * 5:
        fault = plant(job, kind, dice)
        assert fault is not None
        stacks = dumps(job, fault, dice, named=True, noise=False)
        assert is_right(group_stacks(stacks, job.layout), fault), fault
