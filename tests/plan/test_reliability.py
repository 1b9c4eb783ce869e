"""The simulated run: closed forms where they hold, the policy's decisions, and every second accounted for."""

from __future__ import annotations

import math
import random
from statistics import fmean

import pytest
from msgspec.structs import replace

from holdfast.control.policy import Action, Failure, FailureKind, Spare, decide
from holdfast.failure_rates import DAY_S
from holdfast.job.spec import Recovery
from holdfast.plan import fault_table
from holdfast.plan.reliability import (
    BY_PERSON,
    Delay,
    Detection,
    FaultEffect,
    FaultKind,
    Fleet,
    KnownFailures,
    Loss,
    Restarting,
    Trial,
    simulate,
)

MONTH_S = 30 * DAY_S
CAUSES = fault_table.causes()
NONE, ALL = frozenset[str](), fault_table.DETECTORS
FLEET = Fleet(
    nodes=64, gpus_per_node=8, step_s=1.0, checkpoint_every_s=600.0, checkpoint_cost_s=6.0, restart_s=120.0,
    requeue_s=900.0, checks_s=60.0, person_s=3600.0, standbys=64, repair_s=DAY_S,
)  # fmt: skip
CRASH = Detection(delay=Delay(low_s=40.0, high_s=80.0), kind=FailureKind.CRASHED, error="RuntimeError: a bug")
PERSON = Detection(delay=Delay(high_s=7200.0), kind=None)


def cause(detection: Detection, *, per_day: float = 4.0, **fields: object) -> FaultKind:
    return replace(FaultKind(name="fault", per_day=per_day, detection=detection), **fields)


def months(*causes: FaultKind, fleet: Fleet = FLEET, seeds: int = 40) -> list[Trial]:
    return [simulate(fleet, causes, NONE, total_s=MONTH_S, seed=seed) for seed in range(seeds)]


@pytest.mark.parametrize(
    ("fault", "lost_s"),
    [
        (cause(CRASH), 60.0 + 120.0 + 300.0),
        (cause(PERSON, effect=FaultEffect.DAMAGES), 3600.0 + 120.0 + 300.0),
        (cause(PERSON, effect=FaultEffect.SLOWS, persists=1.0, slowdown=0.1), 0.1 * 3600.0 + 120.0 + 300.0),
    ],
    ids=["stops", "damages", "slows"],
)
def test_independent_faults_agree_with_the_closed_form(fault: FaultKind, lost_s: float) -> None:
    found = months(replace(fault, per_day=0.2), seeds=200)
    share = fmean(trial.lost_to("fault") for trial in found) / MONTH_S
    assert share == pytest.approx(0.2 * lost_s / DAY_S, rel=0.08)
    assert fmean(trial.ettr for trial in found) == pytest.approx(
        (1 - FLEET.saving_share) * (1 - 0.2 * lost_s / DAY_S), abs=0.001
    )


def test_every_second_is_kept_or_lost_to_one_cause() -> None:
    for detectors in (NONE, ALL):
        trial = simulate(fault_table.fleet(), CAUSES, detectors, total_s=MONTH_S, seed=3)
        assert trial.kept_s + sum(trial.lost_s.values()) == pytest.approx(MONTH_S)
        assert min(trial.lost_s.values()) >= 0
        assert trial.healthy_replaced == 0


