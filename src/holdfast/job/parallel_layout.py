"""Parallel groups of a replica's ranks: which ranks communicate along tensor, context, expert, data or pipeline."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from functools import cached_property

from msgspec import Struct

from holdfast.events.ranges import Ranges, to_ranges
from holdfast.job.spec import Parallel

MAX_SPANS = 4
"""Contiguous ranges of ranks that are listed."""


class Axis(StrEnum):
    """A way of dividing a model or its data over ranks."""

    TP = "tp"
    CP = "cp"
    EP = "ep"
    DP = "dp"
    PP = "pp"


class ParallelGroup(Struct, frozen=True, kw_only=True):
    """Ranks that communicate along one axis, or that a product of axes spans; `axes` is empty for a single rank."""

    axes: tuple[Axis, ...]
    ranks: tuple[int, ...]

    @property
    def name(self) -> str:
        """Such as `the tp group of ranks 8-15`."""
        what = "x".join(self.axes)
        return f"the {what} group of ranks {format_spans(to_ranges(self.ranks))}" if what else f"rank {self.ranks[0]}"


class ParallelLayout(Struct, frozen=True, kw_only=True, dict=True):
    """Sizes of the parallel groups; ranks count up along `tp`, then `cp`, `dp`, `pp`.

    Expert-parallel groups are blocks of the `cp` and `dp` coordinates together: Megatron-LM and torchtitan take them
    from both, and keep `tp` inside.
    """

    tp: int = 1
    cp: int = 1
    ep: int = 1
    dp: int = 1
    pp: int = 1

    @classmethod
    def of(cls, parallel: Parallel, world_size: int) -> ParallelLayout | None:
        """The layout of a replica with this many ranks; None if they cannot be divided so."""
        fixed = parallel.tp * parallel.cp * parallel.pp
        dp = world_size // fixed if parallel.dp is None else parallel.dp
        fits = dp > 0 and fixed * dp == world_size and (parallel.cp * dp) % parallel.ep == 0
        return cls(tp=parallel.tp, cp=parallel.cp, ep=parallel.ep, dp=dp, pp=parallel.pp) if fits else None

    @property
    def world_size(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    @property
    def stage_size(self) -> int:
        """Ranks of one stage of the pipeline."""
        return self.tp * self.cp * self.dp

    @cached_property
    def _grid(self) -> dict[Axis, tuple[int, int]]:
        """Distance between neighbours of a group, and its size, by axis."""
        return {
            Axis.TP: (1, self.tp),
            Axis.CP: (self.tp, self.cp),
            Axis.EP: (self.tp, self.ep),
            Axis.DP: (self.tp * self.cp, self.dp),
            Axis.PP: (self.stage_size, self.pp),
        }

    def size(self, axis: Axis) -> int:
        """Ranks of a group along this axis."""
        return self._grid[axis][1]

    def first(self, axis: Axis, rank: int) -> int:
        """The lowest rank of the rank's group along an axis."""
        stride, size = self._grid[axis]
        return rank - rank // stride % size * stride

    def stage(self, rank: int) -> int:
        """The rank's stage of the pipeline."""
        return rank // self.stage_size

    def group(self, axis: Axis, rank: int) -> range:
        """The rank's group along an axis, itself included."""
        stride, size = self._grid[axis]
        first = self.first(axis, rank)
        return range(first, first + stride * size, stride)

    def smallest_group(self, ranks: Iterable[int]) -> ParallelGroup:
        """The smallest group, along one axis if possible, else along several, that covers all these ranks."""
        wanted = sorted(ranks)
        if wanted[0] == wanted[-1]:
            return ParallelGroup(axes=(), ranks=(wanted[0],))
        groups = [(axis, self.group(axis, wanted[0])) for axis in Axis]
        covering = [(axis, group) for axis, group in groups if all(rank in group for rank in wanted)]
        if not covering:
            return self._spanned(wanted)
        axis, group = min(covering, key=lambda each: len(each[1]))
        return ParallelGroup(axes=(axis,), ranks=tuple(group))

    def _spanned(self, ranks: list[int]) -> ParallelGroup:
        """The product of the axes along which these ranks differ, or its part in one expert-parallel block."""
        orthogonal = (Axis.TP, Axis.CP, Axis.DP, Axis.PP)
        axes = [axis for axis in orthogonal if len({self._at(axis, rank) for rank in ranks}) > 1]
        covered = [ranks[0]]
        for axis in axes:
            covered = [other for rank in covered for other in self.group(axis, rank)]
        if self.ep > 1 and {Axis.CP, Axis.DP} & {*axes} and len({self._block(rank) for rank in ranks}) == 1:
            inside = [rank for rank in covered if self._block(rank) == self._block(ranks[0])]
            if len(inside) < len(covered):
                covered, axes = inside, [axis for axis in (Axis.TP, Axis.EP, Axis.PP) if axis in (*axes, Axis.EP)]
        return ParallelGroup(axes=tuple(axes), ranks=tuple(sorted(covered)))

    def _at(self, axis: Axis, rank: int) -> int:
        """The rank's coordinate along an axis."""
        stride, size = self._grid[axis]
        return rank // stride % size

    def _block(self, rank: int) -> int:
        """Number of the block of `cp` and `dp` coordinates that an expert-parallel group covers."""
        return rank % self.stage_size // (self.tp * self.ep)


def format_spans(spans: Ranges) -> str:
    """Such as `8-15`, `3, 19, 35` or `0, 64, 128 and 61 more`."""
    texts = [f"{first}" if first == last else f"{first}-{last}" for first, last in spans]
    if len(texts) <= MAX_SPANS:
        return ", ".join(texts)
    rest = sum(last - first + 1 for first, last in spans[MAX_SPANS - 1 :])
    return f"{', '.join(texts[: MAX_SPANS - 1])} and {rest} more"
