"""Compares the step time that a run measured with the predicted one."""

from __future__ import annotations

from holdfast.plan.predict import Plan
from holdfast.plan.step_time import StepTime
from holdfast.report.predicted_step import PredictedStep, WorkPart, measured_parts
from holdfast.report.run_status import ReplicaStatus

MIN_STEPS = 20
"""Steps of an attempt before its time is compared: the first ones compile and fill caches."""

_PARTS: dict[WorkPart, tuple[str, ...]] = {
    WorkPart.COMPUTATION: ("matmul", "attention", "elementwise", "recompute", "host"),
    WorkPart.COMMUNICATION: ("tensor", "context", "expert", "pipeline", "bubble", "data", "scale"),
    WorkPart.OPTIMIZER: ("optimizer",),
}
"""Parts of StepTime; a profile counts a pipeline's bubble as communication, since the rank waits for another."""


def compare_step(plan: Plan, leader: ReplicaStatus) -> PredictedStep | None:
    """The best layout's step time and the measured one; None before enough steps, or while nodes are missing."""
    measured_s, change = leader.seconds_per_step, leader.world_size_change
    steps = leader.recent_steps
    if measured_s is None or steps[-1].step - steps[0].first + 1 < MIN_STEPS:
        return None
    if change is not None and change.missing_nodes:
        return None
    best = plan.best[0]
    return PredictedStep(
        layout=best.layout,
        machine=plan.machine,
        predicted_s=best.figures.step_s,
        measured_s=measured_s,
        predicted_parts=predicted_parts(best.candidate.time),
        measured_parts=measured_parts(leader.metrics),
    )


def predicted_parts(time: StepTime) -> dict[WorkPart, float]:
    """Seconds of a predicted step by what a profile tells apart."""
    return {part: sum(getattr(time, name) for name in names) for part, names in _PARTS.items()}
