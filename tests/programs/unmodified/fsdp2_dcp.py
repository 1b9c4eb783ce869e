"""FSDP2 with torch.distributed.checkpoint, as TorchTitan and PyTorch's own examples save."""

import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from killed import killed_once, tell
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

EPOCHS = 4

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def state() -> dict[str, object]:
    weights, optim = get_state_dict(model, optimizer)
    return {"model": weights, "optim": optim}


saved = sorted(name for name in os.listdir() if name.startswith("step-") and os.path.exists(f"{name}/.metadata"))
first = 0
if saved:
    found = state()
    dcp.load(found, checkpoint_id=saved[-1])
    set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optim"])
    first = int(saved[-1].removeprefix("step-"))
for step in range(first, EPOCHS):
    killed_once(rank, step)
    model(torch.full((2, 8), float(step + rank))).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    dcp.save(state(), checkpoint_id=f"step-{step + 1}")
tell(rank, first, sum(each.full_tensor().double().sum().item() for each in model.parameters()))
dist.destroy_process_group()
