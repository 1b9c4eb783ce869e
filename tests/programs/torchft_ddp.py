"""A small TorchFT train_ddp.py: a Manager without a Session or init_process_group, which meets at MASTER_PORT.

Like that one it sets variables before it imports torch, has a loader with worker processes, and sends its state to a
new replica over the process group.

`torchft_ddp.py STEPS FOLDER`: prints each step, pauses at one until FOLDER has a file `go`, and prints its weights.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

REPLICA = int(os.environ["REPLICA_GROUP_ID"])
os.environ["CUDA_VISIBLE_DEVICES"] = str(REPLICA)

import torch  # noqa: E402 - as the original does
from torch import nn, optim  # noqa: E402
from torch.distributed.elastic.multiprocessing.errors import record  # noqa: E402
from torch.utils.data import TensorDataset  # noqa: E402
from torchdata.stateful_dataloader import StatefulDataLoader  # noqa: E402
from torchft import (  # noqa: E402
    DistributedDataParallel,
    DistributedSampler,
    Manager,
    Optimizer,
    ProcessGroupGloo,
)
from torchft.checkpointing.pg_transport import PGTransport  # noqa: E402

PAUSE_AT = 3
BATCH, BATCHES = 8, 1000


@record
def main() -> None:
    steps, folder = int(sys.argv[1]), Path(sys.argv[2])
    torch.manual_seed(REPLICA)
    replicas = int(os.environ["NUM_REPLICA_GROUPS"])
    data = TensorDataset(torch.randn(BATCH * BATCHES * replicas, 4))
    sampler = DistributedSampler(
        data, replica_rank=REPLICA, num_replica_groups=replicas, group_rank=0, num_replicas=1, shuffle=True
    )
    loader = StatefulDataLoader(data, batch_size=BATCH, num_workers=2, sampler=sampler)
    model: nn.Module = nn.Linear(4, 2)
    inner = optim.AdamW(model.parameters(), lr=0.1)
    group = ProcessGroupGloo(timeout=timedelta(seconds=30))

    def load_state_dict(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optim"])

    manager = Manager(
        pg=group,
        min_replica_size=1,
        load_state_dict=load_state_dict,
        state_dict=lambda: {"model": model.state_dict(), "optim": inner.state_dict()},
        replica_id=f"train_ddp_{REPLICA}",
        timeout=timedelta(seconds=60),
        checkpoint_transport=PGTransport(group, timeout=timedelta(seconds=60), device=torch.device("cpu")),
    )
    parallel = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, inner)
    for (inputs,) in loader:
        optimizer.zero_grad()
        parallel(inputs).square().mean().backward()
        optimizer.step()
        step = manager.current_step()
        print(f"step {step} with {manager.num_participants()}", flush=True)
        while step == PAUSE_AT and not (folder / "go").exists():
            time.sleep(0.05)
        if step >= steps:
            break
    print("weights", model.weight.flatten().tolist(), flush=True)
    manager.shutdown(wait=False)


if __name__ == "__main__":
    main()
