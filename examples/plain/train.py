"""An ordinary DDP script without holdfast: prints where it runs, checks an all-reduce and trains."""

import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEPS = int(os.environ.get("STEPS", "20"))
WIDTH = int(os.environ.get("WIDTH", "256"))

on_gpu = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
if on_gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if on_gpu else "gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()

total = torch.tensor([float(rank + 1)], device=device)
dist.all_reduce(total)
expected = world_size * (world_size + 1) / 2
assert total.item() == expected, f"the ranks add up to {total.item()}, not {expected}"
address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
print(f"rank {rank} of {world_size} at {address}: all-reduce ok at {time.time():.6f}", flush=True)

torch.manual_seed(0)
layers = [torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, 1)]
model = DistributedDataParallel(torch.nn.Sequential(*layers).to(device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
generator = torch.Generator().manual_seed(rank)
for step in range(1, STEPS + 1):
    inputs = torch.randn(64, WIDTH, generator=generator).to(device)
    loss = (model(inputs).squeeze(1) - inputs.mean(dim=1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.4f} at {time.time():.6f}", flush=True)

dist.destroy_process_group()
# A Gloo thread may wait for the GIL to release the last tensors; Python must not exit before it has it.
time.sleep(0.1)
