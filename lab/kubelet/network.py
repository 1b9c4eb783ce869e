"""Owns the pods' networks: a namespace of its own for each, an address, and a file of names.

The work is that of holdfast's own module of network namespaces. One call at a time, in a thread beside the loop.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from holdfast.launch.local.netns import Network, Node, remove


@dataclass(frozen=True, kw_only=True)
class Berth:
    """Where a pod's processes run."""

    name: str
    address: str
    hosts: Path
    """Its /etc/hosts, changed in place."""
    prefix: tuple[str, ...]
    """What to put before a command that is to run there."""
    inside: tuple[str, ...]
    """The same for a command that is to reach only its network, as a probe does."""


class Berths:
    """All of them, as one network."""

    def __init__(self, tag: str, folder: Path) -> None:
        remove(tag)
        self._network = Network.create(tag)
        self._folder = folder
        self._lock = asyncio.Lock()
        self.address = self._network.address
        """Where pods reach this process."""

    async def add(self, uid: str, hostname: str) -> Berth:
        """Make a place for a pod; its host name is the pod's, and others may have the same."""
        name = _name(uid)
        async with self._lock:
            node: Node = await asyncio.to_thread(self._network.add, name)
        hosts = self._folder / f"{name}.hosts"
        hosts.touch()
        return Berth(name=name, address=node.address, hosts=hosts, prefix=node.prefix, inside=node.prefix[:4])

    async def drop(self, berth: Berth) -> None:
        """Kill all that runs there, and take it away."""
        async with self._lock:
            await asyncio.to_thread(self._network.drop, berth.name)
        berth.hosts.unlink(missing_ok=True)

    async def cut(self, berth: Berth) -> None:
        """Cut it off without a word to its peers, as when a machine dies, and kill all that runs there."""
        async with self._lock:
            await asyncio.to_thread(self._network.partition, berth.name)
            await asyncio.to_thread(self._network.kill, berth.name)

    def remove(self) -> None:
        """Take all of it away, with what runs there."""
        self._network.remove()


def write(hosts: Path, text: str) -> None:
    """Change the names a pod sees: in place, since what it has mounted is the file."""
    if hosts.read_text() != text:
        with hosts.open("r+") as file:
            file.write(text)
            file.truncate()


def _name(uid: str) -> str:
    return f"p{uid.replace('-', '')[:12]}"
