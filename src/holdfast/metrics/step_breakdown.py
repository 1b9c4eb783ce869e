"""Step-time breakdown: from spans of a trace to parts that add up to the step time. Pure functions.

Computation takes precedence: communication counts only while the rank computes nothing; the rest is reported as
overlapped. train/metrics/profiler.py provides the spans.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from itertools import pairwise

from msgspec import Struct

Span = tuple[int, int]
"""Start and end, in nanoseconds of one clock."""
Spans = list[Span]
"""Sorted, disjoint spans."""


class StepPart(StrEnum):
    """Parts of a step's time; the values are parts of metric names."""

    FORWARD = "forward"
    """Everything before the backward pass that is in no other part, including the loss."""
    BACKWARD = "backward"
    COMMUNICATION = "communication"
    """The rank waits for other ranks or for data in transit, and computes nothing."""
    OPTIMIZER = "optimizer"
    """The optimizer's step, preparation after the backward pass such as clipping, and zeroing gradients."""
    DATA = "data"
    CHECKPOINT = "checkpoint"
    OTHER = "other"


OVERLAPPED = "communication_overlapped"
"""Not one of the parts: communication overlapped with computation."""


class StepTrace(Struct, frozen=True, kw_only=True):
    """Trace of some steps of one rank; `step_starts` are their start times, plus the end of the last step."""

    step_starts: tuple[int, ...]
    backward: Sequence[Span] = ()
    optimizer: Sequence[Span] = ()
    zero_grad: Sequence[Span] = ()
    """Zeroing gradients."""
    data: Sequence[Span] = ()
    checkpoint: Sequence[Span] = ()
    operators: Sequence[Span] = ()
    """Operators that the loop's thread ran on the host."""
    communication: Sequence[Span] = ()
    """Collectives and messages in transit."""
    in_collective: Sequence[Span] = ()
    """The loop's thread was in a collective, possibly waiting."""
    kernels: Sequence[tuple[int, Span]] = ()
    """Kernels on the device except communication, each with its launch time on the host."""


def step_breakdown(trace: StepTrace) -> dict[str, float]:
    """The mean metrics per step: seconds of each part, which add up to the step, and of overlapped communication."""
    whole = [(trace.step_starts[0], trace.step_starts[-1])]
    phases = _phases(trace, whole)
    kernels = _by_phase(trace.kernels, phases)
    on_device = _union(span for spans in kernels.values() for span in spans)
    sending = _intersect(_union(trace.communication), whole)
    # With a device, the host runs ahead of it: concurrent work on the host is irrelevant.
    computing = on_device or _union(trace.operators)
    entering = _subtract(_intersect(_union(trace.in_collective), whole), on_device)
    waiting = _subtract(_union([*_subtract(sending, computing), *entering]), phases[StepPart.CHECKPOINT])
    taken = _union([*on_device, *waiting])
    parts = {part: _length(kernels[part]) + _length(_subtract(phases[part], taken)) for part in StepPart}
    parts[StepPart.COMMUNICATION] = _length(waiting)
    steps = len(trace.step_starts) - 1
    spent = {**parts, OVERLAPPED: _length(_subtract(sending, waiting))}
    return {breakdown_metric(part): nanoseconds / steps / 1e9 for part, nanoseconds in spent.items()}


def breakdown_metric(part: str) -> str:
    """The metric name of a part."""
    return f"profile_{part}_s"


def covered_s(spans: Iterable[Span], *, within: Span) -> float:
    """Seconds of a span that others cover."""
    return _length(_intersect(_union(spans), [within])) / 1e9


def _phases(trace: StepTrace, whole: Spans) -> dict[StepPart, Spans]:
    """Phases of the loop's thread; every moment is in exactly one."""
    checkpoint = _intersect(_union(trace.checkpoint), whole)
    data = _subtract(_intersect(_union(trace.data), whole), checkpoint)
    stepping = _union(trace.optimizer)
    optimizer = _subtract(_intersect(_union([*stepping, *trace.zero_grad]), whole), _union([*checkpoint, *data]))
    known = _union([*checkpoint, *data, *optimizer])
    backward = _subtract(_intersect(_union(trace.backward), whole), known)
    marks = sorted(
        [
            *((begin, StepPart.FORWARD) for begin, _ in trace.backward),
            *((begin, StepPart.OPTIMIZER) for begin, _ in stepping),
            *((begin, StepPart.OTHER) for begin, _ in [*data, *checkpoint]),
            *((start, StepPart.OTHER) for start in trace.step_starts),
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
    """Kernels on the device, by the phase of the loop's thread at launch; each moment counts once."""
    whole = _union(span for spans in phases.values() for span in spans)
    marks = sorted((begin, part) for part, spans in phases.items() for begin, _ in spans)
    found: dict[StepPart, Spans] = {part: [] for part in StepPart}
    place = 0
    for launched_at, span in sorted(kernels):
        while place + 1 < len(marks) and marks[place + 1][0] <= launched_at:
            place += 1
        found[marks[place][1]].append(span)
    # Copies to the host for a checkpoint, and those of the next samples, overlap the rest.
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
    """The parts of `spans` outside `others`."""
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
    """The intersection."""
    return _subtract(spans, _subtract(spans, others))


def _length(spans: Spans) -> int:
    return sum(end - begin for begin, end in spans)
