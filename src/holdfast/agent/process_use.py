"""What a silent rank's process does: whether it may be at work on something else than a step.

A rank without a step for long may evaluate, save or compile. Then it, or a process that it started, uses the CPU, moves
data, or waits for a disk. A rank that hangs does nothing of this, unless it waits for a GPU: torch then polls.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path

from msgspec import Struct

from holdfast.events import GroupCollectives
from holdfast.host.processes import descendants, open_sockets, state_letter
from holdfast.host.tcp_sockets import tcp_sockets

BUSY_CPU_SHARE = 0.05
"""Share of a core from which a rank is busy; NCCL's and Gloo's threads use a hundredth while they wait."""

BUSY_BYTES_PER_S = 1 << 16
"""Bytes read and written from which a rank is busy; heartbeats of torch's store take some dozens."""

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PEER_WAIT = re.compile(r" \(torch/(?:distributed/|autograd/|cuda/)")
"""Innermost frames in which a rank waits for others: a collective, or the all-reduces of a backward pass.

all_reduce (torch/distributed/distributed_c10d.py:3007)
_engine_run_backward (torch/autograd/graph.py:865)
"""


class Silence(StrEnum):
    """Why a rank is silent, as far as it shows."""

    STOPPED = "stopped"
    """A signal has stopped it."""
    WAITING_FOR_PEERS = "waiting for peers"
    """It does nothing but wait in a collective, or in a backward pass."""
    IDLE = "idle"
    """It does nothing, anywhere else."""
    BUSY = "busy"
    """It uses the CPU, moves data, or waits for a disk."""


class ProcessUse(Struct, frozen=True, kw_only=True):
    """What a process and those below it have used so far."""

    at: float
    """Monotonic seconds."""
    cpu_s: float = 0.0
    io_bytes: int = 0
    """Read and written, in files, pipes and TCP connections."""
    waits_for_disk: bool = False


def process_use(pid: int) -> ProcessUse:
    """What a process and those below it have used until now; what cannot be read counts as nothing."""
    pids = [pid, *descendants(pid)]
    return ProcessUse(
        at=time.monotonic(),
        cpu_s=sum(map(_cpu_s, pids)),
        io_bytes=sum(map(_file_bytes, pids)) + _tcp_bytes(pids),
        waits_for_disk=any(map(_waits_for_disk, pids)),
    )


def is_busy(before: ProcessUse, after: ProcessUse) -> bool:
    """Whether a process was at work between two readings."""
    took_s = max(1e-3, after.at - before.at)
    return (
        before.waits_for_disk
        or after.waits_for_disk
        # A process that has ended takes its share with it, so the sum may shrink.
        or abs(after.cpu_s - before.cpu_s) > BUSY_CPU_SHARE * took_s + 1 / _TICKS_PER_S
        or abs(after.io_bytes - before.io_bytes) > BUSY_BYTES_PER_S * took_s
    )


def classify_silence(
    *, state: str, busy: bool, top_frame: str, collectives: Iterable[GroupCollectives] = ()
) -> Silence:
    """Why a rank is silent, by its process, its stack, and its flight recorders.

    A rank that polls its GPU is busy, but shows a collective that it has entered and not completed.
    """
    if state == "T":
        return Silence.STOPPED
    if any(group.pending for group in collectives):
        return Silence.WAITING_FOR_PEERS
    if busy:
        return Silence.BUSY
    return Silence.WAITING_FOR_PEERS if waits_for_peers(top_frame) else Silence.IDLE


def waits_for_peers(top_frame: str) -> bool:
    """Whether a rank's innermost frame is one in which it waits for others."""
    return bool(_PEER_WAIT.search(top_frame))


def _cpu_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def _file_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar:", "wchar:")))


def _tcp_bytes(pids: Iterable[int]) -> int:
    try:
        sockets = tcp_sockets()
    except OSError:
        return 0
    names = set[str]().union(*map(open_sockets, pids))
    counters = [each.counters for each in sockets if f"socket:[{each.inode}]" in names]
    return sum(each.acked_bytes + each.received_bytes for each in counters)


def _waits_for_disk(pid: int) -> bool:
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return False
    return any(state_letter(int(thread)) == "D" for thread in threads)
