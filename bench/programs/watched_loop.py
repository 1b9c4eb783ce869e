"""DDP over Gloo in a Session, with two parameter groups and a loader: `watched_loop.py STEPS STEP_S`.

Most of a step is spent asleep, in the phases in which real work would be, so that its length does not depend on how
many ranks share a core.
"""

import sys
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from holdfast.train import Session

steps, step_s = int(sys.argv[1]), float(sys.argv[2])


class Layer(torch.nn.Module):
    """A linear layer whose forward pass takes 0.6 of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.6 * step_s)
        return self.inner(x).tanh()


torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
body, head = Layer(), torch.nn.Linear(16, 1)
model = DistributedDataParallel(torch.nn.Sequential(body, head))
optimizer = torch.optim.AdamW([{"params": body.parameters()}, {"params": head.parameters(), "lr": 1e-4}], lr=1e-3)
session = Session(model=model, optimizer=optimizer)


def batches() -> Iterator[torch.Tensor]:
    """Endless batches, each after 0.2 of a step."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    while True:
        time.sleep(0.2 * step_s)
        yield torch.randn(8, 16, generator=generator)


loader = session.timed(batches())
for _step in session.steps(steps):
    optimizer.zero_grad()
    x = next(loader)
    loss = (model(x) - x.mean(1, keepdim=True)).square().mean()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
    optimizer.step()
    session.commit(loss=loss.detach(), grad_norm=norm, tokens=16)
