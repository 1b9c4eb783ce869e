"""A small training program for tests: ranks take their data from a Session and record it.

    python data_reader.py KIND LENGTH BATCH STEP_S

KIND is `numbered` or `stream`: a dataset of LENGTH items, or a stream of them. Each rank appends `step item...` to
`items-ATTEMPT-RANK.txt` next to the checkpoints, before it commits the step.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from holdfast.train import Data, Session

KIND, LENGTH, BATCH, STEP_S = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])


class Stream:
    def __iter__(self) -> Iterator[int]:
        return iter(range(LENGTH))


def main() -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    session = Session(model=model, optimizer=optimizer)
    # A different number of workers in each attempt.
    workers = 1 + int(os.environ["HOLDFAST_ATTEMPT"]) % 2
    data = Data(
        range(LENGTH) if KIND == "numbered" else Stream(), batch_size=BATCH, micro_batch_size=2, num_workers=workers
    )
    folder = Path(os.environ["HOLDFAST_CHECKPOINT_PATH"])
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"items-{os.environ['HOLDFAST_ATTEMPT']}-{rank}.txt").open("a") as file:
        for step in session.steps(1_000_000):
            optimizer.zero_grad()
            for micro in session.batches(data):
                loss = model(micro.data.float().view(-1, 1)).mean()
                (loss * micro.loss_scale).backward()
                if micro.loss_scale:
                    print(step, *micro.data.tolist(), file=file, flush=True)
            optimizer.step()
            time.sleep(STEP_S)
            session.commit(loss=loss)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
