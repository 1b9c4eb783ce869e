"""Ranks that wait for samples are named; usual waits are not."""

from __future__ import annotations

import random

from holdfast.protocol.phase_times import Phase, PhaseTimes
from holdfast.watch.data_stalls import DataStall, DataStallDetector


def times(rank: int, last_step: int, wait_s: float, *, longest_s: float = 0.0, step_s: float = 1.0) -> PhaseTimes:
    rest = max(0.0, step_s - wait_s)
    phases = tuple(wait_s if phase is Phase.DATA else rest if phase is Phase.FORWARD else 0.0 for phase in Phase)
    return PhaseTimes(
        rank=rank,
        first_step=last_step - 4,
        last_step=last_step,
        phases=phases,
        longest_wait_s=longest_s,
        loader=f"Loader{rank}",
    )


def test_rank_that_waits_for_much_of_its_steps_is_named_once_until_it_recovers() -> None:
    detector, found = DataStallDetector(), list[DataStall]()
    for last in range(5, 400, 5):
        wait_s = 0.5 if 50 < last <= 150 or last > 300 else 0.05
        rounds = [times(rank, last, wait_s if rank == 1 else 0.1) for rank in range(4)]
        found += [stall for stall in [detector.add(rounds)] if stall]
    assert [(each.rank, each.loader, each.ranks, each.first_step, each.last_step) for each in found] == [
        (1, "Loader1", 1, 51, 70),
        (1, "Loader1", 1, 301, 320),
    ]


def test_single_wait_is_named_if_it_is_long_and_unusual() -> None:
    for usual_s, longest_s, named in ((0.1, 5.0, True), (0.1, 0.9, False), (0.25, 2.0, False)):
        detector = DataStallDetector()
        for last in (5, 10, 15):
            assert detector.add([times(0, last, usual_s, longest_s=usual_s)]) is None
        found = detector.add([times(0, 20, usual_s, longest_s=longest_s)])
        assert (found is not None) is named
        assert found is None or (found.is_single and found.wait_s == longest_s)


def test_first_batch_and_usual_waits_name_nobody() -> None:
    chance, detector = random.Random(0), DataStallDetector()
    assert detector.add([times(0, 5, 0.1, longest_s=30.0)]) is None
    for last in range(10, 50_000, 5):
        wait_s = chance.expovariate(10.0)
        assert detector.add([times(0, last, min(wait_s, 0.9), longest_s=wait_s)]) is None
