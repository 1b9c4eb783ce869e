"""A DDP loop with a Session, as a job to update: `update_loop.py OUT`; each rank appends `PID SECONDS` per step."""

import os
import sys
import time
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

from holdfast.train import Session

STEP_S = 0.05
WIDTH = 256

torch.distributed.init_process_group("gloo")
log = os.open(Path(sys.argv[1]) / f"rank-{os.environ['RANK']}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
layers = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, 1))
model = DistributedDataParallel(layers)
optimizer = torch.optim.AdamW(model.parameters())
session = Session(model=model, optimizer=optimizer)
for _step in session.steps(1_000_000):
    loss = model(torch.randn(64, WIDTH)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    session.commit(loss=loss)
    os.write(log, f"{os.getpid()} {time.time():.6f}\n".encode())
    time.sleep(STEP_S)  # Simulates a step's work.
