"""The algorithms by which communication libraries carry out collectives, and the bytes that each rank sends to each.

A rank of a ring sends only to one neighbour. Payloads of n ranks count whole: an all-gather's is its result, and a
reduce-scatter's its input.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

from msgspec import Struct


class Library(StrEnum):
    """What carries out the collectives."""

    NCCL = "nccl"
    GLOO = "gloo"


class Collective(StrEnum):
    """An operation of all ranks of a group."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"


class Algorithm(Struct, frozen=True, kw_only=True):
    """How a library carries out a collective."""

    name: str
    passes: int
    """Times that a rank sends (n - 1) / n of the payload."""
    neighbour: int
    """The rank that it sends to, relative to its own place in the group."""
    source: str

    def sent_bytes(self, payload: float, ranks: int) -> float:
        """Bytes that each of so many ranks sends."""
        return self.passes * payload * (ranks - 1) / ranks


_NCCL_RING = "NCCL 2.27, src/device/{}.h: the ring; other algorithms only for short messages and within switches"
_GLOO = "Gloo, gloo/{}"

ALGORITHMS: Mapping[tuple[Library, Collective], Algorithm] = MappingProxyType(
    {
        (Library.NCCL, Collective.ALL_REDUCE): Algorithm(
            name="ring", passes=2, neighbour=1, source=_NCCL_RING.format("all_reduce")
        ),
        (Library.NCCL, Collective.ALL_GATHER): Algorithm(
            name="ring", passes=1, neighbour=1, source=_NCCL_RING.format("all_gather")
        ),
        (Library.NCCL, Collective.REDUCE_SCATTER): Algorithm(
            name="ring", passes=1, neighbour=1, source=_NCCL_RING.format("reduce_scatter")
        ),
        (Library.GLOO, Collective.ALL_REDUCE): Algorithm(
            name="ring", passes=2, neighbour=-1, source=_GLOO.format("allreduce.cc: `ring`, if nothing is specified")
        ),
        (Library.GLOO, Collective.ALL_GATHER): Algorithm(
            name="ring", passes=1, neighbour=1, source=_GLOO.format("allgather.cc")
        ),
        (Library.GLOO, Collective.REDUCE_SCATTER): Algorithm(
            name="all-reduce, of which each rank keeps its part",
            passes=2,
            neighbour=-1,
            source="PyTorch, ProcessGroupGloo.cpp: `reduce_scatter_tensor_coalesced`",
        ),
    }
)
