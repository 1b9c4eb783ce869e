"""DDP over Gloo in a Session, in which one node damages what it sends: `bad_node.py STEPS BAD_NODE FROM_STEP`.

BAD_NODE is the node with its generation, such as `node2.0`. From FROM_STEP on its part of each all-reduce is NaN,
although its own gradients are fine: all ranks get NaN at once, and none of them is the first.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from holdfast.train import Session

steps, bad_node, from_step = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
session = Session(model=model, optimizer=optimizer)
is_bad = os.environ["HOLDFAST_NODE"].endswith(f"/{bad_node}")


def send(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """All-reduce a bucket of gradients."""
    if is_bad and session.step + 1 >= from_step:
        bucket.buffer().fill_(torch.nan)
    return allreduce_hook(group, bucket)


# DDP refuses annotations that are text, which they are where a test forks this program.
model.register_comm_hook(dist.group.WORLD, lambda group, bucket: send(group, bucket))  # noqa: PLW0108
for _step in session.steps(steps):
    optimizer.zero_grad()
    for part in session.micro_batches(4):
        generator = torch.Generator().manual_seed(part.samples[0])
        inputs = torch.randn(len(part.samples), 8, generator=generator)
        loss = (model(inputs) - inputs.mean(1, keepdim=True)).square().mean()
        loss.backward()
    optimizer.step()
    session.commit(loss=loss.detach())
