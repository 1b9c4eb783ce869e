"""Decides which committed steps have their own line in the log, and which share one.

The first `FULL_RATE_LINES` steps of a replica each have a line, and so has the first of every attempt. From then on a
line is written when a thousandth of the run's age has passed since the last one, at the latest after `MAX_INTERVAL_S`;
it stands for all steps since. The times of a line are sums over its steps, so accounting, speed and step numbers stay
exact; metrics are those of its last step. A step with metrics that only few steps have gets a line. Other events are
written after the steps before them.

With steps of 10 s (260,000 in 30 days) that is 1,000 lines for the first 2.8 hours, 2,000 until 30 s are a thousandth
of the run's age (8.3 hours), then one per 30 s: 89,000 lines, 20 MiB. However short a step is, there are no more than
1,000 + 1,000 · ln(30,000) + 30 days / 30 s = 98,000.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec
from msgspec import Struct

from holdfast.events import AnyEvent, CheckpointCommitted, StepCommitted
from holdfast.metrics.metric_catalog import has_requested, sticky_metrics

FULL_RATE_LINES = 1000
"""Lines before steps begin to share them; 1 / FULL_RATE_LINES of a run's age may pass without a line."""

MAX_INTERVAL_S = 30.0
"""Maximum seconds that steps share a line; `holdfast status` of a live run is no older."""


def min_interval_s(lines: int, age_s: float) -> float:
    """Minimum seconds between two step lines, in a run of this age that has so many of them."""
    return 0.0 if lines < FULL_RATE_LINES else min(MAX_INTERVAL_S, age_s / FULL_RATE_LINES)


class StepSampler(Struct):
    """The written and held-back steps of one replica."""

    lines: int = 0
    last_written: StepCommitted | None = None
    """The last line written."""
    pending: StepCommitted | None = None
    """Steps that are committed and not written yet, merged into one line."""

    def on_written(self, line: StepCommitted) -> StepCommitted:
        """Record a written line."""
        self.lines += 1
        self.last_written = line
        return line

    def add(
        self, step: StepCommitted, *, age_s: float, highest: int, at_once: bool = False, low_space: bool = False
    ) -> list[StepCommitted]:
        """The lines to write for a newly committed step; `highest` is the highest step in the log.

        Recomputed steps share no line with new ones: they are accounted separately. With `low_space` few lines are
        written.
        """
        lines: list[StepCommitted] = []
        if self.pending is not None and not _can_merge(self.pending, step, highest):
            lines += self.flush()
        self.pending = step if self.pending is None else _merge(self.pending, step)
        last, least_s = self.last_written, MAX_INTERVAL_S if low_space else min_interval_s(self.lines, age_s)
        at_once = at_once or has_requested(step.metrics)
        if at_once or last is None or last.attempt != step.attempt or not 0 <= step.ended - last.ended < least_s:
            lines += self.flush()
        return lines

    def flush(self) -> list[StepCommitted]:
        """The line for the held-back steps, to be written immediately; empty if there are none."""
        pending, self.pending = self.pending, None
        return [] if pending is None else [self.on_written(pending)]


def merge_steps(waiting: Iterable[AnyEvent], highest: Callable[[int], int]) -> tuple[AnyEvent, ...]:
    """Merge the step events of a batch that waits for log space into as few lines as possible.

    Checkpoints may then follow later steps; all other events keep their order. `highest` takes a replica.
    """
    merged: list[AnyEvent] = []
    open_lines: dict[int, int] = {}
    for event in waiting:
        if isinstance(event, StepCommitted):
            index = open_lines.get(event.replica, len(merged))
            pending = merged[index] if index < len(merged) else None
            if isinstance(pending, StepCommitted) and _can_merge(pending, event, highest(event.replica)):
                merged[index] = _merge(pending, event)
                continue
            open_lines[event.replica] = len(merged)
        elif not isinstance(event, CheckpointCommitted):
            open_lines.clear()
        merged.append(event)
    return tuple(merged)


def first_at(event: AnyEvent) -> float:
    """When an event happened, in Unix seconds; of steps that share a line, when the first of them ended."""
    if isinstance(event, StepCommitted):
        return event.started + (event.ended - event.started) / event.steps
    return event.at


def _can_merge(pending: StepCommitted, step: StepCommitted, highest: int) -> bool:
    follows = step.attempt == pending.attempt and step.first == pending.step + 1
    return follows and (pending.step <= highest) == (step.step <= highest)


def _merge(pending: StepCommitted, step: StepCommitted) -> StepCommitted:
    checkpoint_s = pending.checkpoint_s + step.checkpoint_s
    return msgspec.structs.replace(
        step,
        steps=pending.steps + step.steps,
        started=pending.started,
        checkpoint_s=checkpoint_s,
        metrics=sticky_metrics(pending.metrics) | step.metrics,
    )
