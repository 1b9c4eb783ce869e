"""Ranks that all-reduce in every step, until one of them uses a different group: `mismatched_group.py RANK STEP`.

With NCCL_LIKE=1 they communicate by a group that fails like NCCL (nccl_like.py).
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

from holdfast.train import Session


def evaluate(group: dist.ProcessGroup | None) -> None:
    dist.all_reduce(torch.ones(1), group=group)


def main() -> None:
    astray, at = map(int, sys.argv[1:])
    backend = "gloo"
    if os.environ.get("NCCL_LIKE") == "1":
        import nccl_like

        backend = nccl_like.register()
    dist.init_process_group(backend)
    group = dist.new_group()
    model = torch.nn.Linear(2, 1)
    session = Session(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    for step in session.steps(1000):
        if (dist.get_rank(), step) == (astray, at):
            evaluate(group)
        dist.all_reduce(torch.ones(1))
        session.commit()


if __name__ == "__main__":
    main()
