"""Makes the process that calls it a node of the bench: own namespaces, the files of its GPUs, and its fault.

The product has no switch for this: the bench changes the defaults of two functions in the agent's process.

It needs root. Every mount is in the process's own mount namespace and disappears with it.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.planted.kinds import KINDS, Base, Kind, Place, set_clock_answer
from holdfast.launch.local.netns import namespace
from holdfast.preflight.node_view import NodeView

VARIABLE = "HOLDFAST_BENCH_PLANTED"
"""Name of a kind, the number of its node, and the folder of the bench, for agent_hook/sitecustomize.py."""
AGENT = ["-m", "holdfast.agent"]

# /sys shows the interfaces of the network namespace in which it was mounted.
_OWN_MOUNTS = """
set -e
mount --make-rprivate /
mount --bind "$0" /etc/hosts
exec 9</sys/fs/cgroup
mount -t sysfs sysfs /sys
mount --no-canonicalize --rbind /proc/self/fd/9 /sys/fs/cgroup
"""


@dataclass(frozen=True, kw_only=True)
class Planted:
    """A kind of fault and its node; None plants nothing."""

    kind: Kind | None
    node: int
    base: Base
    work: Path

    def tree(self, node: int) -> Path:
        """The folder with the files of a node's GPUs and adapters."""
        return self.work / f"trees/node{node}"

    def place(self, node: int) -> Place:
        """A node as the rows of kinds see it."""
        return Place(number=node, tree=self.tree(node), work=self.work)

    def as_text(self) -> str:
        """What `read` reads."""
        return "\n".join((self.kind.name if self.kind else "", str(self.node), self.base.value, str(self.work)))

    @classmethod
    def read(cls, text: str) -> Planted:
        """Parse the value of the environment variable."""
        name, node, base, work = text.split("\n")
        kind = next((each for each in KINDS if each.name == name), None)
        return cls(kind=kind, node=int(node), base=Base(base), work=Path(work))


def enter_namespaces(planted: Planted, node: int) -> None:
    """Give this process its own network, host name and mounts, as the local target's `netns` does for agents."""
    namespace.unshare(namespace.NEW_MOUNT | namespace.NEW_NET | namespace.NEW_UTS)
    socket.sethostname(f"node{node}")
    lines = (
        "link set lo up",
        "link add eth0 type veth peer peer0",
        f"address add {address(node)}/24 dev eth0",
        "link set eth0 up",
        "link set peer0 up",
    )
    subprocess.run(["ip", "-batch", "-"], input="\n".join(lines), text=True, check=True)
    hosts = planted.tree(node) / "hosts"
    hosts.write_text(f"127.0.0.1 localhost\n{address(node)} node{node}\n")
    subprocess.run(["sh", "-c", _OWN_MOUNTS, hosts], check=True)


def address(node: int) -> str:
    """The address of a node that `enter_namespaces` has made."""
    return f"10.98.0.{node + 1}"


def become_node(planted: Planted, node: int) -> None:
    """Show the agent the node's files, and plant the fault if it is on this node."""
    set_clock_answer(synchronised=True)
    place = planted.place(node)
    if planted.base is not Base.MACHINE:
        os.environ["PATH"] = f"{place.tree}/bin:{os.environ['PATH']}"
        _look_at(place.tree)
    if planted.kind:
        planted.kind.prepare(place)
        if node == planted.node:
            planted.kind.plant(place)


def _look_at(tree: Path) -> None:
    """Have the agent's checks start at the tree: a view that names no root gets this one."""
    assert NodeView.__init__.__kwdefaults__["root"] == Path("/")
    NodeView.__init__.__kwdefaults__["root"] = tree


def enter_agent(argv: Sequence[str] = sys.orig_argv) -> None:
    """Called in every Python process of a run: in an agent, become its node."""
    text = os.environ.get(VARIABLE)
    if text and argv[1:3] == AGENT and re.fullmatch(r"\d+", argv[3]):
        become_node(Planted.read(text), int(argv[3]))
