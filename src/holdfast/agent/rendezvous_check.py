"""Detects a rank 0 that never connects to the other ranks, so that each rank trains its own model."""

from __future__ import annotations

import ast
import asyncio
from collections.abc import Callable

from holdfast.agent.python_script import parse_script
from holdfast.agent.zygote import RankCommand
from holdfast.findings import Finding, Severity, replica_suffix
from holdfast.host.processes import descendants, is_networked_with

RENDEZVOUS_LIBRARIES = frozenset({"torch.distributed", "lightning", "pytorch_lightning", "accelerate", "deepspeed"})
"""A script that imports one of these is expected to connect its ranks."""

EARLY_SAMPLE_S, EARLY_PHASE_S, LATE_SAMPLE_S = 2.0, 60.0, 10.0
"""Seconds between two samples of an attempt younger than EARLY_PHASE_S, and of an older one."""

MIN_SAMPLES = 15
"""Shorter programs are not reported: one that loads for long and trains briefly could connect between two samples."""


def expects_rendezvous(command: RankCommand) -> bool:
    """Whether a rank is one of several, and its script imports a library that connects ranks."""
    several = command.environ.get("WORLD_SIZE", "1") not in ("", "1")
    found = parse_script(command.argv, command.cwd, b"import") if several else None
    return found is not None and any(_imports(node) for node in ast.walk(found))


def _imports(node: ast.AST) -> bool:
    match node:
        case ast.Import(names=names):
            modules = [one.name for one in names]
        case ast.ImportFrom(module=str(module), names=names, level=0):
            modules = [f"{module}.{one.name}" for one in names]
        case _:
            return False
    return any(f"{module}.".startswith(f"{library}.") for module in modules for library in RENDEZVOUS_LIBRARIES)


class RendezvousCheck:
    """Samples the sockets of rank 0 until it listens or is connected to MASTER_PORT.

    However ranks connect, and on whatever port, a socket stays open meanwhile: that of torch's store, or a listener of
    gloo or NCCL.
    """

    def __init__(self, command: RankCommand, *, pid_of: Callable[[], int | None]) -> None:
        """`command` started rank 0; `pid_of` returns its pid while it runs."""
        self._command, self._pid_of = command, pid_of
        self._port = int(command.environ.get("MASTER_PORT", "0"))
        self._samples = 0
        self._connected = False
        self._task: asyncio.Task[None] | None = None

    @property
    def missed(self) -> bool:
        """Whether rank 0 was sampled often enough and never connected."""
        return self._samples >= MIN_SAMPLES and not self._connected

    def start(self) -> None:
        """Start sampling."""
        self._task = asyncio.ensure_future(self.watch())

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def watch(self) -> None:
        """Sample until the ranks connect or rank 0 ends, if they are expected to connect."""
        if not await asyncio.to_thread(expects_rendezvous, self._command):
            return
        now = asyncio.get_running_loop().time
        began = now()
        while not self._connected:
            await asyncio.sleep(EARLY_SAMPLE_S if now() - began < EARLY_PHASE_S else LATE_SAMPLE_S)
            if (pid := self._pid_of()) is None:
                return
            met = await asyncio.to_thread(self._is_connected, pid)
            if self._pid_of() is None:
                return  # the process and its sockets may have ended in between
            self._connected, self._samples = met, self._samples + 1

    def _is_connected(self, root: int) -> bool:
        return any(is_networked_with(pid, self._port) for pid in (root, *descendants(root)))


def no_rendezvous_finding(node: int, replica: int) -> Finding:
    """The finding on a rank 0 that succeeded without connecting to another rank."""
    rank = f"rank 0{replica_suffix(replica)}"
    return Finding(
        code="no-rendezvous",
        severity=Severity.WARNING,
        what=f"{rank} ended with code 0 and never connected to another rank: each may have trained its own model",
        where=f"{rank} on node{node}",
        evidence=("no process of it listened on a TCP port, or connected to MASTER_PORT, whenever that was sampled",),
        remedy="Have the script join the ranks: `torch.distributed.init_process_group()`, or Lightning's "
        "`Trainer(devices=..., num_nodes=...)` with the job's counts. Ignore this if each rank is to work by itself.",
    )
