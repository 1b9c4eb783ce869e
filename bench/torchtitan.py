"""What a Session costs a step of TorchTitan's Trainer: its smallest Llama on one rank, compared with the Trainer alone.

.venv/bin/python -m bench.torchtitan [--rounds N] [--steps N]

One process of one thread holds two trainers, made from one configuration, and takes turns: blocks of steps of
TorchTitan's own Trainer (A), of holdfast's with each step reported to an agent's socket (B), and of the own again (A').
A step is the body of TorchTitan's loop. Another process reads the socket with the agent's code. No checkpoint is taken.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import distributed as dist
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

from bench import result_file
from bench.paired_stats import OURS, PEER, PEER_AGAIN, Round, compare, headline, interleave, say, table
from bench.session_overhead import READER
from holdfast.train.integrations.titan import with_holdfast

GOAL = 1.01
ROUNDS, STEPS = 24, 6
EXAMPLE = Path(__file__).parents[1] / "examples" / "torchtitan"


def main() -> None:
    """Measure, and print a line per round and a table."""
    parser = argparse.ArgumentParser(prog="bench.torchtitan", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--steps", type=int, default=STEPS, help="steps per block")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    headline("torchtitan: a step of the smallest Llama on one rank with a Session, compared with TorchTitan alone")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        socket = Path(folder, "rank")
        reader = subprocess.Popen([sys.executable, "-c", READER, socket], stdout=subprocess.PIPE)
        assert reader.stdout is not None
        assert reader.stdout.readline(), "the reader has failed"
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "HOLDFAST_RANK_SOCKET": str(socket)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "HF_HOME": folder, "HF_HUB_OFFLINE": "1"}
        steps = {PEER: Stepper(small_config(folder)).step, OURS: Stepper(with_holdfast(small_config(folder))).step}
        used_ms: dict[str, list[float]] = {PEER: [], OURS: [], PEER_AGAIN: []}
        sides = {
            side: _block(steps[PEER if side == PEER_AGAIN else side], options.steps, kept)
            for side, kept in used_ms.items()
        }
        for warm in sides.values():
            warm()
        for kept in used_ms.values():
            kept.clear()
        rounds = interleave(sides, options.rounds, unit="ms")
        own: list[Round] = [{side: kept[index] for side, kept in used_ms.items()} for index in range(options.rounds)]
        reader.kill()
        reader.wait()
    dist.destroy_process_group()
    measured = {"by the clock": rounds, "in CPU time": own}
    found = [
        result_file.from_rounds(
            f"a step of TorchTitan with a Session, {how}", each, goal=GOAL, unit="ms", peer="TorchTitan 0.3.0 alone"
        )
        for how, each in measured.items()
    ]
    result_file.save(options.json, "TorchTitan's step", found)
    rows = [
        row
        for how, each in measured.items()
        for row in (
            (f"step with a Session, p50, {how}", str(compare(each).ratio), compare(each).verdict(GOAL)),
            ("floor: TorchTitan alone again", str(compare(each).floor), ""),
            ("TorchTitan alone, p50, ms", f"{median(one[PEER] for one in each):.1f}", ""),
        )
    ]
    say(table(("", "B/A", f"goal {GOAL}"), rows))


def small_config(folder: str) -> Trainer.Config:
    """The debug model with the example's text."""
    sys.path.insert(0, str(EXAMPLE))
    import small_text  # pyright: ignore[reportMissingImports]

    small_text.make(Path(folder, "assets"))
    config = llama3_debugmodel()
    config.hf_assets_path, config.dump_folder = f"{folder}/assets/tokenizer", f"{folder}/out"
    config.dataloader.dataset, config.dataloader.dataset_path = "c4", f"{folder}/assets/c4"
    config.training.local_batch_size, config.training.seq_len, config.training.steps = 2, 128, 1_000_000
    config.training.disable_cuda_graphs = True
    config.metrics.log_freq = 10
    config.debug.seed = 1
    return config


class Stepper:
    """A trainer that takes steps as TorchTitan's loop does."""

    def __init__(self, config: Trainer.Config) -> None:
        self.trainer: Any = config.build()
        self.trainer.checkpointer.load()
        self._batches = self.trainer.batch_generator(self.trainer.dataloader)

    def step(self) -> None:
        """One optimizer step."""
        trainer = self.trainer
        assert trainer.should_continue_training()
        trainer.step += 1
        trainer.gc_handler.run(trainer.step)
        trainer.train_step(self._batches)
        trainer.checkpointer.save(trainer.step)


def _block(step: Callable[[], None], count: int, used_ms: list[float]) -> Callable[[], float]:
    """The median of some steps, in ms; that of their CPU time is added to `used_ms`."""

    def block() -> float:
        took_ms: list[float] = []
        busy_ms: list[float] = []
        for _ in range(count):
            began, busy = time.perf_counter(), time.thread_time()
            step()
            took_ms.append(1e3 * (time.perf_counter() - began))
            busy_ms.append(1e3 * (time.thread_time() - busy))
        used_ms.append(median(busy_ms))
        return median(took_ms)

    return block


if __name__ == "__main__":
    main()
