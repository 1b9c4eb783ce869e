"""Trains a small model on bit-exact data, waits at gates, and stays: `gated.py FOLDER STEPS BATCH STEP_S GATE...`.

Before the step of each gate it waits for FOLDER/gate-STEP. Each rank appends `step first last` of every micro-batch
that counts to FOLDER/samples-ATTEMPT-RANK.txt before it commits the step. After the last step FOLDER/end-RANK.pt has
its state.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from holdfast.train import Session

folder, steps, batch, step_s = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
gates = set(map(int, sys.argv[5:]))
rank = int(os.environ["RANK"])
torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
inner = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
model = DistributedDataParallel(inner)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
session = Session(model=model, optimizer=optimizer)
with (folder / f"samples-{os.environ['HOLDFAST_ATTEMPT']}-{rank}.txt").open("a") as notes:
    for step in session.steps(steps):
        while step in gates and not (folder / f"gate-{step}").exists():
            time.sleep(0.02)
        optimizer.zero_grad()
        for micro in session.micro_batches(batch):
            number = torch.tensor(micro.samples, dtype=torch.float32).view(-1, 1)
            features = torch.cat([(number * scale).sin() for scale in (0.1, 0.7, 1.3, 2.9)], dim=1)
            loss = (model(features) - (number * 0.01).cos()).square().mean()
            (loss * micro.loss_scale).backward()
            if micro.loss_scale:
                print(step, micro.samples.start, micro.samples.stop, file=notes, flush=True)
        optimizer.step()
        time.sleep(step_s)
        session.commit(loss=loss)
end = folder / f"end-{rank}.pt"
torch.save((inner.state_dict(), optimizer.state_dict()), end.with_suffix(".new"))
end.with_suffix(".new").rename(end)
time.sleep(3600)
