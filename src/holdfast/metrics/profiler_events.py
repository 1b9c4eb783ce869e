"""Classifies the events of torch's profiler by their meaning for a step's time.

They come from the profiler itself (train/metrics/profiler.py) or from a trace file (rank_trace.py).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from msgspec import Struct

from holdfast.metrics.step_breakdown import Span, StepTrace

STEP, BACKWARD, DATA, CHECKPOINT = (f"holdfast: {name}" for name in ("step", "backward", "data", "checkpoint"))
"""What holdfast records itself; `STEP` is between two steps."""
OPERATOR, NAMED = "cpu_op", "user_annotation"
LAUNCHES = ("cuda_runtime", "cuda_driver")
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
"""Values of `activity`."""

_LOADER = "enumerate(DataLoader)#"
_OPTIMIZER, _ZEROING = "Optimizer.step#", "Optimizer.zero_grad#"
_HOST_SENDS = re.compile(r"(gloo|mpi|ucc):")
"""A whole collective; NCCL's are kernels."""
_DEVICE_SENDS = re.compile(r"nccl|rccl", re.IGNORECASE)
_ENTERS = re.compile(r"(c10d|_c10d_functional)::|record_param_comms")
_COMPUTES = re.compile(r"(?!c10d::|_c10d_functional::|autograd::engine::)\w[\w.]*::|CompiledFunction|Torch-Compiled")


class ProfilerEvent(Struct, frozen=True, kw_only=True):
    """One event; times in nanoseconds of one clock."""

    name: str
    activity: str
    thread: int | str
    begin: int
    end: int
    correlation: int = 0
    """Shared by a kernel and its launch."""
    is_async: bool = False

    @property
    def span(self) -> Span:
        return self.begin, self.end

    @property
    def is_communication(self) -> bool:
        """Whether data is in transit meanwhile, or awaited."""
        if self.activity in ON_DEVICE:
            return bool(_DEVICE_SENDS.search(self.name))
        return self.is_async and self.activity in (OPERATOR, NAMED) and bool(_HOST_SENDS.match(self.name))


def loop_thread(events: Sequence[ProfilerEvent]) -> int | str:
    """The thread that runs the steps; raises ValueError if no step was recorded."""
    for event in events:
        if event.name == STEP:
            return event.thread
    raise ValueError("no step is recorded")


def step_trace(events: Sequence[ProfilerEvent]) -> StepTrace:
    """The spans that a step's time is made of."""
    thread = loop_thread(events)
    on_host = [event for event in events if event.activity in (OPERATOR, NAMED)]
    ours = [(event.name, event.span) for event in on_host if event.thread == thread]
    operators = [event for event in events if event.activity == OPERATOR and event.thread == thread]
    launched = {event.correlation: event.begin for event in events if event.activity in LAUNCHES}
    return StepTrace(
        step_starts=tuple(sorted(event.begin for event in events if event.name == STEP)),
        backward=[span for name, span in ours if name == BACKWARD],
        optimizer=[span for name, span in ours if name.startswith(_OPTIMIZER)],
        zero_grad=[span for name, span in ours if name.startswith(_ZEROING)],
        data=[span for name, span in ours if name == DATA or name.startswith(_LOADER)],
        checkpoint=[span for name, span in ours if name == CHECKPOINT],
        operators=[event.span for event in operators if _COMPUTES.match(event.name)],
        in_collective=[span for name, span in ours if _ENTERS.match(name)],
        communication=[event.span for event in events if event.is_communication],
        kernels=[
            (launched.get(event.correlation, event.begin), event.span)
            for event in events
            if event.activity in ON_DEVICE and not event.is_communication
        ],
    )
