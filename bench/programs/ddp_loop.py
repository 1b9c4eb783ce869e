"""An ordinary DDP loop on CPU: `ddp_loop.py OUT [session]`; `session` reports each step through holdfast.train.

Rank 0 appends the end of each step, in Unix seconds, to OUT/steps.
"""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

WIDTH = 640
DEPTH = 4
BATCH = 448

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
layers = [layer for _ in range(DEPTH) for layer in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU())]
model = DistributedDataParallel(torch.nn.Sequential(*layers, torch.nn.Linear(WIDTH, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
session = None
if "session" in sys.argv:
    from holdfast.train import Session

    session = Session(model=model, optimizer=optimizer)
generator = torch.Generator().manual_seed(rank)
log = os.open(os.path.join(sys.argv[1], "steps"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
while True:
    inputs = torch.randn(BATCH, WIDTH, generator=generator)
    loss = (model(inputs).squeeze(1) - inputs.mean(dim=1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if session is not None:
        session.commit(loss=loss, tokens=BATCH * dist.get_world_size())
    if rank == 0:
        os.write(log, f"{time.time():.6f}\n".encode())
