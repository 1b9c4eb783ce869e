"""All that holdfast uses of Monarch, which changes its interface between minor versions; needs the extra `monarch`.

Each agent is started by an actor in its own process mesh, of one process: so one can be replaced, at a fresh
address, while the others run. On other machines it spawns them under a process of Monarch's that holdfast has started
there (monarch_host.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
from pathlib import Path

import monarch.actor
from monarch.actor import (
    Actor,
    Future,
    HostMesh,
    MeshFailure,
    ProcMesh,
    attach_to_workers,
    endpoint,
    start_worker_loop_forever,
    this_host,
)
from monarch.config import configure

from holdfast.host.files import atomic_write
from holdfast.host.processes import identify
from holdfast.job.backend import NodeId
from holdfast.launch.local.node_processes import NodeProcesses
from holdfast.launch.monarch.monarch_messages import (
    MESH_RECORD_NAME,
    START_TIMEOUT_S,
    STOP_TIMEOUT_S,
    take_order,
)
from holdfast.run_dir import RunDir

log = logging.getLogger("holdfast.monarch")


class MeshError(Exception):
    """Monarch reports an error, in its own words."""


class AgentPlace(Actor):
    """An actor in a process of Monarch's, of which the agent is a child."""

    def __init__(self) -> None:
        self._ended: asyncio.Future[str] | None = None
        self._processes: NodeProcesses | None = None

    @endpoint
    async def start(self, order: str) -> None:
        """Start the agent of the order in this file."""
        wanted = take_order(Path(order))
        folder = RunDir(Path(wanted.run))
        own = identify(os.getpid())
        assert own is not None, "this process is alive"
        record = {"pid": own.pid, "started": own.started}
        atomic_write(folder.node_dir(wanted.node, wanted.generation) / MESH_RECORD_NAME, json.dumps(record).encode())
        self._ended = asyncio.get_running_loop().create_future()
        self._processes = NodeProcesses(folder, wanted.node_slots, self._on_exit)
        self._processes.start(wanted.node_id, wanted.start)
        self._processes.watch(wanted.node_id)

    def _on_exit(self, node_id: NodeId, reason: str) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(reason)

    @endpoint
    async def ended(self) -> str:
        """Wait until the agent has ended; returns how."""
        assert self._ended is not None, "`start` comes first"
        return await self._ended


class PlacedAgent:
    """An agent in a process mesh."""

    def __init__(self, mesh: ProcMesh, place: AgentPlace) -> None:
        self._mesh, self._place = mesh, place

    async def ended(self) -> str:
        """Wait until the agent has ended, and return how; raises MeshError if its mesh fails first."""
        try:
            return await self._place.ended.call_one()
        except Exception as error:
            raise MeshError(_words(error)) from error

    async def stop(self) -> None:
        """Stop the mesh; one that has failed is only forgotten."""
        await _stop(self._mesh)


class Meshes:
    """The process meshes of one run, on this machine or on others."""

    def __init__(self, *, ready: int, address: str) -> None:
        if address:
            configure(default_transport=f"tls://{address}")
        # By default any failed mesh ends the client; here `PlacedAgent.ended` raises.
        monarch.actor.unhandled_fault_hook = _log_failure
        self._ready = [_spawn(this_host(), f"first_{number}") for number in range(ready)]
        """Meshes that are started before the first orders come."""

    async def place(self, name: str, order: Path, host: str) -> PlacedAgent:
        """Start the agent of an order in a mesh without one, which is here unless `host` is the address of another.

        Raises MeshError if that fails.
        """
        if host:
            # Not trust in everybody: Monarch reads the certificates from its variables (mesh_tls.py).
            mesh, place = _spawn(attach_to_workers(ca="trust_all_connections", workers=[host]), name)
        else:
            mesh, place = self._ready.pop() if self._ready else _spawn(this_host(), name)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await place.start.call_one(str(order))
        except Exception as error:
            await _stop(mesh)
            late = f"no answer within {START_TIMEOUT_S:g} s" if isinstance(error, TimeoutError) else ""
            raise MeshError(late or _words(error)) from error
        return PlacedAgent(mesh, place)


def serve_host(address: str) -> Future[None]:
    """Let a client on another machine spawn processes here; the result is there when that has ended."""
    return start_worker_loop_forever(ca="trust_all_connections", address=address)


def _spawn(host: HostMesh, name: str) -> tuple[ProcMesh, AgentPlace]:
    mesh = host.spawn_procs(name=name)
    return mesh, mesh.spawn(name, AgentPlace)


async def _stop(mesh: ProcMesh) -> None:
    with contextlib.suppress(Exception):
        async with asyncio.timeout(STOP_TIMEOUT_S):
            await mesh.stop()


def _log_failure(failure: MeshFailure) -> None:
    log.info("%s", failure)


def _words(error: Exception) -> str:
    """What Monarch says, on one line: the last line has the cause."""
    return " ".join(str(error).split())[-1000:] or type(error).__name__
