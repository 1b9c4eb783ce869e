"""A DDP loop over Gloo that a fault befalls: `peer_watched_loop.py FOLDER FAULT RANK STEP [--heartbeats]`.

It knows nothing of holdfast, and takes its time as watched_loop.py does. FOLDER gets a file `attempt-TIME` when steps
begin, `step` after each, and `planted` when the fault comes, which happens once. With `--heartbeats` it beats for
NVRx's monitor at each step, as its documentation has it.
"""

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

folder, fault, planted_rank, at_step = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
STEP_S = 0.05

torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
rank = dist.get_rank()
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
planted = folder / "planted"
befalls = rank == planted_rank and not planted.exists()
kept: list[torch.Tensor] = []
step = 0


def has(name: str) -> bool:
    """Whether the fault of this name has begun on this rank."""
    return befalls and fault == name and step >= at_step


def batches() -> Iterator[torch.Tensor]:
    """Endless batches, each after 0.2 of a step."""
    generator = torch.Generator().manual_seed(rank)
    while True:
        time.sleep(0.2 * STEP_S + 0.1 * has("data stall"))
        yield torch.randn(8, 16, generator=generator)


client = None
if "--heartbeats" in sys.argv:
    from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient

    client = RankMonitorClient()
    client.init_workload_monitoring()

if rank == 0:
    (folder / f"attempt-{time.time():.3f}").touch()
loader = batches()
while True:
    if befalls and step == at_step:
        planted.touch()
    if has("crash of a rank"):
        os.kill(os.getpid(), signal.SIGKILL)
    if has("stopped rank"):
        os.kill(os.getpid(), signal.SIGSTOP)
    if has("collective that one rank does not enter"):
        time.sleep(3600)
    if has("memory leak"):
        kept.append(torch.ones(1 << 18))
    if has("bit flip in weights") and step == at_step:
        with torch.no_grad():
            next(model.parameters()).view(torch.int32)[0, 0] ^= 1 << 20
    optimizer.zero_grad()
    x = next(loader)
    time.sleep(0.6 * STEP_S * (3 if has("slow forward pass") else 1))
    loss = (model(x) - x.mean(1, keepdim=True)).square().mean()
    loss = loss * (float("nan") if has("NaN loss") else 1000.0 if has("loss spike") else 1.0)
    loss.backward()
    if has("NaN gradient"):
        next(model.parameters()).grad[0, 0] = float("nan")  # pyright: ignore[reportOptionalSubscript]
    optimizer.step()
    step += 1
    if client is not None:
        client.send_heartbeat()
    if rank == 0:
        (folder / "step").write_text(str(step))
