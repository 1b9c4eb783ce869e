"""A loop under TorchFT's own Manager with its default timeouts: `torchft_loop.py OUT REPLICA STEP_S LIGHTHOUSE`.

It appends the end of each committed step, in Unix seconds, to OUT/REPLICA. On SIGUSR1 its main thread sleeps forever,
while TorchFT's own threads keep running.
"""

import signal
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo

out, replica, step_s, lighthouse = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]), sys.argv[4]


def sleep(_signal: int, _frame: object) -> None:
    """Hang."""
    time.sleep(1e6)


def take(state: dict[str, Any]) -> None:
    """Resume from another replica's weights."""
    model.load_state_dict(state)


signal.signal(signal.SIGUSR1, sleep)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
manager = Manager(
    pg=ProcessGroupGloo(timeout=timedelta(seconds=60)),  # the Manager's default for all its timeouts
    load_state_dict=take,
    state_dict=model.state_dict,
    min_replica_size=1,
    rank=0,
    world_size=1,
    store_addr="127.0.0.1",
    store_port=store.port,
    lighthouse_addr=lighthouse,
    replica_id=f"replica_{replica}",
    hostname=socket.gethostname(),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with (out / replica).open("w", buffering=1) as commits:
    while True:
        manager.start_quorum()
        time.sleep(step_s)
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        for each in model.parameters():
            manager.allreduce(each.grad).wait()
        if manager.should_commit():
            optimizer.step()
            commits.write(f"{time.time():.6f}\n")
