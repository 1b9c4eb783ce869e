"""Tensors of a state tree as torch returns it: their order and their layout in one buffer."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TypeGuard, cast

import torch
from torch.distributed.tensor import DTensor

from holdfast.train.torch_private import inner_names, local_part, local_type, rebuilt, sharded

PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, DTensor)
"""Tensor types fully defined by their bytes, or by those of their local shard."""

ALIGN_BYTES = 64

COPY_THREADS = min(4, len(os.sched_getaffinity(0)))
"""Threads that copy or sum on the host: one copies 7 GB/s here, two copy 12 GB/s."""


def is_plain(value: object) -> TypeGuard[torch.Tensor]:
    """Whether a leaf is a tensor of exactly one of these types, and so is its local shard."""
    return local_type(value) in PLAIN_TYPES if type(value) is DTensor else type(value) in PLAIN_TYPES


def parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The plain tensors that a tensor consists of: itself, or those inside a wrapper such as a Float8 tensor."""
    if is_plain(tensor):
        yield tensor
    elif type(tensor) is DTensor:
        yield from parts(local_part(tensor))
    else:
        for name in inner_names(tensor):
            yield from parts(getattr(tensor, name))


def rebuild(tensor: torch.Tensor, replaced: Iterator[torch.Tensor]) -> torch.Tensor:
    """A tensor of the same type and sharding with other `parts`, on the host; other types are copied there."""
    if is_plain(tensor):
        part = next(replaced)
        return sharded(part, tensor) if type(tensor) is DTensor else part
    if type(tensor) is DTensor:
        return sharded(rebuild(local_part(tensor), replaced), tensor)
    if names := inner_names(tensor):
        return rebuilt(tensor, {name: rebuild(getattr(tensor, name), replaced) for name in names})
    return tensor.detach().to("cpu", copy=True)


def iter_tensors(tree: object) -> Iterator[torch.Tensor]:
    """The plain tensors of a tree of dicts, lists and tuples, in order."""
    return (part for _, part in iter_parts(tree))


def iter_parts(tree: object) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each of `iter_tensors` with the tensor of the tree that it is part of, whose version rises when it changes."""
    if isinstance(tree, dict):
        for value in cast("dict[object, object]", tree).values():
            yield from iter_parts(value)
    elif isinstance(tree, list | tuple):
        for value in cast("Sequence[object]", tree):
            yield from iter_parts(value)
    elif isinstance(tree, torch.Tensor):
        for part in parts(tree):
            yield tree, part


def offsets(sources: Sequence[torch.Tensor], first_byte: int) -> list[int]:
    """Offset of each tensor, laid out consecutively from `first_byte`, and the end offset."""
    found = [first_byte]
    for source in sources:
        found.append(found[-1] + -(-source.nbytes // ALIGN_BYTES) * ALIGN_BYTES)
    return found
