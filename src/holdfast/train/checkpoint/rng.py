"""State of the random number generators that a loop may use: Python's, numpy's, torch's and every visible GPU's.

Of GPUs this has never run on one: its tests use generators on the host.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from functools import cache
from typing import Any, Protocol, TypedDict, cast

import torch

from holdfast.train.checkpoint import mt19937
from holdfast.train.checkpoint.mt19937 import Capture


class RandomState(TypedDict):
    """State of every generator; numpy's and the GPUs' only if this process has them."""

    python: tuple[Any, ...]
    numpy: dict[str, Any] | None
    torch: torch.Tensor
    cuda: list[torch.Tensor]
    """Of each visible GPU, the current one first: at its next start the rank may see others, under other numbers."""


class Generators(Protocol):
    """The generators of a node's GPUs: `torch.cuda`."""

    def is_initialized(self) -> bool: ...

    def device_count(self) -> int: ...

    def current_device(self) -> int: ...

    def get_rng_state(self, device: int) -> torch.Tensor: ...

    def set_rng_state(self, new_state: torch.Tensor, device: int) -> None: ...


def capture(gpus: Generators | None = None) -> Callable[[], RandomState]:
    """Capture the current state of every generator; the returned function yields it at any later time."""
    python = _python()()
    numpy = _numpy()() if "numpy.random" in sys.modules else None
    ours = torch.get_rng_state()
    gpus = gpus or cast("Generators", torch.cuda)
    # The states are in host memory: no GPU is waited for.
    cuda = [gpus.get_rng_state(device) for device in _current_first(gpus)] if gpus.is_initialized() else []
    return lambda: RandomState(python=python(), numpy=numpy() if numpy else None, torch=ours, cuda=cuda)


def restore(state: RandomState, gpus: Generators | None = None) -> None:
    """Restore every generator, of GPUs as many as there are now."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if state["numpy"] is not None:
        import numpy.random

        numpy.random.set_state(state["numpy"])
    gpus = gpus or cast("Generators", torch.cuda)
    if state["cuda"]:
        for device, saved in zip(_current_first(gpus), state["cuda"], strict=False):
            gpus.set_rng_state(saved, device)


def _current_first(gpus: Generators) -> list[int]:
    if not (count := gpus.device_count()):
        return []
    current = gpus.current_device()
    return [current, *(device for device in range(count) if device != current)]


@cache
def _python() -> Capture:
    return mt19937.python_capture() or _via_api(random.getstate)


@cache
def _numpy() -> Capture:
    import numpy.random

    return mt19937.numpy_capture(numpy.random) or _via_api(lambda: numpy.random.get_state(legacy=False))


def _via_api(ask: Callable[[], Any]) -> Capture:
    def note() -> Callable[[], Any]:
        state = ask()
        return lambda: state

    return note
