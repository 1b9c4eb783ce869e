"""The planner's errors on published runs that its constants were not fitted to."""

from __future__ import annotations

from bench.plan_fit import FITTED, error, loss
from bench.published_runs import read_runs, repeats

RUNS, LEFT_OUT = read_runs()


def test_held_out_runs_are_predicted_as_well_as_the_docs_say() -> None:
    held = [run for run in RUNS if run.is_held_out]
    assert len(held) >= 100
    assert len({run.group for run in held}) >= 8
    errors = [abs(error(run, {})) for run in held]
    assert sum(errors) / len(errors) < 0.07
    assert sorted(errors)[int(0.9 * len(errors))] < 0.16


def test_no_model_on_the_same_hardware_of_a_source_is_on_both_sides() -> None:
    parts: dict[tuple[str, str, str], set[bool]] = {}
    for run in RUNS:
        parts.setdefault((run.group, run.load.model.name, run.machine.name), set()).add(run.is_held_out)
    assert all(len(part) == 1 for part in parts.values())


def test_every_run_is_used_or_left_out_for_a_reason() -> None:
    assert {run.id for run in RUNS}.isdisjoint(each.id for each in LEFT_OUT)
    assert all(each.why for each in LEFT_OUT)


def test_nine_in_ten_repeated_runs_agree_within_seven_percent() -> None:
    differences = sorted(repeats())
    assert len(differences) > 100
    assert differences[int(0.9 * len(differences))] < 0.07


def test_constants_are_near_the_optimum_of_the_fit() -> None:
    fitted = [run for run in RUNS if not run.is_held_out]
    here = loss(fitted, dict.fromkeys(FITTED, 1.0))
    for constant in FITTED:
        for factor in (0.8, 1.25):
            assert loss(fitted, {**dict.fromkeys(FITTED, 1.0), constant: factor}) > here - 0.002, constant.name
