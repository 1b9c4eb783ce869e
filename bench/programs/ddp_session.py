"""DDP over Gloo in a Session, and the loss summed over the ranks: `ddp_session.py STEPS STEP_S`."""

import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from holdfast.train import Session

steps, step_s = int(sys.argv[1]), float(sys.argv[2])
torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
session = Session(model=model, optimizer=optimizer)
for _step in session.steps(steps):
    optimizer.zero_grad()
    loss = model(torch.randn(8, 4)).square().mean()
    loss.backward()
    optimizer.step()
    total = loss.detach()
    dist.all_reduce(total)
    time.sleep(step_s)
    session.commit(loss=total)
