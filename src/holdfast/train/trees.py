"""Owns what a tree of state, as torch gives it, has of tensors, and in what order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeGuard, cast

import torch
from torch.distributed.tensor import DTensor

PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, DTensor)
"""Tensors whose bytes are all there is of them; those of other kinds are copied as their makers do it."""


def is_plain(value: object) -> TypeGuard[torch.Tensor]:
    """Whether a leaf of a tree is a tensor of these kinds, and of no kind made of them."""
    return type(value) in PLAIN


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part, without a gradient."""
    # Not `to_local`, which makes a parameter of a parameter's, and something for autograd.
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).detach()


def tensors(tree: object) -> Iterator[torch.Tensor]:
    """The plain tensors of a tree of dicts, lists and tuples, in order."""
    if isinstance(tree, dict):
        for value in cast("dict[object, object]", tree).values():
            yield from tensors(value)
    elif isinstance(tree, list | tuple):
        for value in cast("Sequence[object]", tree):
            yield from tensors(value)
    elif is_plain(tree):
        yield tree
