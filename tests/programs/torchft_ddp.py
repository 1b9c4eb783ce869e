"""TorchFT's train_ddp.py in small: a Manager without a Session or init_process_group, which meets at MASTER_PORT.

`torchft_ddp.py STEPS FOLDER`: prints each step, pauses at one until FOLDER has a file `go`, and prints its weights.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn, optim
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

PAUSE_AT = 3


def main() -> None:
    steps, folder = int(sys.argv[1]), Path(sys.argv[2])
    replica = os.environ["REPLICA_GROUP_ID"]
    torch.manual_seed(int(replica))
    model: nn.Module = nn.Linear(4, 2)
    inner = optim.SGD(model.parameters(), lr=0.1)

    def load_state_dict(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optim"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=30)),
        min_replica_size=1,
        load_state_dict=load_state_dict,
        state_dict=lambda: {"model": model.state_dict(), "optim": inner.state_dict()},
        replica_id=f"train_ddp_{replica}",
        timeout=timedelta(seconds=60),
    )
    parallel = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, inner)
    while manager.current_step() < steps:
        optimizer.zero_grad()
        parallel(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        step = manager.current_step()
        print(f"step {step} with {manager.num_participants()}", flush=True)
        while step == PAUSE_AT and not (folder / "go").exists():
            time.sleep(0.05)
    print("weights", model.weight.flatten().tolist(), flush=True)
    manager.shutdown(wait=False)


if __name__ == "__main__":
    main()
