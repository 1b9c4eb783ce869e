"""Owns the pods' networks: a namespace of its own for each, an address, and a file of names.

The work is that of holdfast's own module of network namespaces. One call at a time, in a thread beside the loop.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from holdfast.launch.local.netns import NetnsNetwork, NetnsNode, remove


@dataclass(frozen=True, kw_only=True)
class PodSandbox:
    """Where a pod's processes run."""

    name: str
    address: str
    hosts: Path
    """Its /etc/hosts, changed in place."""
    exec_prefix: tuple[str, ...]
    """What to put before a command that is to run there."""
    probe_prefix: tuple[str, ...]
    """The same for a command that is to reach only its network, as a probe does."""


class PodSandboxes:
    """All of them, as one network."""

    def __init__(self, tag: str, folder: Path) -> None:
        remove(tag)
        self._network = NetnsNetwork.create(tag)
        self._folder = folder
        self._lock = asyncio.Lock()
        self.address = self._network.address
        """Where pods reach this process."""

    async def add(self, uid: str, hostname: str) -> PodSandbox:
        """Make a place for a pod; its host name is the pod's, and others may have the same."""
        name = _name(uid)
        async with self._lock:
            node: NetnsNode = await asyncio.to_thread(self._network.add_node, name)
        hosts = self._folder / f"{name}.hosts"
        hosts.touch()
        return PodSandbox(
            name=name, address=node.address, hosts=hosts, exec_prefix=node.prefix, probe_prefix=node.prefix[:4]
        )

    async def remove_one(self, sandbox: PodSandbox) -> None:
        """Kill all that runs there, and take it away."""
        async with self._lock:
            await asyncio.to_thread(self._network.remove_node, sandbox.name)
        sandbox.hosts.unlink(missing_ok=True)

    async def power_off(self, sandbox: PodSandbox) -> None:
        """Cut it off without a word to its peers, as when a machine dies, and kill all that runs there."""
        async with self._lock:
            await asyncio.to_thread(self._network.partition, sandbox.name)
            await asyncio.to_thread(self._network.kill, sandbox.name)

    def remove(self) -> None:
        """Take all of it away, with what runs there."""
        self._network.remove()


def write_hosts(hosts: Path, text: str) -> None:
    """Change the names a pod sees: in place, since what it has mounted is the file."""
    if hosts.read_text() != text:
        with hosts.open("r+") as file:
            file.write(text)
            file.truncate()


def _name(uid: str) -> str:
    return f"p{uid.replace('-', '')[:12]}"
