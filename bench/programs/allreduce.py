"""Connects, runs one all-reduce, and writes the time: `allreduce.py OUT` writes OUT/rank-R."""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
at = time.time()
assert total.item() == dist.get_world_size()
rank = dist.get_rank()
partial = Path(sys.argv[1]) / f"partial-{rank}"
partial.write_text(f"{at:.6f}")
os.replace(partial, partial.with_name(f"rank-{rank}"))
dist.destroy_process_group()
