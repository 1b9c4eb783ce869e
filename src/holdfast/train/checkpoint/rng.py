"""Owns the random number generators that a loop may draw from: python's, numpy's, torch's and the current GPU's."""

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
    """Where every generator stands; numpy's and the GPU's only if this process has them."""

    python: tuple[Any, ...]
    numpy: dict[str, Any] | None
    torch: torch.Tensor
    cuda: torch.Tensor | None


def capture() -> Callable[[], RandomState]:
    """Note where every generator stands now; what is returned gives that, whenever it is called."""
    python = _python()()
    numpy = _numpy()() if "numpy.random" in sys.modules else None
    ours = torch.get_rng_state()
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    return lambda: RandomState(python=python(), numpy=numpy() if numpy else None, torch=ours, cuda=cuda)


def restore(state: RandomState) -> None:
    """Put every generator back where it stood; a GPU's is left alone where there is none."""
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
