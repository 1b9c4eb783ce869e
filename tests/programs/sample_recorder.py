"""A small training program for tests: ranks take their micro-batches from a Session and record their samples.

    python sample_recorder.py STEPS BATCH STEP_S

Each rank appends `step first last` of every micro-batch that counts to `samples-ATTEMPT-RANK.txt` next to the
checkpoints, before it commits the step.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from holdfast.train import Session

STEPS, BATCH, STEP_S = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])


def main() -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    session = Session(model=model, optimizer=optimizer)
    folder = Path(os.environ["HOLDFAST_CHECKPOINT_PATH"])
    folder.mkdir(parents=True, exist_ok=True)
    notes = folder / f"samples-{os.environ['HOLDFAST_ATTEMPT']}-{rank}.txt"
    with notes.open("a") as file:
        for step in session.steps(STEPS):
            optimizer.zero_grad()
            for micro in session.micro_batches(BATCH):
                loss = model(torch.tensor(micro.samples, dtype=torch.float32).view(-1, 1)).mean()
                (loss * micro.loss_scale).backward()
                if micro.loss_scale:
                    print(step, micro.samples.start, micro.samples.stop, file=file, flush=True)
            optimizer.step()
            time.sleep(STEP_S)
            session.commit(loss=loss)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
