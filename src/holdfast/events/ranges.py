"""Sets of node or rank numbers as ranges, so that thousands of them take little room."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

Ranges = tuple[tuple[int, int], ...]
"""Ordered numbers as (first, last) of each contiguous range: 0, 1, 2, 5 are ((0, 2), (5, 5))."""


def to_ranges(numbers: Iterable[int]) -> Ranges:
    """Numbers as sorted ranges without duplicates."""
    ranges: list[tuple[int, int]] = []
    for number in sorted(set(numbers)):
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    return tuple(ranges)


def from_ranges(spans: Ranges) -> Iterator[int]:
    """The numbers in these ranges, in order."""
    return (number for first, last in spans for number in range(first, last + 1))
