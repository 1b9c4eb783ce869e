"""DDP over Gloo in a Session, with a NaN on one rank in one step: `planted_nan.py STEPS STEP_S RANK STEP PARAMETER`.

Four layers are four parameter groups. The NaN is in the gradient of the parameter of that number, in the order of the
optimizer, or in the loss with PARAMETER -1. Only a first attempt has it.
"""

import math
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from holdfast.train import Session

steps, step_s = int(sys.argv[1]), float(sys.argv[2])
rank, bad_step, parameter = map(int, sys.argv[3:])

torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
layers = [torch.nn.Linear(8, 8) for _ in range(4)]
model = DistributedDataParallel(torch.nn.Sequential(*layers))
optimizer = torch.optim.AdamW([{"params": layer.parameters()} for layer in layers], lr=1e-3)
session = Session(model=model, optimizer=optimizer)
parameters: list[Any] = [each for group in optimizer.param_groups for each in group["params"]]


def to_nan(gradient: torch.Tensor) -> torch.Tensor:
    """A gradient in which one number is a NaN."""
    damaged = gradient.clone()
    damaged.view(-1)[0] = math.nan
    return damaged


for step in session.steps(steps):
    time.sleep(step_s)
    is_bad = (dist.get_rank(), step) == (rank, bad_step) and os.environ.get("HOLDFAST_ATTEMPT", "0") == "0"
    hook = parameters[parameter].register_hook(to_nan) if is_bad and parameter >= 0 else None
    optimizer.zero_grad()
    loss = model(torch.randn(4, 8)).square().mean()
    if is_bad and parameter < 0:
        loss = loss * math.nan
    loss.backward()
    if hook is not None:
        hook.remove()
    optimizer.step()
    session.commit(loss=loss.detach())
