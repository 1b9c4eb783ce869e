"""Ranks that all-reduce in every step, by Gloo, until one sleeps instead: `sleeping_rank.py RANK STEP`.

The others wait for it for WAIT_S.
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

WAIT_S = 2.0


def dream() -> None:
    while True:
        time.sleep(60)


def main() -> None:
    dreamer, asleep = map(int, sys.argv[1:])
    dist.init_process_group("gloo")
    dist.barrier()  # they have connected: from here on no rank waits long
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=WAIT_S))  # no other way after the rendezvous
    for step in range(1, 10):
        if (dist.get_rank(), step) == (dreamer, asleep):
            dream()
        dist.all_reduce(torch.ones(1))


if __name__ == "__main__":
    main()
