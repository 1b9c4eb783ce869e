"""Two ranks without a Session that hang: `hang_without_session.py left|apart`.

Rank 0 exits (`left`) or waits elsewhere (`apart`).
"""

from __future__ import annotations

import os
import sys
import threading

import torch
import torch.distributed as dist


def wait_for_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def main() -> None:
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    print("met", flush=True)
    left = sys.argv[1] == "left"
    if dist.get_rank() == (1 if left else 0):
        wait_for_lock()
    elif left:
        os._exit(0)  # torch may abort at the interpreter's end, while Gloo's threads are at work
    else:
        dist.all_reduce(torch.ones(1))


if __name__ == "__main__":
    main()
