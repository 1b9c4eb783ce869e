"""Monarch's client of one run: `python -m holdfast.launch.monarch.monarch_client RUN GRACE_S DESCRIPTOR ADDRESS`.

ADDRESS is where Monarch on other machines reaches it; empty if all agents are on this one.

A separate process, because a failure inside Monarch can end its client. It serves one controller after the other on
the listening socket that it inherits, and ends when none has come for GRACE_S. Monarch's processes end with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.host.files import read_object
from holdfast.host.process_limits import receive_signals
from holdfast.job.backend import NodeId
from holdfast.launch.monarch.mesh_tunnel import open_tunnel
from holdfast.launch.monarch.monarch_messages import (
    HEARTBEAT_S,
    AgentEnded,
    AgentNotPlaced,
    AgentPlaced,
    ClientAlive,
    ForgetAgent,
    FromClient,
    MeshLost,
    PlaceAgent,
    ToClient,
    decode_to_client,
    encode,
)
from holdfast.run_dir import RunDir

if TYPE_CHECKING:
    from holdfast.launch.monarch.monarch_adapter import Meshes

log = logging.getLogger("holdfast.monarch")


class MonarchClient:
    """Places agents in meshes as the controller requests, and reports what becomes of them."""

    def __init__(self, meshes: Meshes) -> None:
        self._meshes = meshes
        self._outgoing: asyncio.Queue[FromClient] = asyncio.Queue()
        """Kept while no controller is connected."""
        self._agents: dict[NodeId, asyncio.Task[None]] = {}
        self.left = asyncio.Event()
        """Set while no controller is connected."""
        self.left.set()
        self.joined = asyncio.Event()
        """Set while one is."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a controller until its connection ends."""
        self.left.clear()
        self.joined.set()
        sending = [asyncio.ensure_future(self._send(writer)), asyncio.ensure_future(self._send_heartbeats())]
        try:
            while line := await reader.readline():
                self._handle(decode_to_client(line))
        except OSError as error:
            log.warning("the controller's connection failed: %s", error)
        finally:
            for task in sending:
                task.cancel()
            writer.close()
            self.joined.clear()
            self.left.set()

    def _handle(self, message: ToClient) -> None:
        match message:
            case PlaceAgent():
                self._agents[message.node_id] = asyncio.ensure_future(self._keep(message))
            case ForgetAgent():
                if (agent := self._agents.pop(message.node_id, None)) is not None:
                    agent.cancel()

    async def _send(self, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):  # the reader ends too
            while True:
                writer.write(encode(await self._outgoing.get()))
                await writer.drain()

    async def _send_heartbeats(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            self._outgoing.put_nowait(ClientAlive())

    async def _keep(self, wanted: PlaceAgent) -> None:
        """Place an agent, and report its end."""
        from holdfast.launch.monarch.monarch_adapter import MeshError

        node, generation, where = wanted.node, wanted.generation, wanted.where
        try:
            async with open_tunnel(where.tunnel):
                agent = await self._meshes.place(f"node{node}_{generation}", Path(where.order), where.host)
                self._outgoing.put_nowait(AgentPlaced(node=node, generation=generation))
                try:
                    reason = await agent.ended()
                except MeshError as error:
                    self._outgoing.put_nowait(MeshLost(node=node, generation=generation, reason=str(error)))
                else:
                    self._outgoing.put_nowait(AgentEnded(node=node, generation=generation, reason=reason))
                if not where.host:  # else its host process is killed, too
                    await agent.stop()
        except (OSError, MeshError) as error:
            self._outgoing.put_nowait(AgentNotPlaced(node=node, generation=generation, reason=str(error)))


async def _main(run: RunDir, grace_s: float, listening: socket.socket, address: str) -> None:
    from holdfast.launch.monarch.monarch_adapter import Meshes

    client = MonarchClient(Meshes(ready=0 if address else nodes_at_start(run), address=address))
    server = await asyncio.start_unix_server(client.serve, sock=listening)
    async with server:
        while True:
            await client.left.wait()
            try:
                async with asyncio.timeout(grace_s):
                    await client.joined.wait()
            except TimeoutError:
                log.warning("no controller came for %g s", grace_s)
                return


def nodes_at_start(run: RunDir) -> int:
    """How many nodes a run begins with; 0 if it has begun already. Without the job's model, which takes time."""
    if any(run.nodes.glob("node*")):
        return 0
    nodes: Any = read_object(run.job)["job"].get("nodes", {})
    return int(nodes.get("max", 1))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    receive_signals()
    folder, grace, descriptor, listen_at = sys.argv[1:]
    asyncio.run(_main(RunDir(Path(folder)), float(grace), socket.socket(fileno=int(descriptor)), listen_at))
