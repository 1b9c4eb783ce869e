"""What each optimisation of a save's call earns: the plain way (A, A') compared with it (B), after a training step.

.venv/bin/python -m bench.save_parts [--quick | --rounds N] [--layers N]

The loop is that of bench.checkpoint: a step comes right before each call, because it evicts the call's data from the
processor's caches. Figures are CPU time of the loop's thread, which other load on the machine changes less. A part
stays in the code if it earns 0.05 ms a step (replicas capture the random numbers at every step), or 5 % of what a save
costs the loop.
"""

from __future__ import annotations

import argparse
import io
import random
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import numpy.random
import torch
import torch.distributed as dist

from bench.checkpoint import Loop
from bench.paired_stats import OURS, PEER, PEER_AGAIN, Round, estimate, headline, interleave, say, table
from holdfast.train.checkpoint import rng
from holdfast.train.checkpoint.background import BackgroundWorker
from holdfast.train.checkpoint.staging import StagingBuffer
from holdfast.train.checkpoint.train_state import TrainState

ROUNDS, QUICK_ROUNDS, LAYERS = 16, 2, 2


def plain_random() -> dict[str, Any]:
    """The states of the generators, from their libraries."""
    return {"python": random.getstate(), "numpy": numpy.random.get_state(legacy=False), "torch": torch.get_rng_state()}


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog="bench.save_parts", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--quick", action="store_true", help="only to see that it works")
    options = parser.parse_args()
    rounds = QUICK_ROUNDS if options.quick else options.rounds
    headline("parts of a save's call, with and without their optimisation")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as folder:
        loop = Loop(Path(folder), options.layers)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(loop.train_state.optimizer, 1000)
        state = TrainState(model=loop.train_state.model, optimizer=loop.train_state.optimizer, scheduler=scheduler)
        bare = TrainState(model=loop.train_state.model, optimizer=loop.train_state.optimizer)
        staging, worker, pool = StagingBuffer(bare), BackgroundWorker("bench"), ThreadPoolExecutor(1)

        def tree() -> None:
            staging.start_copy()

        def written(train_state: TrainState) -> object:
            file = io.BytesIO()
            part = train_state.scheduler
            torch.save(plain_random() | {"scheduler": part.state_dict() if part else None}, file)
            return file

        def after(call: Callable[[], object], done: Callable[[], object] = int) -> Callable[[], float]:
            def one() -> float:
                loop.train()
                began = time.thread_time()
                call()
                took_s = time.thread_time() - began
                done()
                return 1e3 * took_s

            return one

        def fresh() -> None:
            staging._cached = None
            staging.start_copy()

        rows: list[tuple[str, ...]] = []
        for what, ours, plain, done in (
            ("random numbers", rng.capture, plain_random, int),
            ("random numbers of Python", rng._python(), random.getstate, int),
            ("random numbers of numpy", rng._numpy(), lambda: numpy.random.get_state(legacy=False), int),
            ("a rank's part: deferred, against torch.save", state.per_rank_state, lambda: written(state), int),
            ("the same without scheduler", bare.per_rank_state, lambda: written(bare), int),
            ("waking the writer", lambda: worker.submit(int), lambda: pool.submit(int), int),
            ("state tree, cached", tree, fresh, staging.finish_copy),
        ):
            sides = {PEER: after(plain, done), OURS: after(ours, done), PEER_AGAIN: after(plain, done)}
            for each in sides.values():
                each()
            rows.append((what, *_row(interleave(sides, rounds, unit=f"ms, {what}"))))
        say("")
        say(table(("part", "with", "plain", "earns, ms", "A/A floor, ms"), rows))
        calls = [1e3 * loop.ours().stall_s for _ in range(max(8, rounds // 2))]
        say(f"the whole stall of a save: {estimate(calls)} ms by the clock")
        loop.close()
    dist.destroy_process_group()


def _row(rounds: list[Round]) -> tuple[str, ...]:
    earned = estimate([(each[PEER] + each[PEER_AGAIN]) / 2 - each[OURS] for each in rounds])
    floor = estimate([each[PEER_AGAIN] - each[PEER] for each in rounds])
    with_it, plain = (median(each[side] for each in rounds) for side in (OURS, PEER))
    return f"{with_it:.3f}", f"{plain:.3f}", str(earned), str(floor)


if __name__ == "__main__":
    main()
