"""Port allocation: each lab has a block of ports, kept for as long as any of its programs runs.

A block is a locked file. Every program of the lab inherits the lock, so it is released when the last one ends.
"""

from __future__ import annotations

import fcntl
import os
import random
import socket
from pathlib import Path

from holdfast.errors import ExitCode, failure
from holdfast.findings import Owner
from lab.cache import home

_SIZE = 24
_FIRST = 20_000
# The kernel assigns ephemeral ports in this range: a port chosen there may be taken before it is used.
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")

NAMES = (
    "etcd",
    "etcd-peer",
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kueue",
    "kueue-webhook",
    "jobset",
    "jobset-webhook",
    "trainer",
    "trainer-webhook",
    "training-operator",
    "training-operator-webhook",
    "mpi-operator",
    "lws",
    "lws-webhook",
    "kwok",
    "kubelet",
)


def claim_ports() -> tuple[int, dict[str, int]]:
    """Claim a free block for the lab; return the descriptor that holds it, and the ports by name."""
    descriptor, first = claim_block(len(NAMES))
    return descriptor, {name: first + index for index, name in enumerate(NAMES)}


def claim_block(count: int) -> tuple[int, int]:
    """Claim so many consecutive ports, at most a block; return the descriptor that holds them, and the first."""
    folder = home() / "ports"
    folder.mkdir(parents=True, exist_ok=True)
    end = int(_RANGE.read_text().split()[0])
    blocks = list(range(_FIRST, end - _SIZE, _SIZE))
    random.shuffle(blocks)
    for first in blocks:
        descriptor = os.open(folder / str(first), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if _locks(descriptor) and all(_free(port) for port in range(first, first + count)):
            return descriptor, first
        os.close(descriptor)
    raise failure(
        "lab-no-free-ports",
        f"no {_SIZE} consecutive ports are free between {_FIRST} and {end}",
        exit_code=ExitCode.CANNOT_RUN_HERE,
        remedy="Stop unused labs (python -m lab down), or see `ss -tln`.",
        owner=Owner.CLUSTER,
    )


def _locks(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _free(port: int) -> bool:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
