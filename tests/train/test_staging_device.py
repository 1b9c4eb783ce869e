"""Copies from a device run beside its work: no thread waits for the training, and a stall is the device's own."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tests.train.fake_accelerator import FakeAccelerator

from holdfast.train.accelerator import bind_like_this_thread
from holdfast.train.checkpoint import staging
from holdfast.train.checkpoint.staging import StagingBuffer
from holdfast.train.checkpoint.stall_clock import StallClock
from holdfast.train.checkpoint.train_state import TrainState


class Loop:
    """A model on the device, with a buffer that its forward pass changes."""

    def __init__(self, device: FakeAccelerator) -> None:
        self.device = device
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            device.place(tensor)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.buffer = StagingBuffer(
            TrainState(model=self.model, optimizer=self.optimizer, find_accelerator=lambda _: device)
        )
        self.writer = ThreadPoolExecutor(1, thread_name_prefix="writer")

    def forward(self) -> None:
        self.model(torch.randn(8, 4)).sum().backward()

    def values(self) -> list[torch.Tensor]:
        return [each.detach().clone() for each in self.model.state_dict().values()]


@pytest.fixture
def device() -> FakeAccelerator:
    return FakeAccelerator(copy_s=0.5)


def equal(staged: dict[str, Any], values: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, staged["model"].values(), values))


def test_device_copies_while_the_loop_goes_on_and_its_next_step_waits_on_the_device(device: FakeAccelerator) -> None:
    loop = Loop(device)
    before = loop.values()
    staged = loop.buffer.start_copy()
    assert device.waits == []  # all is up to the device, which has done nothing yet
    finished = loop.writer.submit(loop.buffer.finish_copy)
    loop.forward()  # changes the statistics of BatchNorm
    device.run()
    assert finished.result(20)
    assert equal(staged, before)
    loop.optimizer.step()
    assert {name.partition("_")[0] for name in device.waits} == {"writer"}


def test_step_is_ordered_after_copies_that_are_not_done_and_the_device_counts_the_stall(
    device: FakeAccelerator,
) -> None:
    loop = Loop(device)
    loop.buffer.start_copy()
    finished = loop.writer.submit(loop.buffer.finish_copy)
    loop.buffer._copied.wait(20)
    loop.forward()
    loop.optimizer.step()  # does not wait in this thread: the device has not even begun
    assert "MainThread" not in device.waits
    assert (loop.buffer.stalls.take_s(), loop.buffer.stalls.settled) == (0.0, False)
    device.run(3.0)
    copies = len([*loop.model.state_dict().values()])
    assert loop.buffer.stalls.take_s() == pytest.approx(0.5 * copies)
    assert finished.result(20)


def test_host_memory_that_cannot_be_pinned_is_reported_and_the_writer_waits_instead_of_the_loop() -> None:
    device = FakeAccelerator(pin_error="CUDA error: out of memory")
    loop = Loop(device)
    before = loop.values()
    staged = loop.buffer.start_copy()
    loop.forward()
    finding = loop.buffer.take_finding()
    assert finding is not None
    assert (finding.code, loop.buffer.take_finding()) == ("host-memory-not-pinned", None)
    assert "out of memory" in finding.evidence[0]
    finished = loop.writer.submit(loop.buffer.finish_copy)
    loop.buffer._copied.wait(20)
    device.run()
    assert finished.result(20)
    assert equal(staged, before)
    assert "MainThread" not in device.waits


def test_more_than_the_device_has_room_for_twice_is_waited_for(
    device: FakeAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "MAX_CLONED_BYTES", 0)
    loop = Loop(device)
    before = loop.values()
    started = loop.writer.submit(lambda: (device.bind_thread(), loop.buffer.start_copy())[1])
    while not device.waits:
        assert not started.done()
    device.run()
    staged = started.result(20)
    loop.forward()
    finished = loop.writer.submit(loop.buffer.finish_copy)
    loop.buffer._copied.wait(20)
    device.run()
    assert finished.result(20)
    assert equal(staged, before)


def test_buffer_is_pinned_once_and_again_where_the_layout_changes(device: FakeAccelerator) -> None:
    loop = Loop(device)
    loop.writer.submit(loop.buffer.prepare, loop.buffer._train_state.tensors()).result(20)
    (first,) = device.pinned
    loop.buffer.start_copy()
    assert device.pinned == {first}
    device.run()
    loop.writer.submit(loop.buffer.finish_copy).result(20)
    extra = torch.nn.Parameter(device.place(torch.zeros(1000)))
    loop.model.register_parameter("later", extra)
    loop.optimizer.add_param_group({"params": [extra]})
    loop.buffer.start_copy()
    assert len(device.pinned) == 1


def test_loop_that_waits_while_the_device_has_work_stalls_nothing(device: FakeAccelerator) -> None:
    stalls = StallClock(device)
    with stalls.waiting():
        pass  # for however long: the device reaches both marks after the work that it has
    assert stalls.take_s() == 0.0
    assert not stalls.settled
    device.run(5.0)
    assert stalls.take_s() == 0.0
    assert stalls.settled


def test_loop_that_waits_while_the_device_is_idle_stalls_it(device: FakeAccelerator) -> None:
    stalls = StallClock(device)
    with stalls.waiting():
        device.run(1.0)
        device.run(2.0)
    device.run()
    assert stalls.take_s() == 2.0


def test_loop_on_the_host_is_measured_itself() -> None:
    now = iter((1.0, 3.5))
    stalls = StallClock(None, lambda: next(now))
    with stalls.waiting():
        pass
    assert (stalls.take_s(), stalls.take_s(), stalls.settled) == (2.5, 0.0, True)


class Gpus(threading.local):
    """GPUs as CUDA has them: every new thread uses the first."""

    device = 0

    def is_initialized(self) -> bool:
        return True

    def current_device(self) -> int:
        return self.device

    def set_device(self, device: int) -> None:
        self.device = device


def test_threads_of_a_pool_use_the_gpu_of_the_thread_that_made_it() -> None:
    gpus = Gpus()
    gpus.set_device(3)
    for initializer, expected in ((None, 0), (bind_like_this_thread(gpus), 3)):
        with ThreadPoolExecutor(1, initializer=initializer) as pool:
            assert pool.submit(gpus.current_device).result(20) == expected
