"""A run's steps beside the prediction: what is said, and from when on."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from holdfast.metrics.step_breakdown import StepPart, breakdown_metric
from holdfast.report.predicted_step import PredictedStep, WorkPart, measured_parts

STEP = PredictedStep(
    layout="TP 8, DP 8",
    machine="h100-ndr",
    predicted_s=1.0,
    measured_s=1.1,
    predicted_parts={WorkPart.COMPUTATION: 0.8, WorkPart.COMMUNICATION: 0.15, WorkPart.OPTIMIZER: 0.05},
)


def test_a_difference_below_20_percent_is_only_stated() -> None:
    assert STEP.lines == ["step: 1.10 s measured, 1.00 s predicted for TP 8, DP 8 on h100-ndr: 10% longer"]


@pytest.mark.parametrize("measured_s", [1.25, 0.75])
def test_the_part_with_most_of_the_difference_is_named(measured_s: float) -> None:
    gap_s = measured_s - 1.0
    profiled = {
        **STEP.predicted_parts,
        WorkPart.COMMUNICATION: 0.15 + 0.6 * gap_s,
        WorkPart.COMPUTATION: 0.8 + 0.4 * gap_s,
    }
    said = replace(STEP, measured_s=measured_s, measured_parts=profiled).lines
    assert said[1].startswith("most of it is communication: 0.")
    assert said[1].endswith("instead of 0.150 s")


def test_no_part_is_named_that_has_less_than_half() -> None:
    profiled = {part: spent + 0.1 for part, spent in STEP.predicted_parts.items()}
    assert "no part" in replace(STEP, measured_s=1.3, measured_parts=profiled).lines[1]


def test_without_a_profile_only_waiting_for_data_is_known() -> None:
    slow = replace(STEP, measured_s=1.5)
    assert "holdfast profile" in slow.lines[1]
    assert measured_parts({"checkpoint_stall_s": 5.0, "loss": 2.0}, None) == {}  # one save's cost, not a step's
    waiting = measured_parts({"data_wait_s": 9.0, "loss": 2.0}, 0.4)
    assert replace(slow, measured_parts=waiting).lines[1] == "most of it is waiting for data: 0.400 s instead of 0.00 s"


def test_forward_and_backward_are_both_computation() -> None:
    metrics = {breakdown_metric(part): 1.0 for part in StepPart}
    assert measured_parts(metrics, 9.0) == {part: 2.0 if part is WorkPart.COMPUTATION else 1.0 for part in WorkPart}
