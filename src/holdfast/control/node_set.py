"""Frozen sets of nodes and of ranks; each is one integer, compared in one operation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Self

import msgspec

from holdfast.events import Ranges


class _IndexSet(msgspec.Struct, frozen=True, gc=False):
    """A frozen set of small numbers."""

    bits: int = 0

    @classmethod
    def of(cls, numbers: Iterable[int]) -> Self:
        bits = 0
        for number in numbers:
            bits |= 1 << number
        return cls(bits)

    @classmethod
    def span(cls, first: int, count: int) -> Self:
        """Consecutive numbers."""
        return cls((1 << count) - 1 << first)

    def __contains__(self, number: int) -> bool:
        return self.bits >> number & 1 == 1

    def __iter__(self) -> Iterator[int]:
        """In ascending order."""
        bits = self.bits
        while bits:
            lowest = bits & -bits
            yield lowest.bit_length() - 1
            bits ^= lowest

    def __len__(self) -> int:
        return self.bits.bit_count()

    def __bool__(self) -> bool:
        return self.bits != 0

    def __or__(self, other: Self) -> Self:
        return type(self)(self.bits | other.bits)

    def __and__(self, other: Self) -> Self:
        return type(self)(self.bits & other.bits)

    def __sub__(self, other: Self) -> Self:
        return type(self)(self.bits & ~other.bits)

    def __le__(self, other: Self) -> bool:
        return not self.bits & ~other.bits

    def with_member(self, number: int, member: bool = True) -> Self:
        """This set with or without one number."""
        return type(self)(self.bits | 1 << number if member else self.bits & ~(1 << number))


class NodeSet(_IndexSet, frozen=True, gc=False):
    """A frozen set of node slots."""


class RankSet(_IndexSet, frozen=True, gc=False):
    """A frozen set of an attempt's ranks."""


def ranks_of(spans: Ranges) -> RankSet:
    """The ranks that ranges in an event describe."""
    return RankSet(sum(RankSet.span(first, last + 1 - first).bits for first, last in spans))


NO_NODES = NodeSet()
NO_RANKS = RankSet()
