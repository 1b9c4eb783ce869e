"""The simulated run: closed forms where they hold, the policy's decisions, and every second accounted for."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

import pytest
from bench.failure_simulation import Cause, Delay, Detection, Effect, Fleet, Loss, Trial, simulate

from bench import month_inputs
from holdfast.control.policy import Action, FailureKind
from holdfast.failure_rates import DAY_S

MONTH_S = 30 * DAY_S
NONE, ALL = frozenset[str](), month_inputs.DETECTORS
FLEET = Fleet(
    nodes=64, gpus_per_node=8, step_s=1.0, checkpoint_every_s=600.0, checkpoint_cost_s=6.0, restart_s=120.0,
    requeue_s=900.0, checks_s=60.0, person_s=3600.0, standbys=64, repair_s=DAY_S,
)  # fmt: skip
CRASH = Detection(delay=Delay(low_s=40.0, high_s=80.0), kind=FailureKind.CRASHED, error="RuntimeError: a bug")
PERSON = Detection(delay=Delay(high_s=7200.0), kind=None)


def cause(detection: Detection, *, per_day: float = 4.0, **fields: object) -> Cause:
    return replace(Cause(name="fault", per_day=per_day, detection=detection), **fields)


def months(*causes: Cause, fleet: Fleet = FLEET, seeds: int = 40) -> list[Trial]:
    return [simulate(fleet, causes, NONE, total_s=MONTH_S, seed=seed) for seed in range(seeds)]


@pytest.mark.parametrize(
    ("fault", "lost_s"),
    [
        (cause(CRASH), 60.0 + 120.0 + 300.0),
        (cause(PERSON, effect=Effect.DAMAGES), 3600.0 + 120.0 + 300.0),
        (cause(PERSON, effect=Effect.SLOWS, persists=1.0, slowdown=0.1), 0.1 * 3600.0 + 120.0 + 300.0),
    ],
    ids=["stops", "damages", "slows"],
)
def test_independent_faults_agree_with_the_closed_form(fault: Cause, lost_s: float) -> None:
    found = months(replace(fault, per_day=0.2), seeds=200)
    share = fmean(trial.lost_to("fault") for trial in found) / MONTH_S
    assert share == pytest.approx(0.2 * lost_s / DAY_S, rel=0.08)
    assert fmean(trial.ettr for trial in found) == pytest.approx(
        (1 - FLEET.saving_share) * (1 - 0.2 * lost_s / DAY_S), abs=0.001
    )


def test_every_second_is_kept_or_lost_to_one_cause() -> None:
    for detectors in (NONE, ALL):
        trial = simulate(month_inputs.fleet(), month_inputs.CAUSES, detectors, total_s=MONTH_S, seed=3)
        assert trial.kept_s + sum(trial.lost_s.values()) == pytest.approx(MONTH_S)
        assert min(trial.lost_s.values()) >= 0
        assert trial.healthy_replaced == 0


def test_same_seed_gives_the_same_month_and_another_seed_another() -> None:
    first, again, other = (
        simulate(month_inputs.fleet(), month_inputs.CAUSES, ALL, total_s=MONTH_S, seed=seed) for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


def test_node_of_a_fault_that_stays_is_replaced_at_its_second_unclear_error() -> None:
    unclear = Detection(delay=Delay(high_s=1.0), kind=FailureKind.GPU_ERROR_UNCLEAR, code=1, error="CUDA error")
    for trial in months(cause(unclear, persists=1.0, per_day=0.5), seeds=3):
        assert set(trial.actions) == {Action.RESTART.value, Action.PROMOTE.value}
        assert 0 <= trial.actions[Action.RESTART.value] - trial.actions[Action.PROMOTE.value] <= 1


def test_damage_whose_node_is_unknown_is_found_by_checks_and_costs_the_work_since() -> None:
    damaged = Detection(delay=Delay(high_s=10.0), kind=FailureKind.NUMBERS_DAMAGED, names_node=False)
    for trial in months(cause(damaged, effect=Effect.DAMAGES, persists=1.0, per_day=0.5), seeds=3):
        assert set(trial.actions) == {Action.CHECK_NODES.value}
        times = trial.actions[Action.CHECK_NODES.value]
        assert trial.lost_s["fault", Loss.RECOVERING] == pytest.approx(times * (FLEET.restart_s + FLEET.checks_s))


def test_run_without_standbys_waits_for_its_target() -> None:
    lost = cause(Detection(delay=Delay(high_s=0.0), kind=FailureKind.NODE_LOST), per_day=0.5)
    (trial,) = months(lost, fleet=replace(FLEET, standbys=0), seeds=1)
    times = trial.actions[Action.REPLACE_NODE.value]
    assert trial.lost_s["fault", Loss.RECOVERING] == pytest.approx(times * FLEET.requeue_s)


def test_damage_that_nobody_noticed_by_the_end_does_not_count_as_training() -> None:
    unseen = Detection(delay=Delay(low_s=2 * MONTH_S, high_s=2 * MONTH_S), kind=None)
    (trial,) = months(cause(unseen, effect=Effect.DAMAGES, per_day=10.0), seeds=1)
    assert trial.ettr < 0.2


def test_table_has_all_interruptions_of_its_source_once() -> None:
    of_llama = [one for one in month_inputs.CAUSES if one.name != "slow node"]
    assert sum(one.per_day for one in of_llama) * month_inputs.LLAMA_DAYS == pytest.approx(
        month_inputs.LLAMA_INTERRUPTIONS
    )
