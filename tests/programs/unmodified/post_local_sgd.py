"""Post-local SGD by DDP's communication hook, averaged by PyTorch's periodic averager; no checkpoints."""

import torch
import torch.distributed as dist
from killed import killed_once, tell
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
own_group, _ = dist.new_subgroups(1)
model.register_comm_hook(PostLocalSGDState(None, own_group, start_localSGD_iter=1), post_localSGD_hook)
averager = PeriodicModelAverager(period=2, warmup_steps=1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(5):
    killed_once(rank, step)
    optimizer.zero_grad()
    model(torch.full((2, 8), float(step + rank))).square().mean().backward()
    optimizer.step()
    averager.average_parameters(model.parameters())
for parameter in model.parameters():
    dist.all_reduce(parameter.data, op=dist.ReduceOp.SUM)
tell(rank, 0, sum(each.double().sum().item() for each in model.parameters()))
dist.destroy_process_group()
