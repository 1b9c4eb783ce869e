"""State of the random number generators that a loop may use: Python's, numpy's, torch's and the current GPU's."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from functools import cache
from typing import Any, TypedDict

import torch

from holdfast.train.checkpoint import mt19937
from holdfast.train.checkpoint.mt19937 import Capture


class RandomState(TypedDict):
    """State of every generator; numpy's and the GPU's only if this process has them."""

    python: tuple[Any, ...]
    numpy: dict[str, Any] | None
    torch: torch.Tensor
    cuda: torch.Tensor | None


def capture() -> Callable[[], RandomState]:
    """Capture the current state of every generator; the returned function yields it at any later time."""
    python = _python()()
    numpy = _numpy()() if "numpy.random" in sys.modules else None
    ours = torch.get_rng_state()
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    return lambda: RandomState(python=python(), numpy=numpy() if numpy else None, torch=ours, cuda=cuda)


def restore(state: RandomState) -> None:
    """Restore every generator; skips the GPU's if there is no GPU."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if state["numpy"] is not None:
        import numpy.random

        numpy.random.set_state(state["numpy"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


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
