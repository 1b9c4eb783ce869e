"""What staging a save costs the loop: holdfast's buffer (B), compared with torch's DefaultStager (A, A').

.venv/bin/python -m bench.staging [--quick] [--rounds N] [--layers N] [--device cuda]

Both stage the state of one model and its AdamW in turn, after a training step, and overlap the next forward and
backward pass. The optimizer's step after that waits until the copy is complete, as both require. The stall is the call
and that wait: by the host's clock on a CPU, and by the device's on a GPU, where only idle time counts. The GPU part has
never run. DefaultStager has its defaults on a GPU; on a CPU it refuses all of them but its thread.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from statistics import median
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from bench.paired_stats import OURS, PEER, PEER_AGAIN, compare, headline, interleave, say, table
from holdfast.train.checkpoint.background import BackgroundWorker
from holdfast.train.checkpoint.staging import StagingBuffer
from holdfast.train.checkpoint.stall_clock import StallClock
from holdfast.train.checkpoint.train_state import TrainState

ROUNDS, QUICK_ROUNDS, LAYERS, WIDTH, BATCH = 12, 2, 4, 2048, 16


@dataclass(frozen=True, kw_only=True)
class Staged:
    """Measurements of one staged save."""

    stall_s: float
    complete_s: float
    """From the call until everything is in host memory."""


class Loop:
    """A training loop on one device, and both ways to stage it."""

    def __init__(self, device: torch.device, layers: int) -> None:
        self._device = device
        self._on_gpu = device.type == "cuda"
        model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(layers))).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
        self._state = TrainState(model=model, optimizer=optimizer)
        self._batch = torch.randn(BATCH, WIDTH, device=device)
        self._forward()
        optimizer.step()
        self._buffer = StagingBuffer(self._state)
        self._worker = BackgroundWorker("bench")
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=self._on_gpu,
                use_shared_memory=self._on_gpu,
                use_async_staging=True,
                use_non_blocking_copy=self._on_gpu,
            )
        )
        self._stalls = StallClock(self._state.accelerator)

    @property
    def state_bytes(self) -> int:
        tensors = [*self._state.model.state_dict().values()]
        return sum(each.nbytes for each in tensors) * 3  # AdamW keeps two of each

    def ours(self) -> Staged:
        self._start()
        began = time.perf_counter()
        with self._stalls.waiting():
            self._buffer.start_copy()
        ended = self._worker.submit(lambda: (self._buffer.finish_copy(), time.perf_counter()))
        self._forward()
        self._state.optimizer.step()  # waits by itself
        intact, at = ended.result()
        assert intact
        return self._measured(at - began)

    def theirs(self) -> Staged:
        self._start()
        ended: list[float] = []
        began = time.perf_counter()
        with self._stalls.waiting():
            staging = cast("Future[Any]", self._stager.stage(self._state.tensors()))
            staging.add_done_callback(lambda _: ended.append(time.perf_counter()))
        self._forward()
        with self._stalls.waiting():
            staging.result()
        self._state.optimizer.step()
        return self._measured(ended[0] - began)

    def close(self) -> None:
        self._stager.close()

    def _start(self) -> None:
        self._forward()
        self._state.optimizer.step()
        self._synchronize()
        self._stalls.take_s()
        self._buffer.stalls.take_s()

    def _measured(self, complete_s: float) -> Staged:
        self._synchronize()
        return Staged(stall_s=self._stalls.take_s() + self._buffer.stalls.take_s(), complete_s=complete_s)

    def _forward(self) -> None:
        self._state.optimizer.zero_grad()
        self._state.model(self._batch).square().mean().backward()

    def _synchronize(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize(self._device)


def measure(device: torch.device, *, layers: int, rounds: int) -> dict[str, list[Staged]]:
    """Measure both sides in turn, DefaultStager twice a round; prints what it finds. For the bench on a GPU as well."""
    loop = Loop(device, layers)
    say(f"{loop.state_bytes / 2**20:,.0f} MiB of state on {device}, {rounds} rounds")
    found: dict[str, list[Staged]] = {PEER: [], OURS: [], PEER_AGAIN: []}

    def side(name: str, stage: Callable[[], Staged]) -> Callable[[], float]:
        def one() -> float:
            found[name].append(stage())
            return 1e3 * found[name][-1].stall_s

        return one

    for warm in (loop.ours, loop.theirs) * 2:
        warm()
    ways = {PEER: loop.theirs, OURS: loop.ours, PEER_AGAIN: loop.theirs}
    done = interleave({name: side(name, stage) for name, stage in ways.items()}, rounds, unit="ms of stall")
    rows = [
        (
            name,
            f"{1e3 * median(each.stall_s for each in found[key]):.3f}",
            f"{1e3 * median(each.complete_s for each in found[key]):.3f}",
        )
        for name, key in (("holdfast", OURS), ("DefaultStager", PEER))
    ]
    say("")
    say(table(("staging", "stall of the loop, ms", "until all is in host memory, ms"), rows))
    say(f"stall, holdfast / DefaultStager: {compare(done).ratio}; A'/A {compare(done).floor}")
    loop.close()
    return found


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog="bench.staging", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--quick", action="store_true", help="only to see that it works")
    options = parser.parse_args()
    headline("staging a save")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    measure(options.device, layers=options.layers, rounds=QUICK_ROUNDS if options.quick else options.rounds)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