def test_same_seed_gives_the_same_month_and_another_seed_another() -> None:
    first, again, other = (simulate(fault_table.fleet(), CAUSES, ALL, total_s=MONTH_S, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_node_of_a_fault_that_stays_is_replaced_at_its_second_unclear_error() -> None:
    unclear = Detection(delay=Delay(high_s=1.0), kind=FailureKind.GPU_ERROR_UNCLEAR, code=1, error="CUDA error")
    for trial in months(cause(unclear, persists=1.0, per_day=0.5), seeds=3):
        assert set(trial.actions) == {Action.RESTART.value, Action.PROMOTE.value}
        assert 0 <= trial.actions[Action.RESTART.value] - trial.actions[Action.PROMOTE.value] <= 1


def test_damage_whose_node_is_unknown_is_found_by_checks_and_costs_the_work_since() -> None:
    damaged = Detection(delay=Delay(high_s=10.0), kind=FailureKind.NUMBERS_DAMAGED, names_node=False)
    for trial in months(cause(damaged, effect=FaultEffect.DAMAGES, persists=1.0, per_day=0.5), seeds=3):
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
    (trial,) = months(cause(unseen, effect=FaultEffect.DAMAGES, per_day=10.0), seeds=1)
    assert trial.ettr < 0.2


def test_table_has_all_interruptions_of_its_source_once() -> None:
    of_llama = [one for one in CAUSES if one.name != "slow node"]
    assert sum(one.per_day for one in of_llama) * fault_table.LLAMA_DAYS == pytest.approx(
        fault_table.LLAMA_INTERRUPTIONS
    )


@pytest.mark.parametrize("every_s", [300.0, 900.0, 3600.0])
def test_instant_restarts_agree_with_dalys_formula(every_s: float) -> None:
    """Efficiency is T / (M (exp((T + C) / M) - 1)) with interval T, save C, mean time between failures M: exact."""
    at_once = Detection(delay=Delay(high_s=0.0), kind=FailureKind.NODE_LOST)
    fleet = replace(
        FLEET, checkpoint_every_s=every_s, checkpoint_cost_s=60.0, restart_s=0.0, requeue_s=0.0, standbys=0,
        recovery=Recovery(max_restarts=1000),
    )  # fmt: skip
    found = months(cause(at_once, per_day=24.0), fleet=fleet, seeds=10)
    mtbf_s = DAY_S / 24.0
    exact = every_s / (mtbf_s * math.expm1((every_s + 60.0) / mtbf_s))
    assert fmean(trial.ettr for trial in found) == pytest.approx(exact, rel=0.01)


def test_failed_replica_costs_its_own_share_only() -> None:
    lost = cause(Detection(delay=Delay(high_s=0.0), kind=FailureKind.NODE_LOST), per_day=0.5)
    (trial,) = months(lost, fleet=replace(FLEET, recovery=Recovery(replicas=8)), seeds=1)
    times = sum(trial.actions.values())
    assert times > 5
    assert trial.lost_s["fault", Loss.RECOVERING] == pytest.approx(times * FLEET.restart_s / 8)
    assert ("fault", Loss.RECOMPUTING) not in trial.lost_s


def test_run_goes_back_to_a_checkpoint_if_no_replica_survives() -> None:
    """Two nodes of one rack are both replicas."""
    lost = cause(Detection(delay=Delay(high_s=0.0), kind=FailureKind.NODE_LOST), hits_rack=True, per_day=0.5)
    (trial,) = months(lost, fleet=replace(FLEET, nodes=2, recovery=Recovery(replicas=2)), seeds=1)
    times = sum(trial.actions.values())
    assert trial.lost_s["fault", Loss.RECOVERING] == pytest.approx(times * FLEET.restart_s)
    assert 0 < trial.lost_s["fault", Loss.RECOMPUTING] < times * FLEET.checkpoint_every_s


def test_lost_rack_takes_a_standby_for_each_node() -> None:
    lost = cause(Detection(delay=Delay(high_s=0.0), kind=FailureKind.NODE_LOST), hits_rack=True, per_day=0.2)
    (trial,) = months(lost, fleet=replace(FLEET, standbys=3, rack_nodes=4, repair_s=1.0), seeds=1)
    times = sum(trial.actions.values())
    assert trial.lost_s["fault", Loss.RECOVERING] == pytest.approx(times * FLEET.requeue_s)


def test_machine_without_quarantine_comes_back_and_fails_again() -> None:
    broken = cause(Detection(delay=Delay(high_s=1.0), kind=FailureKind.GPU_FAILED), persists=1.0, per_day=4.0)
    kept, avoided = (
        sum(sum(trial.actions.values()) for trial in months(broken, fleet=each, seeds=5))
        for each in (replace(FLEET, quarantine=False), FLEET)
    )
    assert kept > 1.05 * avoided


def test_scheduler_restarts_on_the_same_nodes_until_a_person_looks() -> None:
    broken = cause(CRASH, persists=1.0, per_day=0.1)
    (trial,) = months(broken, fleet=replace(FLEET, restarting=Restarting.REQUEUE), seeds=1)
    people = trial.actions[BY_PERSON]
    assert people > 0
    assert 0 <= trial.actions["the scheduler restarts"] - 2 * people <= 2


@pytest.mark.parametrize("replicas", [1, 3])
def test_decisions_on_relevant_failures_are_those_on_all(replicas: int) -> None:
    dice, recovery = random.Random(replicas), Recovery(replicas=replicas, max_restarts=12)
    known, earlier, now = KnownFailures(recovery), list[Failure](), 0.0
    for attempt in range(1500):
        now += dice.expovariate(1 / 700)
        node = dice.randrange(12)
        failure = Failure(
            kind=dice.choice([*FailureKind]), at=now, node=node, machine=f"machine{node}", attempt=attempt,
            replica=node % replicas, rank=node, code=dice.choice((1, 6, 9)), error=dice.choice(("", "a", "b")),
            step=dice.choice((attempt, attempt // 4)), made_progress=dice.random() < 0.8, has_session=True,
            uptime_s=dice.choice((10.0, 600.0)), holds_up_others=dice.random() < 0.5, excused=dice.random() < 0.2,
        )  # fmt: skip
        everything = decide(failure, tuple(earlier), recovery, Spare.STANDBY)
        assert decide(failure, known.relevant(failure), recovery, Spare.STANDBY) == everything
        known.add(failure)
        earlier.append(failure)
