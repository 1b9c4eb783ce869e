"""Ranks that take a few steps, one of which starts a thread that never ends: `lingering_thread.py RANK well|raise`."""

from __future__ import annotations

import sys
import threading

import torch
import torch.distributed as dist

from holdfast.train import Session


def wait_for_ever() -> None:
    threading.Event().wait()


def main() -> None:
    lingers, how = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = torch.nn.Linear(2, 1)
    session = Session(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    if rank == lingers:
        threading.Thread(target=wait_for_ever, name="uploader").start()
    for _ in session.steps(5):
        session.commit()
    dist.destroy_process_group()
    if rank == lingers and how == "raise":
        raise ValueError("the evaluation has failed")


if __name__ == "__main__":
    main()
