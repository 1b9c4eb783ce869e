"""Profiles a few steps on request with torch's profiler, and reports the parts of a step's time.

Costs nothing while no profile runs. Works for any module, however wrapped or compiled, since it installs no hooks: a
backward pass is a call of `torch.autograd.backward`, optimizer steps and loader batches label themselves, and every
collective library records its operations. The parts and their sum: metrics/step_breakdown.py. Requests:
rank_coordinator.py.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

from holdfast.findings import Finding, Severity
from holdfast.metrics.step_breakdown import Span, StepTrace, step_breakdown
from holdfast.train.torch_private import enable_record_function, profiler_enabled

STEPS = 5
"""Steps of a profile."""

_STEP, _BACKWARD, _DATA, _CHECKPOINT = (f"holdfast: {name}" for name in ("step", "backward", "data", "checkpoint"))
_LOADER = "enumerate(DataLoader)#"
_OPTIMIZER, _ZEROING = "Optimizer.step#", "Optimizer.zero_grad#"
_HOST_SENDS = re.compile(r"(gloo|mpi|ucc):")
"""A whole collective; NCCL's are kernels."""
_DEVICE_SENDS = re.compile(r"nccl|rccl", re.IGNORECASE)
_ENTERS = re.compile(r"(c10d|_c10d_functional)::|record_param_comms")
_COMPUTES = re.compile(r"(?!c10d::|_c10d_functional::|autograd::engine::)\w[\w.]*::|CompiledFunction|Torch-Compiled")
_OPERATOR, _NAMED = "cpu_op", "user_annotation"
_ASKS = ("cuda_runtime", "cuda_driver")
_ASK_NAMES = re.compile(r"(cuda|cu|hip)[A-Z]")
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


class Profiler:
    """Profiles steps of one rank, one profile at a time."""

    def __init__(self) -> None:
        self._running: profile | None = None
        self._backward: Callable[..., Any] = torch.autograd.backward
        self._steps = 0
        self._findings: list[Finding] = []

    @property
    def running(self) -> bool:
        return self._running is not None

    def take_findings(self) -> list[Finding]:
        """Findings about profiles since the last call."""
        noted, self._findings = self._findings, []
        return noted

    def start(self) -> None:
        """Profile the next steps, if possible; called between two steps."""
        if profiler_enabled():  # a second profiler would end the first
            self._findings = [_profile_failed("the program profiles itself")]
            return
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise it logs errors on every host without a GPU
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_initialized() else [])]
        running = profile(activities=activities, acc_events=True)
        _wait_for_device()
        try:
            running.start()
        except RuntimeError as error:
            self._findings = [_profile_failed(f"{type(error).__name__}: {error}")]
            return
        self._running, self._steps = running, 0
        self._backward, torch.autograd.backward = torch.autograd.backward, self._marked_backward
        self._note_step()

    def step(self, *, last: bool) -> dict[str, float]:
        """End a step; returns the metrics of a profile that this step completes."""
        if self._running is None:
            return {}
        self._steps += 1
        if self._steps < STEPS and not last:
            self._note_step()
            return {}
        _wait_for_device()
        self._note_step()
        try:
            return step_breakdown(_step_trace(self.stop()))
        except Exception as error:  # an error of torch's profiler must not stop training
            self._findings = [_profile_failed(f"{type(error).__name__}: {error}")]
            return {}

    def stop(self) -> list[Any]:
        """Stop profiling; returns the recorded events."""
        running, self._running = self._running, None
        if running is None:
            return []
        torch.autograd.backward = self._backward
        running.stop()
        recorded: Any = running.profiler
        return list(recorded.kineto_results.events())

    def _note_step(self) -> None:
        with record_function(_STEP):
            pass

    def _marked_backward(self, *args: Any, **options: Any) -> Any:
        with record_function(_BACKWARD):
            return self._backward(*args, **options)


def _wait_for_device() -> None:
    """Wait for GPU work, so that it counts for the steps that launched it."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def waiting_for_data() -> AbstractContextManager[object]:
    """Marks that the loop waits for samples."""
    return _mark(_DATA)


def waiting_for_checkpoint() -> AbstractContextManager[object]:
    """Marks that the loop waits for a checkpoint."""
    return _mark(_CHECKPOINT)


@contextmanager
def unrecorded() -> Generator[None]:
    """Excludes the session's own collectives from the training's communication."""
    enable_record_function(False)
    try:
        yield
    finally:
        enable_record_function(True)


def _mark(name: str) -> AbstractContextManager[object]:
    return record_function(name) if profiler_enabled() else nullcontext()


def _step_trace(events: list[Any]) -> StepTrace:
    """The events of torch's profiler, classified by their meaning for a step's time."""
    starts = sorted(event.start_ns() for event in events if event.name() == _STEP)
    thread = next(event.start_thread_id() for event in events if event.name() == _STEP)
    on_host = [(event.name(), event) for event in events if _activity(event) in (_OPERATOR, _NAMED)]
    ours = [(name, _span(event)) for name, event in on_host if event.start_thread_id() == thread]
    operators = [event for event in events if _activity(event) == _OPERATOR and event.start_thread_id() == thread]
    asked = {event.correlation_id(): event.start_ns() for event in events if _activity(event) in _ASKS}
    on_device = [event for event in events if _activity(event) in _ON_DEVICE]
    sent_by_device = [_span(event) for event in on_device if _DEVICE_SENDS.search(event.name())]
    sent_by_host = [_span(event) for name, event in on_host if event.is_async() and _HOST_SENDS.match(name)]
    return StepTrace(
        step_starts=tuple(starts),
        backward=[span for name, span in ours if name == _BACKWARD],
        optimizer=[span for name, span in ours if name.startswith(_OPTIMIZER)],
        zero_grad=[span for name, span in ours if name.startswith(_ZEROING)],
        data=[span for name, span in ours if name == _DATA or name.startswith(_LOADER)],
        checkpoint=[span for name, span in ours if name == _CHECKPOINT],
        operators=[_span(event) for event in operators if _COMPUTES.match(event.name())],
        in_collective=[span for name, span in ours if _ENTERS.match(name)],
        communication=[*sent_by_device, *sent_by_host],
        kernels=[
            (asked.get(event.correlation_id(), event.start_ns()), _span(event))
            for event in on_device
            if not _DEVICE_SENDS.search(event.name())
        ],
    )


def _activity(event: Any) -> str:
    """What kind of activity an event is; torch 2.10 does not say, but its device and name do."""
    if hasattr(event, "activity_type"):
        return event.activity_type()
    if event.device_type() != torch.autograd.DeviceType.CPU:
        return f"gpu_{_NAMED}" if event.is_user_annotation() else _ON_DEVICE[0]
    if event.is_user_annotation():
        return _NAMED
    return _ASKS[0] if _ASK_NAMES.match(event.name()) else _OPERATOR


def _span(event: Any) -> Span:
    return event.start_ns(), event.start_ns() + event.duration_ns()


def _profile_failed(why: str) -> Finding:
    return Finding(
        code="step-profile-failed",
        severity=Severity.WARNING,
        what="the steps could not be profiled; training continues",
        evidence=(why[:500],),
        remedy="ask again while no other profiler is running in the ranks",
    )
