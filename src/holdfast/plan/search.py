"""The layouts that fit in memory, and the fastest of them."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping

from msgspec import Struct

from holdfast.plan.hardware import Machine
from holdfast.plan.layout import Layout, Recompute, Sharding
from holdfast.plan.memory import Memory, memory
from holdfast.plan.step_time import StepTime, Workload, step_time

MICRO_BATCHES = (1, 2, 4, 8, 16)
INTERLEAVES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16)
MAX_EMPTY = 2
"""Slots for layers that a pipeline may leave empty, as Llama 3 405B's 126 layers do in 128."""


class Candidate(Struct, frozen=True, kw_only=True):
    """A layout with its predicted memory and time."""

    layout: Layout
    memory: Memory
    time: StepTime


class Found(Struct, frozen=True, kw_only=True):
    """The result of a search."""

    best: tuple[Candidate, ...]
    """Fastest first; of layouts with the same tp, pp and ep, the fastest one."""
    tried: int
    fitting: int
    smallest: Candidate | None
    """The layout that needs the least memory; None if none divides the GPUs."""


def _powers(limit: int) -> list[int]:
    return [1 << power for power in range(limit.bit_length()) if 1 << power <= limit]


def _divides_layers(layers: int, slots: int) -> bool:
    return slots <= layers + MAX_EMPTY and -layers % slots <= MAX_EMPTY


def _stages(layers: int, gpus: int) -> list[int]:
    return [pp for pp in range(1, min(layers, gpus) + 1) if gpus % pp == 0 and _divides_layers(layers, pp)]


def layouts(load: Workload, machine: Machine, gpus: int, fixed: Mapping[str, int]) -> Iterator[Layout]:
    """All layouts of a job on so many GPUs; `fixed` gives sizes of some axes (`tp`, `pp`, `cp`, `ep`, `dp`)."""
    shape, batch = load.model.shape, load.batch

    def sizes(axis: str, possible: list[int]) -> list[int]:
        return [fixed[axis]] if axis in fixed else possible

    for tp in sizes("tp", [n for n in _powers(min(machine.domain, 16)) if shape.heads % n == 0]):
        for cp in sizes("cp", [n for n in _powers(16) if load.length % (2 * n) == 0]):
            for pp in sizes("pp", _stages(shape.layers, max(1, gpus // (tp * cp)))):
                dp, rest = divmod(gpus, tp * cp * pp)
                if rest or dp == 0 or batch % dp or fixed.get("dp", dp) != dp:
                    continue
                for ep in sizes("ep", [n for n in _powers(shape.experts or 1) if (cp * dp) % n == 0]):
                    yield from _schedules(load, Layout(tp=tp, pp=pp, cp=cp, ep=ep, dp=dp))


def _schedules(load: Workload, axes: Layout) -> Iterator[Layout]:
    """The axes with each micro-batch, number of chunks, sharding and recomputation."""
    if axes.dp * axes.cp == 1:
        shardings = (Sharding.DDP,)
    elif axes.pp > 1:  # FSDP gathers weights for each micro-batch, which a pipeline has many of
        shardings = (Sharding.DDP, Sharding.OPTIMIZER)
    else:
        shardings = tuple(Sharding)
    for micro in MICRO_BATCHES:
        if load.batch % (axes.dp * micro):
            continue
        count = axes.micro_batches(load.batch) // micro
        for chunks in INTERLEAVES if axes.pp > 1 and count % axes.pp == 0 else (1,):
            if not _divides_layers(load.model.shape.layers, axes.pp * chunks):
                continue
            for sharding in shardings:
                for recompute in Recompute:
                    yield Layout(
                        tp=axes.tp, pp=axes.pp, cp=axes.cp, ep=axes.ep, dp=axes.dp, interleave=chunks,
                        micro_batch=micro, recompute=recompute, sharding=sharding,
                    )  # fmt: skip


def search(
    load: Workload, machine: Machine, gpus: int, *, fixed: Mapping[str, int] | None = None, keep: int = 5
) -> Found:
    """The `keep` fastest layouts that fit in a GPU's memory, one per size of tp, pp and ep."""
    fastest: dict[tuple[int, int, int], Candidate] = {}
    smallest: Candidate | None = None
    tried = fitting = 0
    for layout in layouts(load, machine, gpus, fixed or {}):
        tried += 1
        count = layout.micro_batches(load.batch)
        needed = memory(
            load.model, layout, load.program, length=load.length, micro_batches=count, domain=machine.domain
        )
        if needed.total > machine.gpu.memory_bytes:
            if fitting == 0 and (smallest is None or needed.total < smallest.memory.total):
                smallest = Candidate(layout=layout, memory=needed, time=step_time(load, layout, machine))
            continue
        fitting += 1
        time = step_time(load, layout, machine)
        axes = (layout.tp, layout.pp, layout.ep)
        known = fastest.get(axes)
        if known is None or time.total < known.time.total:
            fastest[axes] = Candidate(layout=layout, memory=needed, time=time)
    best = heapq.nsmallest(keep, fastest.values(), key=lambda each: each.time.total)
    return Found(best=tuple(best), tried=tried, fitting=fitting, smallest=best[0] if best else smallest)
