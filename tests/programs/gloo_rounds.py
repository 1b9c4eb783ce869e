"""The traffic of a training without its arithmetic: each step is an all-reduce by Gloo, reported to the agent.

    python gloo_rounds.py STEPS BYTES INTERFACE

It waits for an interface that is attached after the node has started.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import sys
import time
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

from holdfast.protocol.rank_messages import Hello, RankStep, encode

STEPS, BYTES, INTERFACE = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
SIOCGIFADDR = 0x8915
PAUSE_S = 0.05
"""Between steps, so that the run leaves most of the CPU to other tests."""


def is_ready(interface: str) -> bool:
    """Whether both ends of the interface are up, and this one has an address."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCGIFADDR, struct.pack("256s", interface.encode()))
        return Path(f"/sys/class/net/{interface}/operstate").read_text() == "up\n"
    return False


def main() -> None:
    agent = socket.socket(socket.AF_UNIX)
    agent.connect(os.environ["HOLDFAST_RANK_SOCKET"])
    agent.sendall(encode(Hello(rank=int(os.environ["RANK"]), pid=os.getpid())) + b"\n")
    while not is_ready(INTERFACE):
        time.sleep(0.02)
    dist.init_process_group("gloo")
    gradients = torch.zeros(BYTES // 4)
    started = time.time()
    for step in range(1, STEPS + 1):
        dist.all_reduce(gradients)
        ended = time.time()
        agent.sendall(encode(RankStep(step=step, started=started, ended=ended)) + b"\n")
        started = ended
        time.sleep(PAUSE_S)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
