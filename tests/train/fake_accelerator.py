"""A device on the host: work given to it waits until the test has it done, as on a GPU that is busy."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from holdfast.train.accelerator import Mark, Pairs


class FakeMark:
    def __init__(self, device: FakeAccelerator) -> None:
        self.device = device
        self.at_s: float | None = None
        """On the device's clock; None until it is reached."""

    def reached(self) -> bool:
        return self.at_s is not None

    def wait(self) -> None:
        self.device.waits.append(threading.current_thread().name)
        with self.device.changed:
            assert self.device.changed.wait_for(self.reached, 20), "the device was never asked to do its work"

    def seconds_until(self, later: Mark) -> float:
        assert isinstance(later, FakeMark)
        assert self.at_s is not None
        assert later.at_s is not None
        return later.at_s - self.at_s


class FakeAccelerator:
    """Two streams, of the training and of copies; tensors made by `tensor` count as in its memory.

    The training's stream runs when the test calls `run`. Copies run on their own as soon as what they come after is
    reached, and take `copy_s` each on the device's clock.
    """

    def __init__(self, *, copy_s: float = 0.0, pin_error: str = "") -> None:
        self.changed = threading.Condition()
        self.now_s = 0.0
        self.waits: list[str] = []
        """The thread of each wait."""
        self.bound = set[str]()
        """Threads that have bound themselves to the device."""
        self.pinned = set[int]()
        self._copy_s, self._pin_error = copy_s, pin_error
        self._held = set[int]()
        self._queue: list[Callable[[], bool]] = []
        """Work of the training's stream: each returns whether it could be done."""
        self._copies: list[Callable[[], bool]] = []

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same tensor, now in the device's memory."""
        self._held.add(tensor.untyped_storage().data_ptr())
        return tensor

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._held

    def run(self, seconds: float = 0.0) -> None:
        """Do all the work there is, after computing for so many seconds."""
        with self.changed:
            self.now_s += seconds
            while self._advance(self._queue) or self._advance(self._copies):
                pass
            self.changed.notify_all()

    def _advance(self, queue: list[Callable[[], bool]]) -> bool:
        if queue and queue[0]():
            queue.pop(0)
            return True
        return False

    def _check_bound(self) -> None:
        name = threading.current_thread().name
        assert name == "MainThread" or name in self.bound, f"{name} uses the device and has not bound itself to it"

    def bind_thread(self) -> None:
        self.bound.add(threading.current_thread().name)

    def mark(self) -> Mark:
        return self._mark(self._queue)

    def _mark(self, queue: list[Callable[[], bool]]) -> FakeMark:
        self._check_bound()
        mark = FakeMark(self)

        def reach() -> bool:
            mark.at_s = self.now_s
            return True

        with self.changed:
            queue.append(reach)
        return mark

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        host = torch.full_like(tensor, -77)  # until it is there
        self._start(self._queue, tensor, host)
        return host

    def pin(self, buffer: torch.Tensor) -> None:
        self._check_bound()
        if self._pin_error:
            raise RuntimeError(self._pin_error)
        self.pinned.add(buffer.data_ptr())

    def unpin(self, buffer: torch.Tensor) -> None:
        self.pinned.remove(buffer.data_ptr())

    def start_copies(self, pairs: Pairs, *, after: Mark) -> Mark:
        self._check_bound()
        with self.changed:
            self._copies.append(after.reached)
        for source, target in pairs:
            self._start(self._copies, source, target)
        return self._mark(self._copies)

    def _start(self, queue: list[Callable[[], bool]], source: torch.Tensor, target: torch.Tensor) -> None:
        def copy() -> bool:
            self.now_s += self._copy_s if queue is self._copies else 0.0
            with torch.no_grad():
                target.copy_(source)
            return True

        with self.changed:
            queue.append(copy)

    def order_after(self, mark: Mark) -> None:
        with self.changed:
            self._queue.append(mark.reached)


class RunningAccelerator(FakeAccelerator):
    """Does its work by itself, in a thread. The host's own operations count as those of the training's stream."""

    def __init__(self) -> None:
        super().__init__()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name="device")
        self._thread.start()

    def _work(self) -> None:
        while not self._ended.wait(0.001):
            self.run(0.001)

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()

    def order_after(self, mark: Mark) -> None:
        assert isinstance(mark, FakeMark)
        with self.changed:
            assert self.changed.wait_for(mark.reached, 20)
