"""A small training program for tests: every kind of random number affects its result, and it can kill itself.

`loop.py STEPS OUT`: the weights go to OUT when it is done. FAULT=rank:step:moment kills that rank at that step:
`computing` (before the step is committed), `unsealed` (its tensors are written, the manifest is not), `unnamed` (with
manifest, but not renamed). RENDEZVOUS names a file to meet at; without one torchrun's variables are used.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from holdfast.train import Session
from holdfast.train.checkpoint import manifest_file


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def arm(moment: str) -> None:
    if moment == "computing":
        die()
    write = manifest_file.write
    manifest_file.write = die if moment == "unsealed" else lambda *given: die(write(*given))


def main(steps: int, out: str) -> None:
    torch.set_num_threads(1)
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    rendezvous = os.environ.get("RENDEZVOUS")
    if world_size > 1:
        dist.init_process_group("gloo", f"file://{rendezvous}" if rendezvous else "env://", None, world_size, rank)
    fault_rank, fault_step, moment = os.environ.get("FAULT", "-1:-1:never").split(":")

    torch.manual_seed(0)
    model: torch.nn.Module = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 8))
    if world_size > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.7)
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(100 + rank)

    session = Session(model=model, optimizer=optimizer, scheduler=scheduler)
    for step in session.steps(steps):
        inputs = torch.randn(4, 8) * random.random() + np.random.rand()
        loss = (model(inputs) - inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        if (rank, step) == (int(fault_rank), int(fault_step)):
            arm(moment)
        session.commit(loss=loss, tokens=4 * world_size)

    torch.save([parameter.detach() for parameter in model.parameters()], f"{out}.{rank}")
    if world_size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
