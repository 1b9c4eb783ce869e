"""What failures cost a job: its settings reach the simulation, and the best values are those of theory."""

from __future__ import annotations

import math

import pytest
from msgspec.structs import replace

from bench import result_file
from holdfast.control.policy import FailureKind
from holdfast.errors import HoldfastError
from holdfast.failure_rates import DAY_S
from holdfast.job.spec import Job
from holdfast.plan import fault_table
from holdfast.plan.ettr_by_scale import ettr_by_scale
from holdfast.plan.fault_table import MEASURED, Measured
from holdfast.plan.reliability import Delay, Detection, FaultKind
from holdfast.plan.reliability_plan import best_interval, best_standbys, find_rate, reliability_request


def job(**fields: object) -> Job:
    return Job.model_validate({
        "version": 1, "command": ["train"], "nodes": 256, "gpus_per_node": 8, "checkpoint": {"every": "auto"}, **fields,
    })  # fmt: skip


@pytest.mark.parametrize("row", MEASURED, ids=lambda row: row.bench)
def test_measured_times_are_those_of_the_results(row: Measured) -> None:
    (file,) = (each for each in result_file.read_all() if each.bench == row.bench)
    (result, *_) = (each for each in file.results if each.claim == row.claim and not each.superseded)
    if row.detail:
        assert result.details[row.detail].endswith(f"{row.seconds:g} s")
    else:
        assert result.figure is not None
        assert result.figure.value == row.seconds


def test_best_interval_is_youngs_if_one_replica_restarts_at_once() -> None:
    at_once = Detection(delay=Delay(high_s=0.0), kind=FailureKind.NODE_LOST)
    usual = reliability_request(job(recovery={"max_restarts": 1000}), rate="rsc-1", days=30.0, step_s=None)
    request = replace(
        usual,
        causes=(FaultKind(name="node", per_day=4.0, detection=at_once),),
        fleet=replace(usual.fleet, restart_s=0.0, requeue_s=0.0),
    )
    young_s = math.sqrt(2 * usual.fleet.checkpoint_cost_s * DAY_S / 4.0)
    assert best_interval(request).best == pytest.approx(young_s, rel=0.5)


@pytest.mark.slow
def test_best_number_of_standbys_is_none_where_they_cost_more_than_they_save() -> None:
    small = reliability_request(job(nodes=8), rate="byterobust", days=30.0, step_s=None)
    large = reliability_request(job(nodes=2048), rate="llama-3", days=30.0, step_s=None)
    assert best_standbys(small).best == 0
    found = best_standbys(large)
    assert found.best > 2
    assert found.own_ettr < found.best_ettr


def test_settings_of_the_job_reach_the_simulation() -> None:
    def request(**fields: object):
        return reliability_request(job(**fields), rate="3.8", days=30.0, step_s=2.0)

    assert request(checkpoint={"every_steps": 50}).fleet.checkpoint_every_s == 100.0
    assert request(checkpoint={"every_s": 60}).fleet.checkpoint_every_s == 60.0
    assert request(checkpoint={}).fleet.checkpoint_every_s > 30 * DAY_S
    assert request(recovery={"standby": "auto"}).fleet.standbys == 5
    assert request(nodes=1, recovery={"replicas": 4}).fleet.nodes == 4
    assert request(watch={"stragglers": "act"}).detectors == fault_table.DETECTORS
    assert "hangs" not in request(recovery={"step_timeout_s": "off"}).detectors
    assert not next(each for each in request().inputs if each.name == "step").is_assumed


def test_rate_is_a_published_fleet_or_a_number() -> None:
    assert find_rate("RSC-2") == ("RSC-2", 2.3)
    assert find_rate("0.5") == ("0.5 per 1,000 node-days", 0.5)
    for wrong in ("rsc-3", "-1", "nan", "1e9", ""):
        with pytest.raises(HoldfastError, match="no published fleet"):
            find_rate(wrong)


def test_ettr_falls_with_scale_and_least_for_a_job_with_standbys() -> None:
    with_standbys = job(recovery={"standby": "auto"})
    curves = {each.name: each.ettr for each in ettr_by_scale(with_standbys, rate="llama-3", days=3.0, step_s=None)}
    own, *others = curves.values()
    assert [*own] == [256 * factor for factor in (1, 2, 4, 8, 16, 32, 64)]
    for ettr in curves.values():
        assert ettr[256] > ettr[16_384]
    assert all(own[16_384] > other[16_384] for other in others)
