from __future__ import annotations

import random

import pytest

from holdfast.metrics.step_breakdown import OVERLAPPED, StepPart, StepTrace, breakdown_metric, step_breakdown

MS = 1_000_000


def at(begin: float, end: float) -> tuple[int, int]:
    return int(begin * MS), int(end * MS)


def parts(**doings: object) -> dict[str, float]:
    """Of one step of 100 ms, in ms, without those that are nothing."""
    found = step_breakdown(StepTrace(**{"step_starts": (0, 100 * MS), **doings}))
    return {
        name.removeprefix("profile_").removesuffix("_s"): round(spent * 1000, 6)
        for name, spent in found.items()
        if spent
    }


LOOP = {"data": [at(0, 10)], "zero_grad": [at(40, 42)], "backward": [at(45, 70)], "optimizer": [at(75, 90)]}


def test_what_lies_between_is_what_it_leads_to():
    assert parts(**LOOP) == {"data": 10, "forward": 33, "backward": 25, "optimizer": 22, "other": 10}


def test_step_without_a_mark_is_other():
    assert parts() == {"other": 100}


def test_accumulated_micro_batches_are_forward_and_backward_in_turn():
    found = parts(backward=[at(10, 20), at(40, 60)], optimizer=[at(60, 100)])
    assert found == {"forward": 30, "backward": 30, "optimizer": 40}


def test_parts_are_of_a_step_where_several_were_profiled():
    twice = {name: [*spans, *(at(100 + b / MS, 100 + e / MS) for b, e in spans)] for name, spans in LOOP.items()}
    assert parts(step_starts=(0, 100 * MS, 200 * MS), **twice) == parts(**LOOP)


def test_copy_for_a_checkpoint_that_the_optimizer_waits_for_is_the_checkpoints():
    assert parts(optimizer=[at(0, 100)], checkpoint=[at(0, 30)]) == {"optimizer": 70, "checkpoint": 30}


def test_communication_beside_operators_is_hidden_and_what_they_wait_for_is_not():
    found = parts(**LOOP, operators=[at(45, 60)], communication=[at(50, 68)])
    assert found == {**parts(**LOOP), "backward": 17, "communication": 8, OVERLAPPED: 10}


def test_collective_that_the_loop_waits_in_is_communication_wherever_it_is():
    found = parts(**LOOP, operators=[at(15, 40)], in_collective=[at(20, 30), at(92, 97)])
    assert found == {**parts(**LOOP), "forward": 23, "other": 5, "communication": 15}


def test_device_time_goes_to_the_phase_that_launched_the_kernels():
    host = {"backward": [at(10, 20)], "optimizer": [at(20, 30)], "zero_grad": [at(30, 31)]}
    kernels = [(5 * MS, at(8, 50)), (15 * MS, at(50, 85)), (25 * MS, at(85, 100))]
    assert parts(**host, kernels=kernels) == {"forward": 50, "backward": 35, "optimizer": 15}


def test_collective_of_a_device_is_hidden_as_far_as_kernels_run_beside_it():
    found = parts(backward=[at(0, 100)], kernels=[(0, at(0, 60)), (0, at(80, 100))], communication=[at(40, 90)])
    assert found == {"backward": 80, "communication": 20, OVERLAPPED: 30}


def test_copies_to_the_host_beside_kernels_cost_nothing_and_alone_they_are_the_checkpoints():
    found = parts(
        checkpoint=[at(0, 1)],
        backward=[at(1, 100)],
        kernels=[(0, at(0, 50)), (2 * MS, at(1, 40)), (60 * MS, at(50, 100))],
    )
    assert found == {"checkpoint": 11, "backward": 89}


@pytest.mark.parametrize("seed", range(40))
def test_parts_add_up_to_the_step_whatever_went_on(seed: int):
    chance = random.Random(seed)

    def spans() -> list[tuple[int, int]]:
        begins = [chance.randrange(-200, 1200) for _ in range(chance.randrange(12))]
        return [(begin, begin + chance.randrange(300)) for begin in begins]

    starts = tuple(sorted({0, 1000, *(chance.randrange(1000) for _ in range(chance.randrange(3)))}))
    kinds = ("backward", "optimizer", "zero_grad", "data", "checkpoint", "operators", "communication", "in_collective")
    device = [(chance.randrange(-100, 1000), span) for span in spans()] if seed % 2 else []
    found = step_breakdown(StepTrace(step_starts=starts, **{kind: spans() for kind in kinds}, kernels=device))
    assert min(found.values()) >= 0
    step_s = 1000 / (len(starts) - 1) / 1e9
    assert sum(found[breakdown_metric(part)] for part in StepPart) == pytest.approx(step_s)
