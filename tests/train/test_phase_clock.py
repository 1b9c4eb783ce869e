"""Phases of a step add up to it; what a rank waits for others, for samples or for a CPU is told apart from its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
from tests.train.fake_accelerator import FakeAccelerator
from torch import nn

from holdfast.protocol.phase_times import Phase, PhaseTimes
from holdfast.train.metrics.cpu_wait import CpuWait
from holdfast.train.metrics.phase_clock import PhaseClock
from holdfast.train.torch_private import after_backward


class Loop:
    """A loop whose phases take seconds of a clock that the test owns."""

    def __init__(
        self,
        advance: Callable[[float], None],
        *,
        clock: Callable[[], float] | None = None,
        cpu_wait: Callable[[], float] | None = None,
        device: FakeAccelerator | None = None,
    ) -> None:
        self.model = nn.Linear(2, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.advance = advance
        self.clock = PhaseClock(
            self.model,
            self.optimizer,
            clock=clock,
            cpu_wait=cpu_wait,
            find_accelerator=partial(found, device),
        )
        self.model.register_forward_pre_hook(self.forward)
        cast("Any", self.model.weight).register_hook(self.backward)
        self.optimizer.register_step_pre_hook(self.update)

    def forward(self, *_: object) -> None:
        self.advance(2.0)

    def update(self, *_: object) -> None:
        self.advance(0.5)

    def backward(self, _gradient: torch.Tensor) -> None:
        self.advance(3.0)
        after_backward(lambda: self.advance(0.25))  # as DDP waits: in a callback that is queued in the backward pass

    def step(self, number: int, *, data_s: float = 1.0) -> PhaseTimes | None:
        self.advance(data_s + 0.125)
        self.model(torch.ones(2)).sum().backward()
        self.optimizer.step()
        return self.clock.end_step(number, data_s=data_s, wait_s=data_s, loader="Loader")


def found(device: FakeAccelerator | None, _place: torch.device) -> FakeAccelerator | None:
    return device


class HostClock:
    def __init__(self) -> None:
        self.now_s = 1000.0
        self.waited_s = 0.0

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


EXPECTED = {
    Phase.DATA: 1.0,
    Phase.FORWARD: 2.0,
    Phase.BACKWARD: 3.0,
    Phase.OPTIMIZER: 0.5,
    Phase.COMMUNICATION: 0.25,
    Phase.HOST: 0.125,
}


def host_loop() -> tuple[HostClock, Loop]:
    host = HostClock()
    return host, Loop(host.advance, clock=lambda: host.now_s, cpu_wait=lambda: host.waited_s)


def test_phases_of_a_window_are_told_apart_and_add_up() -> None:
    _, loop = host_loop()
    sent = [times for number in range(1, 15) if (times := loop.step(number))]
    assert [(each.first_step, each.last_step) for each in sent] == [(0, 4), (5, 9), (10, 14)]
    for each in sent:
        assert {phase: each.of(phase) for phase in Phase} == EXPECTED
        assert (each.step_s, each.own_s, each.loader, each.longest_wait_s) == (6.875, 6.625, "Loader", 1.0)


def test_own_seconds_of_a_step_are_those_of_most_steps_not_of_one_that_took_long() -> None:
    _, loop = host_loop()
    for number in range(1, 7):
        loop.step(number, data_s=50.0 if number == 6 else 1.0)
    assert loop.clock.own_s == 6.625


def test_wait_for_a_cpu_is_in_no_phase() -> None:
    host, loop = host_loop()

    def wait(*_: object) -> None:
        host.now_s += 7.0
        host.waited_s += 7.0

    loop.model.register_forward_pre_hook(wait)
    (times,) = [times for number in range(5, 10) if (times := loop.step(number))]
    assert {phase: times.of(phase) for phase in Phase} == EXPECTED
    assert times.cpu_wait_s == 7.0


def test_step_with_other_work_and_window_with_few_steps_are_left_out() -> None:
    _, loop = host_loop()
    for number in range(5, 8):
        loop.step(number, data_s=30.0)
        loop.clock.discard()
    assert [loop.step(number) for number in (8, 9)] == [None, None]
    times = [loop.step(number) for number in range(10, 15)][-1]
    assert times is not None
    assert times.of(Phase.DATA) == 1.0


def test_step_without_a_backward_pass_and_closed_clock_measure_nothing() -> None:
    _, loop = host_loop()
    assert [loop.clock.end_step(number) for number in range(10)] == [None] * 10
    loop.clock.close()
    assert [loop.step(number) for number in range(10)] == [None] * 10


def test_times_of_a_device_are_read_once_it_has_reached_them() -> None:
    device = FakeAccelerator()
    loop = Loop(HostClock().advance, device=device)
    assert [loop.step(number) for number in (5, 6, 7, 8)] == [None] * 4
    device.run()
    assert loop.step(9) is None
    device.run()
    times = loop.step(10)
    assert times is not None
    assert (times.first_step, times.last_step, times.arrived) == (5, 9, 0.0)
    assert device.waits == []


def test_compiled_module_runs_in_one_graph_although_its_inner_module_is_timed() -> None:
    model = nn.Linear(2, 2)
    clock = PhaseClock(model, torch.optim.SGD(model.parameters(), lr=0.1))
    whole = torch.compile(model, fullgraph=True, backend="eager")
    whole(torch.ones(2)).sum().backward()
    assert model.weight.grad is not None
    clock.close()


def test_wait_for_a_cpu_never_decreases_and_is_zero_once_closed() -> None:
    waited = CpuWait()
    before = waited()
    assert waited() >= before >= 0.0
    waited.close()
    assert waited() == 0.0


@pytest.mark.parametrize("text", ["", "nonsense", "1"])
def test_unknown_scheduler_statistics_count_nothing(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("proc") / "schedstat"
    path.write_text(text)
    assert CpuWait(path)() == 0.0
    assert CpuWait(path.parent / "missing")() == 0.0
