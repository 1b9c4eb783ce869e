"""Trains a small model and reports what its state is after each step: the program that `holdfast accept` runs.

python -m holdfast.train.acceptance_program --steps 100

With `--step-s` the batch is made so large that computing a step takes about this long, on any hardware; each step
reports it as `batch`. With `--compare` each step has digests (CRC-32) of its samples, and of the random state, the
weights and the optimizer's state before it, and of the weights after it; accept/restart_check.py compares those of a
resumed run with those of one that never failed. The numbers are made here: it reads no data and no network.
"""

from __future__ import annotations

import argparse
import os
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from holdfast.train.data.sharding import MicroBatch
from holdfast.train.session.session import Session

VOCABULARY, LENGTH = 512, 64
LARGE_LAYERS, LARGE_WIDTH, LARGE_GPU_WIDTH = 4, 128, 4096
"""Of `--large`: 2.6 MB of gradients on a CPU, 2.2 GB on a GPU."""


class Block(nn.Module):
    """Two linear layers with dropout around a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.1))
        self.outer = nn.Linear(4 * width, width)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values + self.outer(self.inner(values))


def make_model(width: int, layers: int) -> nn.Module:
    """Predicts the next token from the last one."""
    return nn.Sequential(
        nn.Embedding(VOCABULARY, width), *(Block(width) for _ in range(layers)), nn.Linear(width, VOCABULARY)
    )


def tokens_of(samples: Iterable[int]) -> torch.Tensor:
    """Tokens of these samples, shape (samples, LENGTH + 1): each follows from the last one by a rule, or by chance."""
    rows: list[torch.Tensor] = []
    for sample in samples:
        chance = torch.Generator().manual_seed(sample)
        row = torch.randint(VOCABULARY, (LENGTH + 1,), generator=chance)
        ruled = torch.rand(LENGTH + 1, generator=chance) < 0.9
        for place in range(1, LENGTH + 1):
            if ruled[place]:
                row[place] = (5 * row[place - 1] + 7) % VOCABULARY
        rows.append(row)
    return torch.stack(rows)


def loaded(parts: Iterable[MicroBatch]) -> Iterator[tuple[MicroBatch, torch.Tensor]]:
    """Micro-batches with their tokens."""
    for part in parts:
        yield part, tokens_of(part.samples)


def digest(tensors: Iterable[torch.Tensor]) -> int:
    """CRC-32 of all bytes."""
    found = 0
    for each in tensors:
        found = zlib.crc32(bytes(each.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()), found)
    return found


def _compute_s(model: nn.Module, batch: int, device: torch.device) -> float:
    """Seconds of the second of two forward and backward passes over so many samples, without their generation."""
    tokens = torch.zeros((batch, LENGTH), dtype=torch.int64, device=device)
    began = 0.0
    for _ in range(2):
        began = time.monotonic()
        model(tokens).mean().backward()
        model.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()
    return time.monotonic() - began


def random_states() -> Iterator[torch.Tensor]:
    """The states of the generators that dropout uses."""
    yield torch.get_rng_state()
    if torch.cuda.is_available():
        yield torch.cuda.get_rng_state()


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """State and learning rate of each parameter."""
    for group in optimizer.param_groups:
        yield torch.tensor(float(group["lr"]), dtype=torch.float64)
        for parameter in group["params"]:
            for _, value in sorted(optimizer.state[parameter].items()):
                yield torch.as_tensor(value)


class Training:
    """The model, its optimizer and one step; `bench` plants defects by overriding what it does."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        on_gpu = torch.cuda.is_available()
        self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else torch.device("cpu")
        if on_gpu:
            torch.cuda.set_device(self.device)
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        if self.world_size > 1:
            dist.init_process_group("nccl" if on_gpu else "gloo")
        if options.compare and on_gpu:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        torch.manual_seed(0)
        large = (LARGE_GPU_WIDTH if on_gpu else LARGE_WIDTH, LARGE_LAYERS)
        plain = make_model(*(large if options.large else (options.width, options.layers))).to(self.device)
        self.parameters = list(plain.parameters())
        self.batch = self._batch_of(plain, options.step_s) if options.step_s else options.batch
        # DDP lays its buckets out again after its first step, and then rounds sums of three ranks or more otherwise: a
        # resumed run, whose first step is a later one, would differ. Not while it looks for unused parameters.
        wrap = partial(DistributedDataParallel, find_unused_parameters=options.compare)
        self.model = wrap(plain) if self.world_size > 1 else plain
        self.optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=options.steps)
        torch.manual_seed(1 + int(os.environ.get("RANK", "0")))  # dropout differs between ranks

    def _batch_of(self, model: nn.Module, step_s: float) -> int:
        """Samples with which computing takes about so long on rank 0; the other ranks get the same number."""
        batch, took_s = self.options.batch, _compute_s(model, self.options.batch, self.device)
        try:
            while took_s < step_s / 2:
                took_s = _compute_s(model, 2 * batch, self.device)
                batch *= 2
            batch = max(1, round(batch * step_s / took_s))
        except torch.OutOfMemoryError:
            pass  # the last that fitted
        chosen = torch.tensor(batch, device=self.device)
        if self.world_size > 1:
            dist.broadcast(chosen, src=0)
        return int(chosen.item())

    def session(self) -> Session:
        """The session, which resumes from the last checkpoint."""
        size = sum(parameter.numel() for parameter in self.parameters)
        return Session(model=self.model, optimizer=self.optimizer, scheduler=self.scheduler, flops_per_token=6.0 * size)

    def load(self, parts: Iterable[MicroBatch]) -> Iterator[tuple[MicroBatch, torch.Tensor]]:
        """This rank's micro-batches of a step."""
        return loaded(parts)

    def of_all_ranks(self, found: int) -> int:
        """The digests of all ranks, added up: a metric is rank 0's."""
        if self.world_size == 1:
            return found
        total = torch.tensor(found, dtype=torch.int64, device=self.device)
        dist.all_reduce(total)
        return int(total.item())

    def before_step(self, step: int) -> None:
        """Called before each step."""

    def run(self) -> None:
        """Train to the last step."""
        session = self.session()
        for step in session.steps(self.options.steps):
            began = time.monotonic()
            self.before_step(step)
            size = sum(parameter.numel() for parameter in self.parameters)
            found: dict[str, float] = {"parameters": size, "batch": self.batch}
            if self.options.compare:
                found["digest_random"] = self.of_all_ranks(digest(random_states()))
                found["digest_weights"] = digest(self.parameters)
                found["digest_optimizer"] = digest(optimizer_tensors(self.optimizer))
            self.optimizer.zero_grad()
            samples: list[int] = []
            loss = torch.zeros(())
            for part, tokens in session.timed(self.load(session.micro_batches(self.batch))):
                samples += part.samples
                moved = tokens.to(self.device)
                scores = self.model(moved[:, :-1])
                loss = nn.functional.cross_entropy(scores.flatten(0, 1), moved[:, 1:].flatten())
                (loss * part.loss_scale).backward()
            norm = nn.utils.clip_grad_norm_(self.parameters, 1.0)
            self.optimizer.step()
            self.scheduler.step()
            if self.options.compare:
                found["digest_samples"] = self.of_all_ranks(digest((torch.tensor(samples),)))
                found["digest_result"] = digest(self.parameters)
            time.sleep(max(0.0, self.options.pace + began - time.monotonic()))
            session.commit(loss=loss, tokens=session.global_batch * LENGTH, grad_norm=norm, **found)
        if self.world_size > 1:
            dist.destroy_process_group()


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="acceptance_program", description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--width", type=int, default=64, help="of each layer")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--large", action="store_true", help="a model as large as suits the device")
    parser.add_argument("--batch", type=int, default=4, help="samples per rank and step")
    parser.add_argument("--step-s", type=float, default=0.0, metavar="SECONDS", help="make the batch take so long")
    parser.add_argument("--pace", type=float, default=0.0, metavar="SECONDS", help="least time of a step")
    parser.add_argument("--compare", action="store_true", help="report digests of the state with each step")
    return parser.parse_args(words)


if __name__ == "__main__":
    Training(parse()).run()
