"""Owns the random number generators that a loop may draw from: python's, numpy's, torch's and the current GPU's."""

from __future__ import annotations

import random
import sys
from typing import Any, TypedDict

import torch


class RandomState(TypedDict):
    """Where every generator stands; numpy's and the GPU's only if this process has them."""

    python: tuple[Any, ...]
    numpy: dict[str, Any] | None
    torch: torch.Tensor
    cuda: torch.Tensor | None


def capture() -> RandomState:
    """Note where every generator stands now."""
    numpy_random = sys.modules.get("numpy.random")
    return RandomState(
        python=random.getstate(),
        numpy=numpy_random.get_state(legacy=False) if numpy_random else None,
        torch=torch.get_rng_state(),
        cuda=torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
    )


def restore(state: RandomState) -> None:
    """Put every generator back where it stood; a GPU's is left alone where there is none."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if state["numpy"] is not None:
        import numpy.random

        numpy.random.set_state(state["numpy"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
