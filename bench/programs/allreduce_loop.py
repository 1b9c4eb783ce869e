"""Repeats an all-reduce over Gloo, under torchrun; `allreduce_loop.py FOLDER` writes up-RANK and pid-RANK there."""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
(Path(sys.argv[1]) / f"pid-{rank}").write_text(str(os.getpid()))
total = torch.ones(1)
while True:
    dist.all_reduce(total)
    (Path(sys.argv[1]) / f"up-{rank}").touch()
    time.sleep(0.02)
