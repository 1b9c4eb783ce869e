"""Profiles a few steps on request with torch's profiler, and reports the parts of a step's time.

Costs nothing while no profile runs. Works for any module, however wrapped or compiled, since it installs no hooks: a
backward pass is a call of `torch.autograd.backward`, optimizer steps and loader batches label themselves, and every
collective library records its operations. The parts and their sum: metrics/step_breakdown.py. Requests:
rank_coordinator.py.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

from holdfast.findings import Finding, Severity
from holdfast.metrics.profiler_events import (
    BACKWARD,
    CHECKPOINT,
    DATA,
    LAUNCHES,
    NAMED,
    ON_DEVICE,
    OPERATOR,
    STEP,
    ProfilerEvent,
    step_trace,
)
from holdfast.metrics.step_breakdown import step_breakdown
from holdfast.train.torch_private import enable_record_function, profiler_enabled

STEPS = 5
"""Steps of a profile."""

_ASKS = re.compile(r"(cuda|cu|hip)[A-Z]")


class Profiler:
    """Profiles steps of one rank, one profile at a time."""

    def __init__(self) -> None:
        self._running: profile | None = None
        self._backward: Callable[..., Any] = torch.autograd.backward
        self._steps = 0
        self._findings: list[Finding] = []
        self._ended: profile | None = None
        """The last complete profile, until its trace is taken."""

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
            ended = self.stop()
            recorded: Any = ended.profiler if ended else None
            spent = step_breakdown(step_trace(_events(recorded.kineto_results.events())))
            self._ended = ended
            return spent
        except Exception as error:  # an error of torch's profiler must not stop training
            self._findings = [_profile_failed(f"{type(error).__name__}: {error}")]
            return {}

    def take_trace(self) -> Callable[[str], None] | None:
        """What writes the trace of the last profile to a path; None without one, and the second time."""
        ended, self._ended = self._ended, None
        return None if ended is None else ended.export_chrome_trace

    def stop(self) -> profile | None:
        """Stop profiling; returns the profile, if one was running."""
        running, self._running = self._running, None
        if running is not None:
            torch.autograd.backward = self._backward
            running.stop()
        return running

    def _note_step(self) -> None:
        with record_function(STEP):
            pass

    def _marked_backward(self, *args: Any, **options: Any) -> Any:
        with record_function(BACKWARD):
            return self._backward(*args, **options)


def _wait_for_device() -> None:
    """Wait for GPU work, so that it counts for the steps that launched it."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def waiting_for_data() -> AbstractContextManager[object]:
    """Marks that the loop waits for samples."""
    return _mark(DATA)


def waiting_for_checkpoint() -> AbstractContextManager[object]:
    """Marks that the loop waits for a checkpoint."""
    return _mark(CHECKPOINT)


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


def _events(recorded: Iterable[Any]) -> list[ProfilerEvent]:
    return [
        ProfilerEvent(
            name=event.name(),
            activity=_activity(event),
            thread=event.start_thread_id(),
            begin=event.start_ns(),
            end=event.start_ns() + event.duration_ns(),
            correlation=event.correlation_id(),
            is_async=event.is_async(),
        )
        for event in recorded
    ]


def _activity(event: Any) -> str:
    """What kind of activity an event is; torch 2.10 does not say, but its device and name do."""
    if hasattr(event, "activity_type"):
        return event.activity_type()
    if event.device_type() != torch.autograd.DeviceType.CPU:
        return f"gpu_{NAMED}" if event.is_user_annotation() else ON_DEVICE[0]
    if event.is_user_annotation():
        return NAMED
    return LAUNCHES[0] if _ASKS.match(event.name()) else OPERATOR


def _profile_failed(why: str) -> Finding:
    return Finding(
        code="step-profile-failed",
        severity=Severity.WARNING,
        what="the steps could not be profiled; training continues",
        evidence=(why[:500],),
        remedy="ask again while no other profiler is running in the ranks",
    )
