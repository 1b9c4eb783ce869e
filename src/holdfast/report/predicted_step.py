"""The predicted and the measured time of a step, and the part of the step in which they differ. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from msgspec import Struct, field

from holdfast.metrics.metric_text import format_number
from holdfast.metrics.step_breakdown import StepPart, breakdown_metric

NOTABLE = 0.2
"""Difference of the two, as a share of the prediction, from which on it is explained."""


class WorkPart(StrEnum):
    """Parts of a step that are both predicted and measured."""

    COMPUTATION = "computation"
    COMMUNICATION = "communication"
    OPTIMIZER = "optimizer"
    DATA = "waiting for data"
    CHECKPOINT = "checkpoints"
    OTHER = "other work"


_PROFILED: Mapping[StepPart, WorkPart] = {
    StepPart.FORWARD: WorkPart.COMPUTATION,
    StepPart.BACKWARD: WorkPart.COMPUTATION,
    StepPart.COMMUNICATION: WorkPart.COMMUNICATION,
    StepPart.OPTIMIZER: WorkPart.OPTIMIZER,
    StepPart.DATA: WorkPart.DATA,
    StepPart.CHECKPOINT: WorkPart.CHECKPOINT,
    StepPart.OTHER: WorkPart.OTHER,
}


class PredictedStep(Struct, frozen=True, kw_only=True):
    """A run's prediction and what it measured; seconds per step."""

    layout: str
    machine: str
    predicted_s: float
    measured_s: float
    predicted_parts: Mapping[WorkPart, float]
    measured_parts: Mapping[WorkPart, float] = field(default_factory=dict[WorkPart, float])
    """All parts of a profiled step; else waiting for data, which sessions always report."""

    @property
    def difference(self) -> float:
        """How much longer the step takes, as a share of the prediction."""
        return self.measured_s / self.predicted_s - 1

    @property
    def lines(self) -> list[str]:
        """The comparison in words, and from 20 % on where the difference lies."""
        word = "longer" if self.difference > 0 else "shorter"
        said = f"step: {self.measured_s:#.3g} s measured, {self.predicted_s:#.3g} s predicted"
        said += f" for {self.layout} on {self.machine}: {abs(self.difference):.0%} {word}"
        return [said, *self._explanation] if abs(self.difference) >= NOTABLE else [said]

    @property
    def _explanation(self) -> list[str]:
        gap_s = self.measured_s - self.predicted_s
        gaps = {part: spent - self.predicted_parts.get(part, 0.0) for part, spent in self.measured_parts.items()}
        part = max(gaps, key=lambda each: gaps[each] * gap_s, default=None)
        if part is not None and gaps[part] / gap_s >= 0.5:
            spent, expected = self.measured_parts[part], self.predicted_parts.get(part, 0.0)
            return [f"most of it is {part}: {format_number(spent, 3)} s instead of {format_number(expected, 3)} s"]
        if WorkPart.COMPUTATION in gaps:
            return ["no part of the profiled step makes up half of it"]
        return ["`holdfast profile` of a run in progress measures in which part"]


def measured_parts(metrics: Mapping[str, float], data_wait_s: float | None) -> dict[WorkPart, float]:
    """Seconds of the parts of a step: of a profiled one by a run's latest metrics, else the mean wait for data."""
    parts: dict[WorkPart, float] = {}
    for part, kind in _PROFILED.items():
        if (spent := metrics.get(breakdown_metric(part))) is not None:
            parts[kind] = parts.get(kind, 0.0) + spent
    if not parts and data_wait_s is not None:
        parts[WorkPart.DATA] = data_wait_s
    return parts
