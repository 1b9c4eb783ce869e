"""Measures how one rank spends its steps, apart from the waiting for others in the reduction of gradients.

Hooks of the model and of its optimizer mark where a phase ends. What ends with the last of a rank's own gradients is
its own; what follows until DDP has reduced them is communication. A callback that is queued when the backward pass
begins runs between the two: DDP queues its waiting one later. On a GPU marks are events in its stream, read once it
has reached them; the host never waits. On the host, time in which the loop's thread waits for a CPU is left out.

Sharded models (FSDP) wait for others within forward and backward, and are not measured.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from holdfast.clock import Clock
from holdfast.protocol.phase_times import Phase, PhaseTimes
from holdfast.train.accelerator import Accelerator, Mark, accelerator_of
from holdfast.train.metrics.cpu_wait import CpuWait
from holdfast.train.torch_private import after_backward

WINDOW, FEWEST = 5, 3
"""Steps of which medians are sent, and the least of them that must be known."""
MAX_UNREAD = 4
"""Steps whose marks a GPU has not reached; beyond them the oldest is not measured."""

_PLACES = {phase: place for place, phase in enumerate(Phase)}
_Moment = float | Mark


class _Step(NamedTuple):
    step: int
    began: _Moment
    marks: list[tuple[Phase, _Moment]]
    """In order, each with the phase that ends there."""
    arrived: float
    data_s: float
    wait_s: float
    loader: str
    cpu_wait_s: float


class PhaseClock:
    """The phases of one rank's steps."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        clock: Callable[[], float] | None = None,
        cpu_wait: Callable[[], float] | None = None,
        find_accelerator: Callable[[torch.device], Accelerator | None] = accelerator_of,
    ) -> None:
        """Install the hooks, unless the model is sharded."""
        first = next(iter(model.parameters()), None)
        device = None if first is None else find_accelerator(first.device)
        self._clock = clock or Clock()
        self._cpu_wait = cpu_wait or CpuWait()
        self._now: Callable[[], _Moment] = self._on_cpu if device is None else device.mark
        self._on_host = device is None
        self._waited_s = 0.0
        """What was last read of the thread's waits for a CPU."""
        self._began = self._now()
        self._marks: list[tuple[Phase, _Moment]] = []
        self._arrived_at = 0.0
        self._waited_at_arrival = self._waited_at_end = self._waited_s
        self._whole = False
        """Whether nothing but a step has happened since the last."""
        self._unread: deque[_Step] = deque()
        self._window: list[tuple[_Step, list[float]]] = []
        self._own_s: deque[float] = deque(maxlen=WINDOW)
        """The rank's own seconds of the last steps that were read."""
        self.after_reduction: Callable[[], None] | None = None
        """What a drill has happen in each step's communication, once all ranks' gradients are there."""
        self._handles: list[Any] = []
        if first is not None and not any(isinstance(each, DTensor) for each in model.parameters()):
            self._handles = [
                model.register_forward_pre_hook(self._before_forward),
                model.register_forward_hook(self._after_forward),
                optimizer.register_step_post_hook(self._after_update),
            ]

    @property
    def own_s(self) -> float:
        """Seconds of a step that are the rank's own, the median of the last; 0 before one is known."""
        return statistics.median(self._own_s or (0.0,))

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def discard(self) -> None:
        """Something else than a step is about to happen: a checkpoint, an evaluation."""
        self._whole = False

    def end_step(self, step: int, *, data_s: float = 0.0, wait_s: float = 0.0, loader: str = "") -> PhaseTimes | None:
        """End a step in which the loop waited `data_s` for samples; the times of a window that is complete with it."""
        now = self._now()
        began, self._began = self._began, now
        marks, self._marks = self._marks, []
        whole, self._whole = self._whole, True
        if not self._on_host:
            self._waited_s = self._cpu_wait()
        waited_s, self._waited_at_end = self._waited_s - self._waited_at_end, self._waited_s
        if whole and any(phase is Phase.BACKWARD for phase, _ in marks):
            marks.append((Phase.HOST, now))
            self._unread.append(_Step(step, began, marks, self._arrived_at, data_s, wait_s, loader, waited_s))
            if len(self._unread) > MAX_UNREAD:
                self._unread.popleft()
        times = None
        while self._unread and _is_reached(self._unread[0].marks[-1][1]):
            times = self._read(self._unread.popleft()) or times
        return times

    def _read(self, one: _Step) -> PhaseTimes | None:
        seconds = _seconds(one)
        self._own_s.append(sum(seconds) - seconds[_PLACES[Phase.COMMUNICATION]])
        # Windows end at the same steps on all ranks.
        if self._window and one.step // WINDOW != self._window[0][0].step // WINDOW:
            self._window = []
        self._window.append((one, seconds))
        if one.step % WINDOW != WINDOW - 1:
            return None
        window, self._window = self._window, []
        if len(window) < FEWEST:
            return None
        longest = max((step for step, _ in window), key=lambda step: step.wait_s)
        return PhaseTimes(
            first_step=one.step - WINDOW + 1,
            last_step=one.step,
            phases=tuple(map(statistics.median, zip(*(seconds for _, seconds in window), strict=True))),
            arrived=sum(step.arrived for step, _ in window) / len(window) if self._on_host else 0.0,
            longest_wait_s=longest.wait_s,
            loader=longest.loader,
            cpu_wait_s=statistics.median(step.cpu_wait_s for step, _ in window),
        )

    def _on_cpu(self) -> float:
        """Seconds without those in which the thread waited for a CPU: that is not the rank's own time."""
        self._waited_s = self._cpu_wait()
        return self._clock() - self._waited_s

    def _mark(self, ends: Phase) -> None:
        self._marks.append((ends, self._now()))

    def _before_forward(self, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            self._mark(Phase.HOST)

    def _after_forward(self, _module: nn.Module, _given: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if (tensor := _differentiable(output)) is not None:
            tensor.register_hook(self._backward_began)
        else:
            self._mark(Phase.FORWARD)

    def _backward_began(self, _gradient: torch.Tensor) -> None:
        self._mark(Phase.FORWARD)
        after_backward(self._arrived)

    def _arrived(self) -> None:
        now = self._now()
        self._marks.append((Phase.BACKWARD, now))
        if isinstance(now, float):  # without waits for a CPU since the last arrival
            self._arrived_at = now + self._waited_at_arrival
            self._waited_at_arrival = self._waited_s
        after_backward(self._reduced)

    def _reduced(self) -> None:
        if self.after_reduction is not None:
            self.after_reduction()
        self._mark(Phase.COMMUNICATION)

    def _after_update(self, *_: Any) -> None:
        self._mark(Phase.OPTIMIZER)


def _differentiable(output: Any) -> torch.Tensor | None:
    """The first tensor of a model's output from which a backward pass can begin."""
    if isinstance(output, torch.Tensor):
        return output if output.requires_grad else None
    if isinstance(output, Mapping):
        inner = cast("Mapping[str, Any]", output).values()
    elif isinstance(output, list | tuple):
        inner = cast("list[Any]", output)
    else:
        return None
    return next((found for each in inner if (found := _differentiable(each)) is not None), None)


def _is_reached(moment: _Moment) -> bool:
    return isinstance(moment, float | int) or moment.reached()


def _between(earlier: _Moment, later: _Moment) -> float:
    if isinstance(earlier, float | int) or isinstance(later, float | int):
        return cast("float", later) - cast("float", earlier)
    return earlier.seconds_until(later)


def _seconds(one: _Step) -> list[float]:
    """Seconds of each phase; waits for data are part of what precedes a forward pass."""
    seconds = [0.0] * len(_PLACES)
    before = one.began
    for phase, moment in one.marks:
        seconds[_PLACES[phase]] += _between(before, moment)
        before = moment
    data_s = min(one.data_s, seconds[_PLACES[Phase.HOST]])
    seconds[_PLACES[Phase.DATA]] = data_s
    seconds[_PLACES[Phase.HOST]] -= data_s
    return seconds
