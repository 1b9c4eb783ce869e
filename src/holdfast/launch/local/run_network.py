"""Isolates the networks of local nodes: not at all (`process`), or with a network namespace per node (`netns`).

The supervisor enters the run's network first; the controller that it starts inherits the namespaces.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

from holdfast.errors import ExitCode, failure
from holdfast.job.isolation import Isolation

if TYPE_CHECKING:
    from holdfast.launch.local.netns import NetnsNetwork

LOOPBACK = "127.0.0.1"
NO_INTERFACES: Mapping[str, int] = {}


class NodeNetwork(Struct, frozen=True, kw_only=True):
    """A node's address, and the prefix that runs a command in the node."""

    address: str
    command_prefix: tuple[str, ...] = ()


class RunNetwork(Protocol):
    """The network of one run's nodes; all methods are idempotent."""

    def enter(self, agents: Iterable[int]) -> str:
        """Create the run's network, or take it over from an owner that died; returns the address to listen on.

        Call it once, in a process with one thread. `agents` are pids of agents that may still run.
        """
        ...

    def add_node(self, node: int) -> NodeNetwork:
        """Create a node's network, or return the existing one."""
        ...

    def remove_node(self, node: int) -> None:
        """Remove a node's network."""
        ...

    def partition(self, node: int, for_s: float | None) -> None:
        """Cut a node off, for `for_s` seconds or for good; raises HoldfastError if nodes share a network."""
        ...

    def remove(self) -> None:
        """Remove everything that was made."""
        ...


class SharedNetwork:
    """`process`: all nodes share this machine's loopback and differ in their ports."""

    def enter(self, agents: Iterable[int]) -> str:
        """Nothing to create."""
        return LOOPBACK

    def add_node(self, node: int) -> NodeNetwork:
        """Every node has the loopback address."""
        return NodeNetwork(address=LOOPBACK)

    def remove_node(self, node: int) -> None:
        """Nothing to remove."""

    def partition(self, node: int, for_s: float | None) -> None:
        """A shared network cannot be partitioned."""
        raise failure(
            "fault-unavailable",
            f"{_node_name(node)} shares the machine's network and cannot be partitioned",
            exit_code=ExitCode.CANNOT_RUN_HERE,
            remedy="Start the run with a target that has `isolation: netns`.",
        )

    def remove(self) -> None:
        """Nothing to remove."""


class NamespacedNetwork:
    """`netns`: each node has its own network namespace, address and host name."""

    def __init__(self, run: str, interfaces: Mapping[str, int]) -> None:
        self._tag = run.rpartition("-")[2]
        self._interfaces = interfaces
        """Of each node, with their Mbit/s; none means one without a limit."""
        self._opened_network: NetnsNetwork | None = None

    def enter(self, agents: Iterable[int]) -> str:
        """Enter a user namespace if unprivileged, then create the network or take it over."""
        from holdfast.launch.local.netns import NetnsInterface, NetnsNetwork, enter_rootless, leftovers

        enter_rootless(join_pid=next(iter(agents), None))
        wanted = tuple(NetnsInterface(name=name, mbit=mbit) for name, mbit in self._interfaces.items())
        self._opened_network = (
            NetnsNetwork.open(self._tag)
            if leftovers(self._tag)
            else NetnsNetwork.create(self._tag, interfaces=wanted or (NetnsInterface(),))
        )
        return self._opened_network.address

    def add_node(self, node: int) -> NodeNetwork:
        """Create the node, or return the existing one."""
        network = self._network()
        made = network.nodes.get(_node_name(node)) or network.add_node(_node_name(node))
        return NodeNetwork(address=made.address, command_prefix=made.prefix)

    def remove_node(self, node: int) -> None:
        """Remove the node; the next one with its name gets another address."""
        network = self._network()
        if _node_name(node) in network.nodes:
            network.remove_node(_node_name(node))

    def partition(self, node: int, for_s: float | None) -> None:
        """Drop all packets to and from the node."""
        self._network().partition(_node_name(node), for_s)

    def remove(self) -> None:
        """Remove the network and all processes in it."""
        from holdfast.launch.local.netns import remove

        remove(self._tag)

    def _network(self) -> NetnsNetwork:
        from holdfast.launch.local.netns import NetnsNetwork

        self._opened_network = self._opened_network or NetnsNetwork.open(self._tag)
        return self._opened_network


def _node_name(node: int) -> str:
    return f"node{node}"


def run_network_for(isolation: Isolation, run: str, interfaces: Mapping[str, int] = NO_INTERFACES) -> RunNetwork:
    """The network of a run with this isolation, whose nodes have these interfaces with their Mbit/s."""
    return NamespacedNetwork(run, interfaces) if isolation is Isolation.NETNS else SharedNetwork()
