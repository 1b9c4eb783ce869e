"""Ranks, forked from a process with torch, that train until one of them holds up the others."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import dataclass
from enum import StrEnum
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import torch._dynamo  # the registration of a backend would import it in every rank
import torch.distributed as dist
from tests.programs import nccl_like
from tests.train.fork_context import forks

from holdfast.protocol.flight_recorder_files import DUMP_PREFIX, ENTRIES, NCCL_PIPE_PREFIX
from holdfast.train.session.flight_dump_server import serve_dumps

WORLD = 4
STEPS = 5
"""Steps that all ranks complete before one of them fails."""


class Fault(StrEnum):
    """How a rank comes to hold up the others."""

    STOPPED = "stopped"
    """It is stopped by a signal."""
    OWN_CODE = "own code"
    """It waits in its own code."""
    OTHER_COLLECTIVE = "other collective"
    """It enters another collective than the others."""
    SKIPPED = "skipped"
    """It leaves out one collective."""
    DEAD = "dead"
    """It dies in the collective, and nobody closes its connections: its peers block, as they would with NCCL."""


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The processes of one job."""

    processes: list[BaseProcess]
    environ: dict[str, str]
    connections: Connection
    """Closed with the connections of a rank that died."""

    @property
    def pids(self) -> dict[int, int]:
        """Rank to pid."""
        return {rank: process.pid or 0 for rank, process in enumerate(self.processes)}

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.connections.close()


def start(out: Path, fault: Fault, culprit: int, backend: str) -> Ranks:
    """Start the ranks; returns when all have taken their steps, and a rank that dies has died."""
    environ = {
        ENTRIES: "100",
        DUMP_PREFIX: f"{out}/flight-attempt-0-rank-",
        NCCL_PIPE_PREFIX: f"{out}/nccl-",
        "HOLDFAST_RANK_SOCKET": f"{out}/rank.sock",
    }
    ours, theirs = zip(*(forks.Pipe() for _ in range(WORLD)), strict=True)
    connections, held = forks.Pipe()
    processes = [
        forks.Process(
            target=_run, args=(rank, out, environ, backend, fault if rank == culprit else None, theirs[rank], held)
        )
        for rank in range(WORLD)
    ]
    for process in processes:
        process.start()
    held.close()
    for rank, process in enumerate(processes):
        theirs[rank].close()
        if fault is not Fault.DEAD or rank != culprit:
            assert ours[rank].recv() == "stepped"
        else:
            process.join()
    for link in ours:
        link.close()  # go on
    return Ranks(processes=processes, environ=environ, connections=connections)


def _run(
    rank: int,
    out: Path,
    environ: dict[str, str],
    backend: str,
    fault: Fault | None,
    link: Connection,
    held: Connection,
) -> None:
    os.environ |= environ
    torch.set_num_threads(1)
    if backend == "nccl_like":
        nccl_like.register()
    dist.init_process_group(backend, store=dist.FileStore(f"{out}/store", WORLD), rank=rank, world_size=WORLD)
    evaluation = dist.new_group()
    serve_dumps(Path(environ["HOLDFAST_RANK_SOCKET"]), environ[DUMP_PREFIX], rank)
    for _ in range(STEPS):
        _step()
    dist.barrier(evaluation)
    if fault is Fault.DEAD:
        _die(held)
    link.send("stepped")
    link.poll(None)
    _step(fault)


def _step(fault: Fault | None = None) -> None:
    """Take a step; on NCCL a rank enqueues it all before it waits."""
    enqueues = dist.get_backend() != "gloo"
    loss = torch.ones(4)
    match fault:
        case Fault.STOPPED:
            os.kill(os.getpid(), signal.SIGSTOP)
        case Fault.OWN_CODE:
            threading.Event().wait()
        case Fault.OTHER_COLLECTIVE:
            # From another rank: what it sent by Gloo could release one of the others, which would then differ too.
            dist.broadcast(loss, (dist.get_rank() + 1) % WORLD, async_op=enqueues)
        case Fault.SKIPPED:
            pass
        case _:
            dist.all_reduce(loss, async_op=enqueues)
    dist.all_gather([torch.ones(2) for _ in range(WORLD)], torch.ones(2), async_op=enqueues)
    nccl_like.synchronize()


def _die(held: Connection) -> None:
    """Enter the collective and die before the others enter it; a child keeps the connections open."""
    if os.fork() == 0:
        held.poll(None)  # until the test has ended
        os._exit(0)
    dist.all_reduce(torch.ones(4), async_op=True)
    os.kill(os.getpid(), signal.SIGKILL)
