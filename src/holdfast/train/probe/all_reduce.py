"""Measures all-reduces from 8 B to 1 GiB, for as long as time is left."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import torch

from holdfast.events.probe_results import AllReduceRate
from holdfast.train.probe.process_groups import Channel

SWEEP_BYTES = tuple(8 ** (1 + each) for each in range(10))
"""8 B to 1 GiB."""
PAIR_BYTES = (1 << 18, 1 << 21, 1 << 24, 1 << 27)
"""256 KiB to 128 MiB: a slow link answers with the first, and only a fast one needs the last."""
BATCH_S = 0.05
"""How long the repetitions of a batch take together; their number is agreed upon."""
MOST_REPEATS = 20
BATCHES = 3
"""The fastest counts: a rank that waited for a CPU makes a batch slow, a bad link makes all slow."""


def sweep(channel: Channel, sizes: Sequence[int], budget_s: float, most_bytes: float) -> Iterator[AllReduceRate]:
    """The rates of growing sizes, until the next one would take more than the remaining time, or a rank's memory.

    All ranks of the channel take the same decisions, because the times they decide on are those of the slowest.
    """
    began = time.perf_counter()
    most_bytes = -_largest(channel, -most_bytes)  # also connects: NCCL does that in the first operation
    sizes = [size for size in sizes if size <= most_bytes]
    for number, size in enumerate(sizes):
        measured = _measure(channel, size, budget_s, began)
        yield measured
        following = sizes[number + 1] if number + 1 < len(sizes) else 0
        next_s = 2 * measured.time_s * following / size
        if not following or _largest(channel, time.perf_counter() - began) + next_s > budget_s:
            return


def _measure(channel: Channel, size: int, budget_s: float, began: float) -> AllReduceRate:
    buffer = torch.ones(size // 4, device=channel.device)
    first_s = _timed(channel, buffer, 1)
    wrong = bool((buffer != channel.size).any())
    buffer.zero_()
    repeats = max(1, min(MOST_REPEATS, int(BATCH_S / first_s)))
    fastest_s = first_s
    for _ in range(BATCHES):
        if _largest(channel, time.perf_counter() - began) + repeats * fastest_s > budget_s:
            break
        fastest_s = min(fastest_s, _timed(channel, buffer, repeats))
    return rate(size, fastest_s, channel.size, wrong=wrong)


def _timed(channel: Channel, buffer: torch.Tensor, times: int) -> float:
    """Seconds of one all-reduce, on the slowest rank."""
    began = time.perf_counter()
    channel.all_reduce(buffer, times)
    return _largest(channel, (time.perf_counter() - began) / times)


def _largest(channel: Channel, figure: float) -> float:
    """The largest figure of all ranks."""
    agreed = torch.tensor([figure], dtype=torch.float64, device=channel.device)
    channel.all_reduce(agreed, largest=True)
    return agreed.item()


def rate(size: int, seconds: float, ranks: int, *, wrong: bool = False) -> AllReduceRate:
    """Bandwidths of an all-reduce, as nccl-tests defines them."""
    algorithm = size / seconds / 1e9
    bus = algorithm * 2 * (ranks - 1) / ranks
    return AllReduceRate(size_bytes=size, time_s=seconds, algorithm_gb_s=algorithm, bus_gb_s=bus, wrong=wrong)
