"""Owns how local nodes are kept apart: not at all (`process`), or by a network namespace each (`netns`).

The supervisor enters their networks before anything else; the controller it starts inherits where it then is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from holdfast.errors import ExitCode, failure
from holdfast.job.isolation import Isolation

if TYPE_CHECKING:
    from holdfast.launch.local.netns import NetnsNetwork

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class NodeNetwork:
    """Where a node lives: its address, and what goes before a command to run it there."""

    address: str
    command_prefix: tuple[str, ...] = ()


class RunNetwork(Protocol):
    """The networks that the nodes of one run are in; everything can be done twice."""

    def enter(self, agents: Iterable[int]) -> str:
        """Make the run's network, or take it over from an owner that died; the address to listen on.

        Called once, by a process that has one thread. `agents` are the processes of nodes there may still be.
        """
        ...

    def add_node(self, node: int) -> NodeNetwork:
        """Make a node's network, or find it again."""
        ...

    def remove_node(self, node: int) -> None:
        """Remove a node's network."""
        ...

    def partition(self, node: int, for_s: float | None) -> None:
        """Cut a node off, for so many seconds or for good; raises HoldfastError where nodes share a network."""
        ...

    def remove(self) -> None:
        """Remove everything that was made."""
        ...


class SharedNetwork:
    """`process`: all nodes share this machine's loopback, and are told apart by their ports."""

    def enter(self, agents: Iterable[int]) -> str:
        """There is nothing to make."""
        return LOOPBACK

    def add_node(self, node: int) -> NodeNetwork:
        """Every node is where everything is."""
        return NodeNetwork(address=LOOPBACK)

    def remove_node(self, node: int) -> None:
        """Nothing was made."""

    def partition(self, node: int, for_s: float | None) -> None:
        """What is shared cannot be cut."""
        raise failure(
            "fault-unavailable",
            f"{_node_name(node)} has no network of its own that could be cut",
            exit_code=ExitCode.CANNOT_RUN_HERE,
            remedy="Start the run with a target that has `isolation: netns`.",
        )

    def remove(self) -> None:
        """Nothing was made."""


class NamespacedNetwork:
    """`netns`: each node has a network namespace, an address and a name of its own."""

    def __init__(self, run: str) -> None:
        self._tag = run.rpartition("-")[2]
        self._opened_network: NetnsNetwork | None = None

    def enter(self, agents: Iterable[int]) -> str:
        """Become able to make namespaces, with or without privileges, then make the network or take it over."""
        from holdfast.launch.local.netns import NetnsNetwork, enter_rootless, leftovers

        enter_rootless(join_pid=next(iter(agents), None))
        self._opened_network = NetnsNetwork.open(self._tag) if leftovers(self._tag) else NetnsNetwork.create(self._tag)
        return self._opened_network.address

    def add_node(self, node: int) -> NodeNetwork:
        """The node called `node1`, made now or before."""
        network = self._network()
        made = network.nodes.get(_node_name(node)) or network.add_node(_node_name(node))
        return NodeNetwork(address=made.address, command_prefix=made.prefix)

    def remove_node(self, node: int) -> None:
        """Forget the node; the next one of its name gets another address."""
        network = self._network()
        if _node_name(node) in network.nodes:
            network.remove_node(_node_name(node))

    def partition(self, node: int, for_s: float | None) -> None:
        """Nothing arrives at the node and nothing leaves it."""
        self._network().partition(_node_name(node), for_s)

    def remove(self) -> None:
        """Remove the network, and whatever still runs in it."""
        from holdfast.launch.local.netns import remove

        remove(self._tag)

    def _network(self) -> NetnsNetwork:
        from holdfast.launch.local.netns import NetnsNetwork

        self._opened_network = self._opened_network or NetnsNetwork.open(self._tag)
        return self._opened_network


def _node_name(node: int) -> str:
    return f"node{node}"


def run_network_for(isolation: Isolation, run: str) -> RunNetwork:
    """The networks that keep a run's nodes apart so."""
    return NamespacedNetwork(run) if isolation is Isolation.NETNS else SharedNetwork()
