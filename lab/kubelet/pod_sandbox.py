"""The pods' networks: a network namespace, an address and a hosts file for each.

It uses holdfast's own module of network namespaces, with one call at a time, in a thread.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from holdfast.launch.local.netns import NetnsInterface, NetnsNetwork, NetnsNode, remove


@dataclass(frozen=True, kw_only=True)
class PodSandbox:
    """Where a pod's processes run."""

    name: str
    address: str
    hosts: Path
    """Its /etc/hosts, edited in place."""
    exec_prefix: tuple[str, ...]
    """Command prefix that runs a process there."""
    probe_prefix: tuple[str, ...]
    """Command prefix that enters only its network, for probes."""


class PodSandboxes:
    """All pods' sandboxes, in one network."""

    def __init__(self, tag: str, folder: Path, interfaces: tuple[NetnsInterface, ...]) -> None:
        remove(tag)
        self._network = NetnsNetwork.create(tag, interfaces=interfaces)
        self._folder = folder
        self._lock = asyncio.Lock()
        self.address = self._network.address
        """The address at which pods reach this process."""

    async def add(self, uid: str, hostname: str) -> PodSandbox:
        """Create a pod's sandbox; host names need not be unique."""
        name = _name(uid)
        async with self._lock:
            node: NetnsNode = await asyncio.to_thread(self._network.add_node, name)
        hosts = self._folder / f"{name}.hosts"
        hosts.touch()
        return PodSandbox(
            name=name, address=node.address, hosts=hosts, exec_prefix=node.prefix, probe_prefix=node.prefix[:4]
        )

    async def remove_one(self, sandbox: PodSandbox) -> None:
        """Kill all processes in a sandbox and remove it."""
        async with self._lock:
            await asyncio.to_thread(self._network.remove_node, sandbox.name)
        sandbox.hosts.unlink(missing_ok=True)

    async def power_off(self, sandbox: PodSandbox) -> None:
        """Disconnect a sandbox without notice to its peers, as when a machine dies, and kill all its processes."""
        async with self._lock:
            await asyncio.to_thread(self._network.partition, sandbox.name)
            await asyncio.to_thread(self._network.kill, sandbox.name)

    def remove(self) -> None:
        """Remove all sandboxes and their processes."""
        self._network.remove()


def write_hosts(hosts: Path, text: str) -> None:
    """Rewrite a pod's hosts file in place, because the file itself is mounted in the pod."""
    if hosts.read_text() != text:
        with hosts.open("r+") as file:
            file.write(text)
            file.truncate()


def _name(uid: str) -> str:
    return f"p{uid.replace('-', '')[:12]}"
