"""Stragglers are named in time on generated noise, and nobody else is."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from holdfast.protocol.phase_times import Phase, PhaseTimes
from holdfast.watch.stragglers import Straggler, StragglerDetector

STEP_S = {Phase.DATA: 0.02, Phase.FORWARD: 0.08, Phase.BACKWARD: 0.12, Phase.OPTIMIZER: 0.02, Phase.HOST: 0.01}
OWN_S = sum(STEP_S.values())
Slow = Callable[[int, int, Phase], float]
"""Seconds that a rank takes longer in a phase of a step."""


def run(
    slow: Slow = lambda rank, step, phase: 0.0, *, steps: int = 40, ranks: int = 8, noise: float = 0.05, seed: int = 0
) -> list[Straggler]:
    """What is named in a run of DDP: every rank starts a step as soon as the gradients of the last are reduced."""
    chance, detector, found = random.Random(seed), StragglerDetector(), list[Straggler]()
    starts = [1000.0] * ranks
    for last in range(4, steps, 5):
        window = range(last - 4, last + 1)
        factors = [[max(0.2, chance.gauss(1.0, noise)) for _ in window] for _ in range(ranks)]
        lost = [{phase: [slow(rank, step, phase) for step in window] for phase in Phase} for rank in range(ranks)]
        arrivals, communication = [list[float]() for _ in range(ranks)], [list[float]() for _ in range(ranks)]
        for n in range(5):
            for rank in range(ranks):
                own = OWN_S * factors[rank][n] + sum(lost[rank][phase][n] for phase in STEP_S)
                arrivals[rank].append(starts[rank] + own)
            last_arrival = max(each[n] for each in arrivals)
            for rank in range(ranks):
                starts[rank] = last_arrival + 0.01 + lost[rank][Phase.COMMUNICATION][n]
                communication[rank].append(starts[rank] - arrivals[rank][n])
        found += detector.add(
            [
                PhaseTimes(
                    rank=rank,
                    first_step=window[0],
                    last_step=last,
                    phases=tuple(
                        STEP_S[phase] * middle(factors[rank]) + middle(lost[rank][phase])
                        if phase in STEP_S
                        else middle(communication[rank])
                        for phase in Phase
                    ),
                    arrived=sum(arrivals[rank]) / 5 + 0.3 * (rank % 3),  # clocks of machines differ
                )
                for rank in range(ranks)
            ]
        )
    return found


def middle(values: list[float]) -> float:
    return sorted(values)[2]


def slower(who: int, where: Phase, share: float, *, since: int = 20) -> Slow:
    return lambda rank, step, phase: share * OWN_S if (rank, phase) == (who, where) and step >= since else 0.0


def test_straggler_of_ten_per_cent_is_named_with_its_phase_within_forty_steps() -> None:
    for phase in Phase:
        for seed in range(5):
            (found, *more) = run(slower(3, phase, 0.105), steps=60, noise=0.01, seed=seed)
            assert (found.rank, found.phase, more) == (3, phase, []), (phase, seed)
            assert 1.07 < found.slowdown < 1.13
            assert found.last_step < 60


def test_straggler_of_a_third_is_named_as_soon_as_it_has_cost_a_second() -> None:
    (found,) = run(slower(6, Phase.BACKWARD, 2.0), steps=60, noise=0.05)
    assert (found.rank, found.phase) == (6, Phase.BACKWARD)
    assert found.last_step <= 24 + 5


def test_one_of_two_ranks_is_named_and_the_other_is_not() -> None:
    for phase in (Phase.FORWARD, Phase.COMMUNICATION):
        (found,) = run(slower(1, phase, 0.2), steps=80, ranks=2, noise=0.01)
        assert (found.rank, found.phase) == (1, phase)


def test_straggler_is_named_again_only_after_it_has_recovered() -> None:
    def twice(rank: int, step: int, phase: Phase) -> float:
        return 0.05 if rank == 2 and phase is Phase.DATA and (50 <= step < 150 or step >= 300) else 0.0

    first, second = run(twice, steps=400, noise=0.02)
    assert (first.rank, second.rank) == (2, 2)
    assert 50 < first.last_step < 100 < 300 < second.last_step


@pytest.mark.slow
def test_noise_of_an_hour_names_nobody() -> None:
    def hiccups(rank: int, step: int, phase: Phase) -> float:
        return 2.0 if (step * 7 + rank * 31) % 401 == 0 and phase is Phase.HOST else 0.0

    assert run(steps=14_400, noise=0.20, seed=1) == []  # of 0.25 s
    assert run(hiccups, steps=4_000, noise=0.05, seed=2) == []


BUSY = [
    *[(0.283, 0.315, 0.088, 0.074), (0.263, 0.241, 0.108, 0.032), (0.264, 0.263, 0.108, 0.177)],
    *[(0.316, 0.311, 0.182, 0.136), (0.306, 0.289, 0.049, 0.107), (0.304, 0.282, 0.154, 0.050)],
    *[(0.307, 0.291, 0.168, 0.101), (0.294, 0.348, 0.128, 0.092), (0.261, 0.322, 0.109, 0.183)],
    *[(0.298, 0.327, 0.128, 0.092), (0.307, 0.357, 0.045, 0.112), (0.330, 0.337, 0.155, 0.174)],
]
"""Own times and waits for a CPU of two equal ranks that compute on two cores at a load of 6, as measured in a run."""


def test_ranks_that_share_busy_cores_are_no_stragglers() -> None:
    def named(*, waits_are_known: bool) -> list[Straggler]:
        detector, found = StragglerDetector(), list[Straggler]()
        for number, (one_s, other_s, one_waits_s, other_waits_s) in enumerate(BUSY):
            found += detector.add(
                [
                    PhaseTimes(
                        rank=rank,
                        first_step=5 * number,
                        last_step=5 * number + 4,
                        phases=tuple(own_s if phase is Phase.BACKWARD else 0.0 for phase in Phase),
                        cpu_wait_s=waits_s if waits_are_known else 0.0,
                    )
                    for rank, own_s, waits_s in ((0, one_s, one_waits_s), (1, other_s, other_waits_s))
                ]
            )
        return found

    assert named(waits_are_known=True) == []
    assert [each.rank for each in named(waits_are_known=False)] == [1]
