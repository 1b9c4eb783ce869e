"""Owns what a tree of state, as torch gives it, has of tensors, in what order, and how these lie in one memory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TypeGuard, cast

import torch
from torch.distributed.tensor import DTensor

PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, DTensor)
"""Tensors whose bytes are all there is of them; those of other kinds are copied as their makers do it."""

ALIGN_BYTES = 64

COPY_THREADS = min(4, len(os.sched_getaffinity(0)))
"""Threads that copy or sum up on the host: one copies 7 GB/s here, two do 12."""


def is_plain(value: object) -> TypeGuard[torch.Tensor]:
    """Whether a leaf of a tree is a tensor of these kinds, and of no kind made of them."""
    return type(value) in PLAIN_TYPES


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part, without a gradient."""
    # Not `to_local`, which makes a parameter of a parameter's, and something for autograd.
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).detach()


def iter_tensors(tree: object) -> Iterator[torch.Tensor]:
    """The plain tensors of a tree of dicts, lists and tuples, in order."""
    if isinstance(tree, dict):
        for value in cast("dict[object, object]", tree).values():
            yield from iter_tensors(value)
    elif isinstance(tree, list | tuple):
        for value in cast("Sequence[object]", tree):
            yield from iter_tensors(value)
    elif is_plain(tree):
        yield tree


def offsets(sources: Sequence[torch.Tensor], first_byte: int) -> list[int]:
    """Where each of these lies, one behind the other from `first_byte` on, and where all end."""
    found = [first_byte]
    for source in sources:
        found.append(found[-1] + -(-source.nbytes // ALIGN_BYTES) * ALIGN_BYTES)
    return found
