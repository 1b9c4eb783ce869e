"""Trains a small model and records each step's state: `recorded_loop.py OUT STEPS STEP_S`.

Before it commits a step, each rank appends `ATTEMPT STEP DIGEST SECONDS` to OUT/steps-RANK.txt: the digest is that of
the model and its optimizer.
"""

import hashlib
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from holdfast.train import Session

out, steps, step_s = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
attempt, rank, size = os.environ["HOLDFAST_ATTEMPT"], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
session = Session(model=model, optimizer=optimizer)


def digest() -> str:
    """A digest of all tensors that is bit-exact."""
    moments = (value for state in optimizer.state.values() for value in state.values())
    tensors = (each.detach().numpy().tobytes() for each in (*model.parameters(), *moments))
    return hashlib.sha256(b"".join(tensors)).hexdigest()[:16]


with (out / f"steps-{rank}.txt").open("a") as record:
    for step in session.steps(steps):
        # Noise of the generator too: it continues where it was only if the checkpoint has its state.
        features = torch.randn(16, 4) + rank
        optimizer.zero_grad()
        loss = (model(features).squeeze(1) - features.sin().sum(dim=1)).square().mean()
        loss.backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
        optimizer.step()
        time.sleep(step_s)
        print(attempt, step, digest(), f"{time.time():.3f}", file=record, flush=True)
        session.commit(loss=loss)
