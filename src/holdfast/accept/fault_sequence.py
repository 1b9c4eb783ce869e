"""The faults of a restart check: which kinds come at which steps, each when the run has recovered from the last."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

from holdfast.accept.agreement import RestartTerms
from holdfast.errors import HoldfastError
from holdfast.events import (
    AnyEvent,
    AttemptStarted,
    ControllerStarted,
    FaultAction,
    FaultInjected,
    FaultRequested,
    FaultTarget,
    StepCommitted,
)
from holdfast.job.fault_catalog import check_fault
from holdfast.job.run_spec import RunSpec

KINDS: tuple[tuple[FaultTarget, FaultAction], ...] = (
    (FaultTarget.RANK, FaultAction.KILL),
    (FaultTarget.AGENT, FaultAction.KILL),
    (FaultTarget.RANK, FaultAction.RAISE),
    (FaultTarget.CONTROLLER, FaultAction.KILL),
    (FaultTarget.NODE, FaultAction.KILL),
    (FaultTarget.RANK, FaultAction.HANG),
    (FaultTarget.GRADIENT, FaultAction.NAN),
    (FaultTarget.RANK, FaultAction.STOP),
    (FaultTarget.NIC, FaultAction.FAIL),
    (FaultTarget.COLLECTIVE, FaultAction.HANG),
)
"""The kinds of faults, in the order in which they are added; none takes a machine away."""
NO_RESTART = (FaultTarget.CONTROLLER,)
"""Targets whose loss makes no rank restart."""


def plan_faults(
    terms: RestartTerms, accepted: RunSpec, run: str, *, seed: int
) -> tuple[tuple[FaultRequested, ...], tuple[str, ...]]:
    """Faults at random steps, one near the end of each part of the run but the last, and why kinds are left out."""
    chance = random.Random(seed)
    planned: list[FaultRequested] = []
    refused: list[str] = []
    for target, action in KINDS:
        if len(planned) == terms.faults:
            break
        begins = terms.steps_per_fault * (len(planned) + 1)
        index = (
            0
            if not target.is_numbered
            else accepted.job.world_size - 1
            if target.is_rank
            else accepted.job.node_slots - 1
        )
        request = FaultRequested(
            at=time.time(),
            target=target,
            index=index,
            action=action,
            at_step=begins + chance.randint(-terms.steps_per_fault // 4, terms.steps_per_fault // 4),
        )
        try:
            check_fault(request, accepted, run)
        except HoldfastError as error:
            refused.append(f"not possible here: {action} {target}: {error.findings[0].what}")
        else:
            planned.append(request)
    return tuple(planned), tuple(refused)


class FaultSequence:
    """Requests faults one by one, as the events of a run come: two together would count as one failure.

    A fault is over with the first step after the ranks, or the controller, have started again. One that had no effect
    is given up `patience_steps` after its step.
    """

    def __init__(
        self, planned: Sequence[FaultRequested], request: Callable[[FaultRequested], bool], *, patience_steps: int
    ) -> None:
        self._waiting = list(planned)
        self._request = request
        """Returns whether the fault was accepted."""
        self._patience_steps = patience_steps
        self._last: FaultRequested | None = None
        """The fault that is not over yet."""
        self._injected = False
        self._began: ControllerStarted | AttemptStarted | None = None
        """What started again after it."""

    def on_event(self, event: AnyEvent) -> None:
        """Take the next event of the run."""
        match event:
            case FaultInjected():
                self._injected = True
            case ControllerStarted() | AttemptStarted() if self._injected and self._last is not None:
                if isinstance(event, ControllerStarted) == (self._last.target in NO_RESTART):
                    self._began = event
            case StepCommitted():
                if self._last is not None and self._is_over(self._last, event):
                    self._last, self._injected, self._began = None, False, None
                if self._last is None and self._waiting and self._request(self._waiting[0]):
                    self._last = self._waiting.pop(0)
            case _:
                pass

    def _is_over(self, fault: FaultRequested, step: StepCommitted) -> bool:
        match self._began:
            case AttemptStarted(attempt=attempt):
                return step.attempt >= attempt
            case ControllerStarted(at=at):
                return step.started > at
            case None:
                return self._injected and step.step > (fault.at_step or 0) + self._patience_steps
