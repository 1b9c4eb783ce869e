"""Owns how a step's time is split: from what went on in it, as spans of time, to parts that add up to it. Pure.

What a rank computes goes before what it sends: communication is counted only while nothing else of that rank ran, and
what ran beside it is told apart as hidden. Refuses to own where spans come from (train/metrics/profiler.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

Span = tuple[int, int]
"""From one moment to another, in nanoseconds of one clock."""
Spans = list[Span]
"""In order and apart from each other."""


class StepPart(StrEnum):
    """What a step's time goes to; the values are parts of metrics' names."""

    FORWARD = "forward"
    """Whatever comes before a backward pass and is none of the others: also the loss."""
    BACKWARD = "backward"
    COMMUNICATION = "communication"
    """The rank waits for others, or for bytes on their way, and does nothing beside."""
    OPTIMIZER = "optimizer"
    """Its step, what leads to that after the backward pass such as clipping, and setting gradients to zero."""
    DATA = "data"
    CHECKPOINT = "checkpoint"
    OTHER = "other"


OVERLAPPED = "communication_overlapped"
"""Beside the parts: communication that the rank computed beside."""


@dataclass(frozen=True, kw_only=True)
class StepTrace:
    """What went on in some steps of one rank; `starts` are the moments at which they began, and the last one ended."""

    step_starts: tuple[int, ...]
    backward: Sequence[Span] = ()
    optimizer: Sequence[Span] = ()
    zero_grad: Sequence[Span] = ()
    """Setting gradients to zero."""
    data: Sequence[Span] = ()
    checkpoint: Sequence[Span] = ()
    operators: Sequence[Span] = ()
    """What the loop's thread computed on the host."""
    communication: Sequence[Span] = ()
    """Collectives and messages on their way."""
    in_collective: Sequence[Span] = ()
    """The loop's thread was in one of them, and perhaps waited there."""
    kernels: Sequence[tuple[int, Span]] = ()
    """What the device did, but for communication, each with the moment at which the host asked for it."""


def step_breakdown(doings: StepTrace) -> dict[str, float]:
    """The metrics of a step, on average: seconds of each part, which add up to it, and of hidden communication."""
    whole = [(doings.step_starts[0], doings.step_starts[-1])]
    phases = _phases(doings, whole)
    kernels = _by_phase(doings.kernels, phases)
    on_device = _union(span for spans in kernels.values() for span in spans)
    sending = _intersect(_union(doings.communication), whole)
    # Where there is a device the host runs ahead of it: what the host does beside says nothing.
    computing = on_device or _union(doings.operators)
    entering = _subtract(_intersect(_union(doings.in_collective), whole), on_device)
    waiting = _subtract(_union([*_subtract(sending, computing), *entering]), phases[StepPart.CHECKPOINT])
    taken = _union([*on_device, *waiting])
    parts = {part: _length(kernels[part]) + _length(_subtract(phases[part], taken)) for part in StepPart}
    parts[StepPart.COMMUNICATION] = _length(waiting)
    steps = len(doings.step_starts) - 1
    spent = {**parts, OVERLAPPED: _length(_subtract(sending, waiting))}
    return {breakdown_metric(part): nanoseconds / steps / 1e9 for part, nanoseconds in spent.items()}


def breakdown_metric(part: str) -> str:
    """The metric that a part is reported as."""
    return f"profile_{part}_s"


def _phases(doings: StepTrace, whole: Spans) -> dict[StepPart, Spans]:
    """What the loop's thread was at: every moment is in one of these."""
    checkpoint = _intersect(_union(doings.checkpoint), whole)
    data = _subtract(_intersect(_union(doings.data), whole), checkpoint)
    stepping = _union(doings.optimizer)
    optimizer = _subtract(_intersect(_union([*stepping, *doings.zero_grad]), whole), _union([*checkpoint, *data]))
    known = _union([*checkpoint, *data, *optimizer])
    backward = _subtract(_intersect(_union(doings.backward), whole), known)
    marks = sorted(
        [
            *((begin, StepPart.FORWARD) for begin, _ in doings.backward),
            *((begin, StepPart.OPTIMIZER) for begin, _ in stepping),
            *((begin, StepPart.OTHER) for begin, _ in [*data, *checkpoint]),
            *((start, StepPart.OTHER) for start in doings.step_starts),
        ]
    )
    between: dict[StepPart, Spans] = {part: [] for part in StepPart}
    for (before, _), (after, towards) in pairwise(marks):
        between[towards].append((before, after))
    rest = {
        part: _subtract(_intersect(_union(spans), whole), _union([*known, *backward]))
        for part, spans in between.items()
    }
    return rest | {
        StepPart.BACKWARD: backward,
        StepPart.OPTIMIZER: _union([*optimizer, *rest[StepPart.OPTIMIZER]]),
        StepPart.DATA: data,
        StepPart.CHECKPOINT: checkpoint,
    }


def _by_phase(kernels: Sequence[tuple[int, Span]], phases: dict[StepPart, Spans]) -> dict[StepPart, Spans]:
    """What the device did, by what the loop's thread was at when it asked for it; each moment counts once."""
    whole = _union(span for spans in phases.values() for span in spans)
    marks = sorted((begin, part) for part, spans in phases.items() for begin, _ in spans)
    found: dict[StepPart, Spans] = {part: [] for part in StepPart}
    place = 0
    for asked, span in sorted(kernels):
        while place + 1 < len(marks) and marks[place + 1][0] <= asked:
            place += 1
        found[marks[place][1]].append(span)
    # Copies to the host for a checkpoint, and those of the next samples, run beside the rest.
    counted: Spans = []
    for part in sorted(StepPart, key=lambda part: part in (StepPart.CHECKPOINT, StepPart.DATA, StepPart.OTHER)):
        found[part] = _subtract(_intersect(_union(found[part]), whole), counted)
        counted = _union([*counted, *found[part]])
    return found


def _union(spans: Iterable[Span]) -> Spans:
    joined: Spans = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        elif begin < end:
            joined.append((begin, end))
    return joined


def _subtract(spans: Spans, others: Spans) -> Spans:
    """What of the first is in none of the others."""
    left: Spans = []
    place = 0
    for begin, end in spans:
        while place < len(others) and others[place][1] <= begin:
            place += 1
        at, ahead = begin, place
        while at < end and ahead < len(others) and others[ahead][0] < end:
            if at < others[ahead][0]:
                left.append((at, others[ahead][0]))
            at = max(at, others[ahead][1])
            ahead += 1
        if at < end:
            left.append((at, end))
    return left


def _intersect(spans: Spans, others: Spans) -> Spans:
    """What is in both."""
    return _subtract(spans, _subtract(spans, others))


def _length(spans: Spans) -> int:
    return sum(end - begin for begin, end in spans)
