"""Runs nodes on hosts over ssh: keeps a connection to each host of the target."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from urllib.parse import urlsplit

from holdfast.job.run_spec import RunSpec
from holdfast.launch.hosts import prestarted_links
from holdfast.launch.hosts.host_address import LOOPBACK
from holdfast.launch.hosts.host_link import HostLink, HostSettings
from holdfast.launch.hosts.host_messages import Setup
from holdfast.launch.hosts.linked_hosts import END_TIMEOUT_S, LinkedHosts
from holdfast.launch.hosts.ssh_command import PORTS, tunnel_argv
from holdfast.launch.local.run_network import RunNetwork
from holdfast.run_dir import RunDir

SETTLE_S = 3.0
"""Time for hosts to connect before the first nodes are placed: until then the target's order counts."""


class HostsBackend(LinkedHosts):
    """Keeps all hosts of the target connected, spares too, and places nodes on them."""

    def __init__(self, *, folder: RunDir, accepted: RunSpec, networks: RunNetwork, url: str) -> None:
        super().__init__(folder, accepted, accepted.hosts, monarch_at=(LOOPBACK, _port_of(folder.run_id)))
        settings = HostSettings(
            ssh=accepted.ssh, base=Path(accepted.base), port=urlsplit(url).port or 0, run=folder.run_id
        )
        self._connections = tuple(
            HostLink(
                host,
                settings,
                setup=self._setup_over_ssh,
                on_message=self._on_message,
                on_change=lambda _host: self._place(),
            )
            for host in accepted.hosts
        )
        self._links.update({link.host: link for link in self._connections})
        self._ssh = settings
        self._settled = False
        """Whether hosts had time to connect."""

    def _others_compete(self) -> bool:
        return True

    def _connect(self) -> None:
        if not self._running:
            self._running = [asyncio.ensure_future(link.run()) for link in self._connections]
            asyncio.get_running_loop().call_soon(prestarted_links.end)  # after each link has begun
            asyncio.get_running_loop().call_later(SETTLE_S, self._settle)

    def _settle(self) -> None:
        self._settled = True
        self._place()

    def _may_place(self) -> bool:
        return self._settled or self._all_tried()

    def _all_tried(self) -> bool:
        return all(link.tried.is_set() for link in self._connections)

    def _why_waiting(self) -> str:
        return super()._why_waiting() if self._all_tried() else ""

    def _address(self, host: str) -> str:
        return self._accepted.ssh.addresses.get(host, "")

    def _mesh_at(self, host: str) -> tuple[str, int]:
        return LOOPBACK, random.choice(PORTS)

    def _tunnel(self, host: str, mesh: str) -> tuple[str, ...]:
        port = _port_of(self._folder.run_id)
        return tuple(tunnel_argv(host, self._ssh.ssh, self._ssh.base, int(mesh.rpartition(":")[2]), port))

    async def _before_cancel(self) -> None:
        tried = [asyncio.ensure_future(link.tried.wait()) for link in self._connections]
        await asyncio.wait(tried, timeout=END_TIMEOUT_S)

    async def _after_cancel(self) -> None:
        await asyncio.wait(self._running, timeout=END_TIMEOUT_S)

    def _setup_over_ssh(self, host: str, remote_port: int) -> Setup:
        return self._setup(host, LOOPBACK, remote_port, exclusive=True)


def _port_of(run: str) -> int:
    """The port of Monarch's client on this machine's loopback and on each host's: the same for each controller."""
    return random.Random(f"{run}/monarch").choice(PORTS)
