"""A training loop that knows nothing of holdfast: `step_clock_trainer.py STEPS PAUSE [AT]`.

Its ranks average their gradients with Gloo. In the first attempt, after step AT, they do what PAUSE names:
`evaluation`: rank 0 computes for some seconds while the others wait; `stop`: rank 1 stops itself by a signal;
`collective`: rank 1 enters an all-reduce that no other rank enters; `none`: nothing.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import cast

import torch
import torch.distributed as dist

STEPS, PAUSE = int(sys.argv[1]), sys.argv[2]
AT = int(sys.argv[3]) if len(sys.argv) > 3 else 0
STEP_S, EVALUATION_S = 0.05, 4.0


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    others = dist.new_group()
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    for step in range(1, STEPS + 1):
        model(torch.ones(4, 8)).sum().backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
        time.sleep(STEP_S)
        optimizer.step()
        optimizer.zero_grad()
        if step == AT and first:
            pause(dist.get_rank(), others)
    dist.destroy_process_group()
    print(f"done {os.environ.get('PYTHONPATH', '')}", flush=True)


def pause(rank: int, others: object) -> None:
    if PAUSE == "evaluation" and rank == 0:
        until = time.monotonic() + EVALUATION_S
        while time.monotonic() < until:
            torch.mm(torch.ones(64, 64), torch.ones(64, 64))
    elif PAUSE == "stop" and rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    elif PAUSE == "collective" and rank == 1:
        dist.all_reduce(torch.ones(1), group=cast("dist.ProcessGroup", others))


if __name__ == "__main__":
    main()
