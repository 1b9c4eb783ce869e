"""A loop without checkpoints that detects whether it is distributed, as nanoGPT does."""

import os

import torch
from killed import killed_once, tell
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP

ddp = int(os.environ.get("RANK", "-1")) != -1
rank, world_size = 0, 1
if ddp:
    init_process_group(backend="gloo")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.manual_seed(1337 + rank)
model = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
wrapped = DDP(model) if ddp else model
for iteration in range(4):
    killed_once(rank, iteration)
    loss = wrapped(torch.randn(2, 4, 16)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if rank == 0:
        print(f"iter {iteration}: loss {loss.item():.4f}")
tell(rank, 0, sum(each.double().sum().item() for each in model.parameters()))
if ddp:
    destroy_process_group()
