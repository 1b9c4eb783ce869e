"""Two ranks of a loop with one deliberately slow part, for each case in turn; torch is imported once for all.

`profiled_loop.py FOLDER CASE ...`: each a way to wrap the model and the slow part, such as ddp:forward. The ranks of a
case connect to FOLDER/rank.sock and train until they receive a stop request.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # an optimizer would import it in every rank
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from holdfast.train import RankConfig, Session

SQUARE = torch.ones(512, 512)
STEPS = 100_000


def work() -> None:
    """Tens of milliseconds; the rest of a step takes a few."""
    with torch.no_grad():
        for _ in range(16):
            SQUARE @ SQUARE


class Backward(torch.autograd.Function):
    """Slow only in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        work()
        return gradient


class Model(torch.nn.Module):
    def __init__(self, heavy: str) -> None:
        super().__init__()
        self.heavy = heavy
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.heavy == "forward":
            work()
        x = self.layers(x)
        return Backward.apply(x) if self.heavy == "backward" else x


class Samples(torch.utils.data.Dataset):
    def __init__(self, slow: bool) -> None:
        self.slow = slow

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.slow:
            time.sleep(0.1)
        return torch.full((8,), float(index % 7))


def wrapped(way: str, model: torch.nn.Module) -> torch.nn.Module:
    if way == "ddp":
        return DistributedDataParallel(model)
    return fully_shard(model, mesh=init_device_mesh("cpu", (2,))) if way == "fsdp" else model


def norms_of(model: torch.nn.Module) -> dict[str, Any]:
    """`clip_grad_norm_` of shards, of the assembled gradients, and of this rank's shards."""
    shards = [each.grad for each in model.parameters()]
    whole = torch.cat([each.full_tensor().flatten() for each in shards])
    own = torch.cat([each.to_local().flatten() for each in shards])
    return {
        "grad_norm": torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9),
        "whole_norm": whole.norm(),
        "own_norm": own.norm(),
    }


def rank_of(folder: Path, case: str, rank: int) -> None:
    way, _, heavy = case.partition(":")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meet-{way}-{heavy}", None, 2, rank)
    model = wrapped(way, Model(heavy))
    optimizer = torch.optim.AdamW(model.parameters())
    if heavy == "optimizer":
        optimizer.register_step_pre_hook(lambda *_: work())
    loader = torch.utils.data.DataLoader(Samples(heavy == "straggler" and rank == 1))
    much = torch.ones(1 << 24)
    session = Session(
        model=model,
        optimizer=optimizer,
        config=RankConfig(rank=rank, world_size=2, rank_socket=folder / "rank.sock"),
    )
    for _, batch in zip(session.steps(STEPS), loader, strict=True):
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if heavy == "communication":
            dist.all_reduce(much)
        norms = norms_of(model) if heavy == "norm" else {}
        optimizer.step()
        session.commit(loss=loss, **norms)


if __name__ == "__main__":
    for case in sys.argv[2:]:
        pids = []
        for rank in range(2):
            pid = os.fork()
            if pid == 0:
                try:
                    rank_of(Path(sys.argv[1]), case, rank)
                except SystemExit as left:
                    os._exit(int(left.code or 0))
                finally:
                    sys.stderr.flush()
                os._exit(1)
            pids.append(pid)
        if any(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 75 for pid in pids):
            sys.exit(f"{case} failed")
