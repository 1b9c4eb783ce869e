"""What a peer checkpoint costs the loop: one rank trains on the device, another process stands for its peer.

The peer keeps its state in host memory and does nothing but exchange copies, so that only the copies disturb the loop.
Both are on this machine, over Gloo: the network's part is that of the loopback device. Blocks of steps without a copy
(A), with one (B) and without one again (A') alternate.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist

from bench.gpu.device import Device, open_device
from bench.gpu.promises import PEER_COST, PEER_SHARE
from bench.gpu.section import HOST, Place, measured
from bench.gpu.training import GB, StateLoop
from bench.paired_stats import OURS, PEER, PEER_AGAIN, estimate, interleave
from bench.result_file import Figure, Result
from holdfast.agent.state_memory import PEER_CHECKPOINT_MEMFDS
from holdfast.train import RankConfig, Session
from holdfast.train.ft.memory_snapshot import MemorySnapshot
from holdfast.train.ft.peer_checkpoint import MAX_STALL_SHARE

RANKS = 2
STATE_BYTES = 2 * GB
ROUNDS, BLOCK_STEPS, STEP_S = 3, 16, 0.2
TINY_ROUNDS, TINY_BLOCK_STEPS, TINY_STEP_S = 1, 4, 0.002
WIDTH, BATCH = 4096, 4096
TINY_WIDTH, TINY_BATCH = 64, 8


class Copy(NamedTuple):
    """One peer checkpoint."""

    took_s: float
    stalled_s: float
    """The host's time in calls and steps that waited for it."""


class Rank:
    """One rank's copies, which are taken together with the other's and when the bench says, not the Session."""

    def __init__(self, place: Place, device: Device, rank: int) -> None:
        store = dist.FileStore(str(place.folder / "peers"), RANKS)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
        self.loop = StateLoop(
            device,
            12 * 2 * TINY_WIDTH**2 if place.tiny else STATE_BYTES,
            width=TINY_WIDTH if place.tiny else WIDTH,
            batch=TINY_BATCH if place.tiny or rank else BATCH,
        )
        self.loop.step()
        self._memories = [Path(f"/proc/self/fd/{os.memfd_create('bench')}") for _ in range(PEER_CHECKPOINT_MEMFDS)]
        config = RankConfig(
            rank=rank,
            world_size=RANKS,
            nodes=RANKS,
            checkpoint_path=place.folder / "peers-checkpoints",
            peer_checkpoints="auto",
            peer_memory=tuple(self._memories),
        )
        session = Session(model=self.loop.model, optimizer=self.loop.optimizer, config=config)
        checkpoints, copies = session._checkpoints, session._peer_checkpointer
        assert checkpoints is not None
        assert copies is not None
        self._checkpoints, self.copies = checkpoints, copies
        self.copies.prepare()
        self._count = 0

    def start(self) -> None:
        """Begin a copy."""
        self._count += 1
        self.copies.start(self._checkpoints.new_manifest(self._count))

    def finish(self) -> float:
        """Wait for the copy on both ranks; returns the seconds that it took."""
        copied = self.copies.wait_finished()
        assert copied is not None
        assert copied.problem is None, copied.problem
        return copied.took_s

    def check(self) -> None:
        """Raise unless the peer's last copy is here, intact."""
        held = [MemorySnapshot.load(memory) for memory in self._memories[2:]]
        newest = max((each for each in held if each), key=lambda each: each.manifest.step)
        assert newest.manifest.step == self._count
        assert newest.find_damage() is None


def measure(place: Place) -> Iterator[Result]:
    """The time that copies add to the loop, and the largest share of it that `auto` lets them take."""
    rounds = TINY_ROUNDS if place.tiny else ROUNDS
    peer = os.fork()  # before this process opens the device
    if peer == 0:
        os._exit(_stand_in(place, 1 + rounds))
    try:
        device = open_device(place.device)
        torch.set_float32_matmul_precision("high")
        yield from _measure(place, device, rounds)
        _, status = os.waitpid(peer, 0)
        assert status == 0, f"the peer ended with {os.waitstatus_to_exitcode(status)}"
        peer = 0
    finally:
        if peer:
            os.kill(peer, signal.SIGKILL)
            os.waitpid(peer, 0)


def _measure(place: Place, device: Device, rounds: int) -> Iterator[Result]:
    rank = Rank(place, device, 0)
    rank.loop.lengthen(TINY_STEP_S if place.tiny else STEP_S)
    steps = TINY_BLOCK_STEPS if place.tiny else BLOCK_STEPS
    copied: list[Copy] = []

    def block(copies: bool) -> float:
        begin, began = device.mark(), time.perf_counter()
        if copies:
            rank.start()
        call_s = time.perf_counter() - began
        for _ in range(steps):
            rank.loop.step()
        took_ms = device.elapsed_ms(begin, device.mark())
        if copies:
            copied.append(Copy(took_s=rank.finish(), stalled_s=call_s + rank.copies.take_stalled_s()))
        return took_ms

    block(True)  # allocates the memory
    copied.clear()
    sides = {PEER: lambda: block(False), OURS: lambda: block(True), PEER_AGAIN: lambda: block(False)}
    done = interleave(sides, rounds, unit=f"ms for {steps} steps")
    rank.check()
    added = estimate([each[OURS] - (each[PEER] + each[PEER_AGAIN]) / 2 for each in done])
    floor = estimate([each[PEER_AGAIN] - each[PEER] for each in done])
    took_s, stalled_s = (median(values) for values in zip(*copied, strict=True))
    step_ms = median(each[PEER] for each in done) / steps
    size = sum(each.nbytes for each in rank.loop.model.parameters()) * 3
    conditions = f"{size / GB:.2g} GB a rank, steps of {step_ms:.0f} ms, {len(done)} rounds"
    yield measured(
        PEER_COST,
        difference=Figure(value=added.median, low=added.low, high=added.high, unit="ms", decimals=1),
        floor=Figure(value=floor.median, low=floor.low, high=floor.high, unit="ms", decimals=1),
        conditions=conditions,
        details={"a copy took": f"{took_s:.2f} s", "the loop waited": f"{1e3 * stalled_s:.1f} ms"},
    )
    interval_s = max(took_s, stalled_s / MAX_STALL_SHARE)
    share = 100 * added.median / 1e3 / interval_s
    yield measured(
        PEER_SHARE,
        Figure(value=share, unit="%", decimals=2),
        goal=f"≤ {100 * MAX_STALL_SHARE:g} %",
        met=share <= 100 * MAX_STALL_SHARE,
        conditions=conditions,
        details={"`auto` takes one every": f"{interval_s:.1f} s"},
        note="calculated from the time that one copy adds",
    )


def _stand_in(place: Place, count: int) -> int:
    """The peer's process: it only takes copies; returns its exit code."""
    try:
        rank = Rank(place, open_device(HOST), 1)
        for _ in range(count):
            rank.start()
            rank.finish()
        rank.check()
    except BaseException:
        traceback.print_exc(file=sys.stdout)
        sys.stdout.flush()
        return 1
    return 0
