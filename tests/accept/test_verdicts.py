"""What the checks conclude from what was observed: events as runs write them, without a run."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from holdfast.accept import scaling_check
from holdfast.accept.agreement import (
    SMOKE,
    Agreement,
    CheckName,
    GangTerms,
    RestartTerms,
    ScalingTerms,
    read_agreement,
)
from holdfast.accept.check_report import Verdict
from holdfast.accept.fabric_check import LEAST_SHARE, _bus_gbit_s, _too_slow
from holdfast.accept.first_run_check import blocks_of, first_run_page
from holdfast.accept.gang_check import Holding, judge_gang
from holdfast.accept.restart_check import first_difference, judge_restart
from holdfast.accept.scaling_check import ScalingRun, check_scaling, judge_scaling
from holdfast.accept.site import ObservedRun, Site
from holdfast.errors import HoldfastError
from holdfast.events import AgentConnected, AnyEvent, Outcome, RunCreated, RunFinished, StepCommitted
from holdfast.events.probe_results import AllReduceRate, PairRate, ProbeOutcome, ProbeResult
from holdfast.fabric.catalog import CATALOG
from holdfast.run_dir import RunDir

ENDED = RunFinished(at=1000.0, outcome=Outcome.SUCCEEDED, exit_code=0, reason="every rank finished")


def step(number: int, *, attempt: int = 0, step_s: float = 0.1, **metrics: float) -> StepCommitted:
    at = 100.0 + number * step_s
    return StepCommitted(
        at=at, replica=0, attempt=attempt, step=number, started=at - step_s, ended=at, metrics={"loss": 1.0, **metrics}
    )


def observed(*events: AnyEvent, late: float | None = None) -> ObservedRun:
    return ObservedRun(RunDir(Path("runs/accept-x-abc")), events, late)


def joined(node: int, at: float) -> AgentConnected:
    return AgentConnected(
        at=at, node=node, generation=0, hostname=f"h{node}", address="10.0.0.1", pid=1, port=1, incarnation="a"
    )


# -- restart


def digests(**changed: float) -> dict[str, float]:
    equal = dict.fromkeys(("samples", "random", "weights", "optimizer", "result"), 1.0)
    return {f"digest_{name}": value for name, value in {**equal, **changed}.items()}


@pytest.mark.parametrize(
    ("changed", "lost"),
    [
        ({"samples": 2.0, "result": 2.0}, "position in the data"),
        ({"random": 2.0, "result": 2.0}, "random number"),
        ({"weights": 2.0, "optimizer": 2.0, "result": 2.0}, "the weights"),
        ({"optimizer": 2.0, "result": 2.0}, "optimizer"),
        ({"result": 2.0}, "computation itself"),
    ],
)
def test_state_that_was_not_restored_is_named(changed: dict[str, float], lost: str) -> None:
    reference = [step(number, **digests()) for number in range(1, 9)]
    resumed = [step(5, attempt=1, **digests()), step(6, attempt=1, **digests(**changed))]
    found = first_difference(reference, [*reference[:5], *resumed])
    assert found is not None
    assert (found.step, found.attempt) == (6, 1)
    assert lost in found.lost


def test_equal_steps_have_no_difference_and_the_last_loss_of_a_failed_attempt_is_not_compared() -> None:
    reference = [step(number) for number in range(1, 5)]
    partial = step(3, loss=7.0)
    assert first_difference(reference, [*reference[:2], partial, step(2, attempt=1), step(3, attempt=1)]) is None
    assert first_difference(reference, [*reference[:2], partial, step(4)]) is not None


def test_steps_that_a_fault_damaged_and_that_were_done_again_do_not_count() -> None:
    reference = [step(number, **digests()) for number in range(1, 7)]
    damaged = [step(number, **digests(result=7.0)) for number in (4, 5)]
    again = [step(number, attempt=1, **digests()) for number in (4, 5, 6)]
    assert first_difference(reference, [*reference[:3], *damaged, *again]) is None
    found = first_difference(reference, [*reference[:3], *damaged, *again[2:]])
    assert found is not None
    assert found.step == 4


@pytest.mark.parametrize(
    ("run", "code"),
    [
        ([StepCommitted(at=1.0, replica=0, attempt=0, step=2, started=0.0, ended=1.0)], "nothing-to-compare"),
        ([step(1)], "nothing-to-compare"),
        ([step(1), step(2)], None),
    ],
    ids=["neither losses nor digests", "without the last step", "with losses"],
)
def test_runs_that_cannot_be_compared_are_not_accepted(run: list[StepCommitted], code: str | None) -> None:
    last = [each for each in run if each.step == 2]
    reference = observed(step(1), *(last or [step(2)]), ENDED)
    report = judge_restart(reference, observed(*run, ENDED), (), RestartTerms(faults=1))
    assert (report.finding.code if report.finding else None) == code


def test_run_that_did_not_end_in_time_has_not_recovered() -> None:
    reference = observed(step(1), ENDED)
    report = judge_restart(reference, observed(step(1), late=60.0), (), RestartTerms())
    assert report.verdict is Verdict.FAILED
    assert report.finding is not None
    assert report.finding.code == "recovery-failed"
    assert "it was ended after 60 s" in report.finding.evidence


# -- scaling


def scaled(nodes: int, times: Sequence[float], **breakdown: float) -> ScalingRun:
    steps = [step(number, step_s=taken, tokens=100.0 * nodes) for number, taken in enumerate(times, 1)]
    parts = {f"profile_{part}_s": seconds for part, seconds in breakdown.items()}
    return ScalingRun(nodes=nodes, run=observed(*steps, ENDED), breakdown=parts)


STEADY = tuple(0.1 + 0.0001 * (number % 3) for number in range(60))


@pytest.mark.parametrize(
    ("part", "words"),
    [("communication", "wait for the network"), ("data", "wait for samples"), ("backward", "computing takes longer")],
)
def test_lost_efficiency_is_explained_by_the_part_that_grew(part: str, words: str) -> None:
    slower = scaled(2, [2 * each for each in STEADY], **{"forward": 0.05, part: 0.15})
    report = judge_scaling([scaled(1, STEADY, forward=0.05, backward=0.05), slower], ScalingTerms(), None)
    assert report.finding is not None
    assert report.finding.code == "scaling-below-agreed"
    assert words in report.finding.what


def test_steps_that_vary_more_than_what_is_lost_conclude_nothing() -> None:
    chance = random.Random(1)
    noisy = [chance.choice((0.1, 0.3)) for _ in range(60)]
    report = judge_scaling([scaled(1, noisy), scaled(2, [1.3 * each for each in noisy])], ScalingTerms(), None)
    assert report.finding is not None
    assert report.finding.code == "scaling-inconclusive"


def test_noise_on_the_most_nodes_is_inconclusive_too() -> None:
    chance = random.Random(1)
    last = scaled(2, [chance.choice((0.08, 0.14)) for _ in STEADY])
    report = judge_scaling([scaled(1, STEADY), last], ScalingTerms(), None)
    assert report.finding is not None
    assert report.finding.code == "scaling-inconclusive"


def test_inconclusive_comparison_is_made_once_more_with_twice_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(1)
    made: list[tuple[int, int]] = []

    def train(_site: Site, nodes: int, terms: ScalingTerms, **_: object) -> ScalingRun:
        made.append((nodes, terms.steps))
        varies = terms.steps == 60
        return scaled(nodes, [chance.choice((0.08, 0.14)) if varies else 0.1 for _ in range(terms.steps)])

    monkeypatch.setattr(scaling_check, "_train", train)
    terms = Agreement.model_validate({"scaling": {"nodes": [1, 2], "steps": 60}})
    site = cast("Site", SimpleNamespace(agreement=terms, nodes=2, log=lambda _: None))
    assert check_scaling(site, None).verdict is Verdict.PASSED
    assert made == [(1, 60), (2, 60), (1, 120), (2, 120)]


def test_work_that_is_shared_among_more_nodes_counts_once() -> None:
    """A fixed global batch: steps on two nodes take 0.9 times as long, and each node does half of the work."""
    steps = [step(number, step_s=0.09, tokens=100.0) for number in range(1, 61)]
    shared = ScalingRun(nodes=2, run=observed(*steps, ENDED), breakdown={})
    report = judge_scaling([scaled(1, STEADY), shared], ScalingTerms(), None)
    assert report.finding is not None
    assert "does 55" in report.finding.what


def test_linear_scaling_passes() -> None:
    assert judge_scaling([scaled(1, STEADY), scaled(2, STEADY)], ScalingTerms(), 1e9).verdict is Verdict.PASSED


# -- gang


def holding(*at: float, ends: float, finished: bool = True) -> Holding:
    events: list[AnyEvent] = [RunCreated(at=99.0, run="accept-x-abc", job={})]
    events += [joined(node, each) for node, each in enumerate(at)]
    last = RunFinished(at=ends, outcome=Outcome.SUCCEEDED, exit_code=0, reason="every rank finished")
    end = (last,) if finished else (step(1, step_s=ends - 100.0),)
    return Holding(run=observed(*events, *end, late=None if finished else 60.0), nodes=2)


@pytest.mark.parametrize(
    ("first", "second", "code"),
    [
        (holding(100, 100.2, ends=105), holding(106, 106.1, ends=110), None),
        (holding(100, 100.2, ends=105), holding(100.5, 106.1, ends=110), "half-gang"),
        (holding(100, ends=160, finished=False), holding(100.1, ends=160, finished=False), "gang-deadlock"),
        (holding(100, 100.2, ends=105), holding(100, 100.2, ends=105), "acceptance-not-applicable"),
        (holding(80, 80.2, ends=90), holding(100, 100.2, ends=105), "acceptance-not-applicable"),
    ],
)
def test_gang_is_all_or_nothing(first: Holding, second: Holding, code: str | None) -> None:
    report = judge_gang([(first, second)], GangTerms(rounds=1))
    assert (report.finding.code if report.finding else None) == code


# -- fabric, first run, agreement


def test_bandwidth_below_the_agreement_is_refused_and_reaches_the_prediction_of_scaling() -> None:
    fast = AllReduceRate(size_bytes=1 << 20, time_s=1e-3, algorithm_gb_s=1.0, bus_gb_s=1.0)
    probe = ProbeResult(
        rank=0,
        outcome=ProbeOutcome.PASSED,
        elapsed_s=1.0,
        all_reduce=(fast,),
        pairs=(PairRate(nodes=(0, 1), gb_s=0.9),),
    )
    assert _bus_gbit_s(probe) == 8.0
    assert _too_slow(probe, 0.0) is None
    assert _too_slow(probe, 8.0) is None
    found = _too_slow(probe, LEAST_SHARE * CATALOG["infiniband"].port_gbit_s)
    assert found is not None
    assert "8 Gbit/s, less than the agreed 100" in found.what


def test_page_has_sections_commands_and_files() -> None:
    blocks = blocks_of(first_run_page(Agreement().first_run, Path()))
    assert [block.section for block in blocks] == ["Install", "Describe", "Describe", "Run", "Look at it"]
    assert [block.file_name for block in blocks if block.file_name] == ["train.py"]


def test_agreement_is_read_with_every_problem_and_smoke_shortens_it(tmp_path: Path) -> None:
    path = tmp_path / "acceptance.yaml"
    path.write_text("nodes: 4\nscaling: {min_efficiency: 0.8}\n")
    agreed = read_agreement(path, smoke=True)
    assert agreed.scaling.min_efficiency == 0.8
    assert agreed.restart.faults == SMOKE["restart"]["faults"]
    path.write_text("nodes: none\nscalling: {}\n")
    with pytest.raises(HoldfastError) as refused:
        read_agreement(path)
    assert {finding.where for finding in refused.value.findings} == {f"{path}:1", f"{path}:2"}


def test_checks_run_in_their_order() -> None:
    assert [str(check) for check in CheckName] == ["fabric", "scaling", "gang", "first-run", "restart"]
