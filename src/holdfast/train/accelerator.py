"""The part of a GPU's runtime that a rank uses, behind an interface that tests implement on the host.

Everything that knows CUDA's streams, events and pinned memory is in `Cuda`, which has never run on a GPU so far.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Any, Protocol, cast

import torch

Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Tensors to copy, each with its target."""


class Mark(Protocol):
    """A moment in the work that a device has been given."""

    def reached(self) -> bool:
        """Whether the device has done all work before it."""
        ...

    def wait(self) -> None:
        """Make this thread wait until it is reached; the device continues with later work meanwhile."""
        ...

    def seconds_until(self, later: Mark) -> float:
        """Seconds on the device's clock; both marks must be reached."""
        ...


class Accelerator(Protocol):
    """One rank's device. What it is given without another word, it does in the order of the training's own work."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is in a device's memory."""
        ...

    def bind_thread(self) -> None:
        """Make this thread use the rank's device; without it, CUDA would occupy memory of the node's first GPU."""
        ...

    def mark(self) -> Mark:
        """A mark after all work that this thread has given the device."""
        ...

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """A host tensor that has the value once a later mark is reached."""
        ...

    def pin(self, buffer: torch.Tensor) -> None:
        """Pin host memory, so that copies into it overlap the device's other work; raises RuntimeError."""
        ...

    def unpin(self, buffer: torch.Tensor) -> None:
        """Undo `pin`; raises RuntimeError."""
        ...

    def start_copies(self, pairs: Pairs, *, after: Mark) -> Mark:
        """Start copies that begin after `after` and overlap later work; returns the mark of their end.

        A copy to memory that is not pinned blocks this thread.
        """
        ...

    def order_after(self, mark: Mark) -> None:
        """Have all later work of this thread begin after the mark; the thread itself does not wait."""
        ...


@cache
def accelerator_of(device: torch.device) -> Accelerator | None:
    """The accelerator that a tensor's device is; None for the host."""
    return Cuda(device) if device.type == "cuda" else None


class CurrentDevice(Protocol):
    """The GPU that a thread uses: `torch.cuda`."""

    def is_initialized(self) -> bool: ...

    def current_device(self) -> int: ...

    def set_device(self, device: int) -> None: ...


def bind_like_this_thread(gpus: CurrentDevice | None = None) -> Callable[[], None]:
    """A function that makes another thread use the GPU of this one: a new thread uses the node's first."""
    gpus = gpus or cast("CurrentDevice", torch.cuda)
    if not gpus.is_initialized():
        return _nothing
    return partial(gpus.set_device, gpus.current_device())


def _nothing() -> None:
    pass


class _CudaMark:
    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def reached(self) -> bool:
        return self.event.query()

    def wait(self) -> None:
        self.event.synchronize()

    def seconds_until(self, later: Mark) -> float:
        return self.event.elapsed_time(cast("_CudaMark", later).event) / 1000


class Cuda:
    """One CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copy_stream: torch.cuda.Stream | None = None

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cuda

    def bind_thread(self) -> None:
        torch.cuda.set_device(self._device)

    def mark(self) -> Mark:
        return self._mark(torch.cuda.current_stream(self._device))

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def pin(self, buffer: torch.Tensor) -> None:
        self._check(_cudart().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0))

    def unpin(self, buffer: torch.Tensor) -> None:
        self._check(_cudart().cudaHostUnregister(buffer.data_ptr()))

    def start_copies(self, pairs: Pairs, *, after: Mark) -> Mark:
        stream = self._copy_stream = self._copy_stream or torch.cuda.Stream(self._device)
        stream.wait_event(cast("_CudaMark", after).event)
        with torch.cuda.stream(stream), torch.no_grad():
            for source, target in pairs:
                target.copy_(source, non_blocking=True)
        return self._mark(stream)

    def order_after(self, mark: Mark) -> None:
        torch.cuda.current_stream(self._device).wait_event(cast("_CudaMark", mark).event)

    def _mark(self, stream: torch.cuda.Stream) -> Mark:
        # Blocking: a thread that waits for it sleeps, instead of occupying a core.
        event = torch.cuda.Event(enable_timing=True, blocking=True)
        event.record(stream)
        return _CudaMark(event)

    def _check(self, code: Any) -> None:
        """Raise RuntimeError for an error code of the CUDA runtime."""
        try:
            torch.cuda.check_error(int(code))
        except RuntimeError:
            # The runtime also keeps the error for the next check in this thread, which would fail in someone else's
            # kernel launch. This launch takes it.
            with suppress(RuntimeError):
                torch.zeros(1, device=self._device)
            raise


def _cudart() -> Any:
    return cast("Any", torch.cuda).cudart()
