"""Compares the step time that a run measured with the predicted one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from holdfast.plan.predict import Plan
from holdfast.plan.step_time import StepTime
from holdfast.report.predicted_step import PredictedStep, WorkPart, measured_parts
from holdfast.report.run_status import ReplicaStatus, mean_step_s
from holdfast.report.run_status import StepTime as LoggedSteps

EARLY_STEPS = 10
"""The first steps of an attempt, which are left out: they compile and fill caches."""
MIN_STEPS = 20
"""Steps after them before their time is compared."""

_PARTS: dict[WorkPart, tuple[str, ...]] = {
    WorkPart.COMPUTATION: ("matmul", "attention", "elementwise", "recompute", "host"),
    WorkPart.COMMUNICATION: ("tensor", "context", "expert", "pipeline", "bubble", "data", "scale"),
    WorkPart.OPTIMIZER: ("optimizer",),
}
"""Parts of StepTime; a profile counts a pipeline's bubble as communication, since the rank waits for another."""


def comparable_steps(leader: ReplicaStatus) -> Sequence[LoggedSteps]:
    """The latest steps without an attempt's early ones; none before there are enough, or while nodes are missing."""
    change = leader.world_size_change
    if change is not None and change.missing_nodes:
        return ()
    steps = [each for each in leader.recent_steps if each.first >= (leader.first_step or 0) + EARLY_STEPS]
    return steps if steps and steps[-1].step - steps[0].first + 1 >= MIN_STEPS else ()


def compare_step(plan: Plan, steps: Sequence[LoggedSteps], metrics: Mapping[str, float]) -> PredictedStep | None:
    """The best layout's step time and that of comparable steps; `metrics` are the run's latest."""
    measured_s = mean_step_s(steps)
    if measured_s is None:
        return None
    waits = [each.data_wait_s for each in steps if each.data_wait_s is not None]
    best = plan.best[0]
    return PredictedStep(
        layout=best.layout,
        machine=plan.machine,
        predicted_s=best.figures.step_s,
        measured_s=measured_s,
        predicted_parts=predicted_parts(best.candidate.time),
        measured_parts=measured_parts(metrics, fmean(waits) if waits else None),
    )


def predicted_parts(time: StepTime) -> dict[WorkPart, float]:
    """Seconds of a predicted step by what a profile tells apart."""
    return {part: sum(getattr(time, name) for name in names) for part, names in _PARTS.items()}
