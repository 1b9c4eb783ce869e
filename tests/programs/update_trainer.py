"""A rank whose every step depends on all transferred state: `update_trainer.py OUT STEPS STEP_S [fsdp | hsdp]`.

Each step draws random numbers of three kinds, and Adam and a schedule remember the earlier steps. Each step appends a
line to OUT/rank-R: its number, the bit-exact loss, this file's WORD, and the attempt. With NCCL_LIKE=1 the ranks
communicate by a group that fails like NCCL (nccl_like.py).
"""

import os
import random
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from holdfast.train import Session

OUT, STEPS, STEP_S = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
WORD = "first"

backend = "gloo"
if os.environ.get("NCCL_LIKE") == "1":
    import nccl_like  # imported here: tests copy this file alone

    backend = nccl_like.register()
torch.distributed.init_process_group(backend)
torch.set_num_threads(1)
rank = int(os.environ["RANK"])
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
match sys.argv[4:]:
    case ["fsdp"]:
        model = fully_shard(model)
    case ["hsdp"]:
        mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]) // 2, 2), mesh_dim_names=("replicate", "shard"))
        model = fully_shard(model, mesh=mesh)
    case _:
        model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.9)
for seed in (torch.manual_seed, random.seed, np.random.seed):
    seed(100 + rank)
session = Session(model=model, optimizer=optimizer, scheduler=scheduler)
for step in session.steps(STEPS):
    loss = model(torch.randn(8, 4) * random.random() + np.random.rand()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    with (OUT / f"rank-{rank}").open("a") as file:
        file.write(f"{step} {loss.item().hex()} {WORD} {os.environ['HOLDFAST_ATTEMPT']}\n")
    session.commit(loss=loss)
    time.sleep(STEP_S)
