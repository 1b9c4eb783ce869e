"""Has Monarch start the agents of hosts that are linked to the controller, and takes its word for what ends there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from holdfast.errors import HoldfastError
from holdfast.findings import Finding
from holdfast.job.backend import NodeId
from holdfast.launch.monarch.mesh_tls import MeshAuthority, MeshIdentity, store
from holdfast.launch.monarch.monarch_link import MonarchLink
from holdfast.launch.monarch.monarch_messages import AgentEnded, AgentPlacement, FromClient, MeshLost
from holdfast.run_dir import RunDir


class OnPlaced(Protocol):
    """Takes the answer for a node: why Monarch did not start its agent; nothing if it did."""

    async def __call__(self, node_id: NodeId, *, refusal: str) -> None: ...


class LinkedMeshes:
    """The connection to Monarch's client, which listens where the hosts reach it; any port if that is 0."""

    def __init__(
        self,
        folder: RunDir,
        address: str,
        port: int,
        *,
        on_placed: OnPlaced,
        on_end: Callable[[NodeId, str], Awaitable[None]],
        on_lost: Callable[[Finding], Awaitable[None]],
    ) -> None:
        self._folder, self._address, self._port = folder, address, port
        self._on_placed, self._on_end, self._on_lost = on_placed, on_end, on_lost
        self._authority = MeshAuthority(folder.mesh)
        self._link = MonarchLink(
            folder,
            on_message=self._on_message,
            on_lost=lambda lost: self._begin(self._on_lost(lost)),
            address=f"{address}:{port}",
        )
        self._tasks: set[asyncio.Task[None]] = set()
        """What answers to Monarch; asyncio itself does not keep tasks alive."""
        self._started = False

    def start(self) -> None:
        """Begin to connect to the client, unless that has begun."""
        if not self._started:
            self._started = True
            store(self._folder.mesh, self._authority.issue(self._address))
            self._link.start()

    def identity(self, address: str, port: int) -> MeshIdentity:
        """What Monarch's process of a node, at this address, proves itself with."""
        return self._authority.issue(address, port)

    def place(self, node_id: NodeId, where: AgentPlacement) -> None:
        """Have an agent started on another machine; `on_placed` receives the answer."""
        self._begin(self._place(node_id, where))

    def forget(self, node_id: NodeId) -> None:
        """Expect nothing more of a node that is removed."""
        self._link.forget(node_id)

    async def close(self) -> None:
        """End the client; nothing is placed after that."""
        await self._link.close()

    async def _place(self, node_id: NodeId, where: AgentPlacement) -> None:
        self.start()
        try:
            await self._link.place(node_id, where)
        except HoldfastError as error:
            await self._on_placed(node_id, refusal=error.findings[0].what)
        else:
            await self._on_placed(node_id, refusal="")

    def _begin(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _on_message(self, message: FromClient) -> None:
        match message:
            case AgentEnded(reason=reason):
                self._begin(self._on_end(message.node_id, reason))
            case MeshLost(reason=reason):
                self._begin(self._on_end(message.node_id, f"Monarch: {reason}"))
            case _:
                pass
