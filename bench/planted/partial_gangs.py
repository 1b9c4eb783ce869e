"""Makes the process that calls it a controller that takes hosts one by one and keeps them: no gang scheduling."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from holdfast.job.backend import NodeId
from holdfast.launch.hosts.hosts_backend import HostsBackend
from holdfast.launch.hosts.linked_hosts import LinkedHosts
from holdfast.launch.machine_pool import MachinePool

DELAY_S = 4.0
"""Between the starts of two nodes of a run."""


def place_one_by_one(*, reverse: bool) -> None:
    """Each node takes a host some time after the one before; with `reverse`, every second run begins at the last."""
    HostsBackend._others_compete = lambda self: False
    start: Callable[[LinkedHosts, NodeId, str], None] = LinkedHosts._send_start

    def later(self: LinkedHosts, node_id: NodeId, host: str) -> None:
        asyncio.get_running_loop().call_later(DELAY_S * node_id.node, start, self, node_id, host)

    LinkedHosts._send_start = later
    if not reverse:
        return
    choose = MachinePool.choose

    def from_the_end(self: MachinePool, *given: object) -> str | None:
        if "gang-1" in self._folder.run_id:
            self.names = tuple(sorted(self.names, reverse=True))
        return choose(self, *given)  # pyright: ignore[reportArgumentType]

    MachinePool.choose = from_the_end
