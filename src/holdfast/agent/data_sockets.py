"""Selects the sockets by which ranks exchange data with other nodes, and describes them. Pure.

Left out are listeners, connections within the node, those of the store, and those that a server of this node accepted
at all of its addresses: Gloo and NCCL listen at one. What is left may still lead to storage or a tracker; the
controller tells by the report of the other end.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from heapq import nsmallest
from typing import NamedTuple

from msgspec import Struct

from holdfast.events import SocketEnds
from holdfast.host.tcp_sockets import TcpSocket
from holdfast.preflight.interfaces import Interface, chosen_by_nccl

MAX_CONNECTIONS, MIN_CONNECTIONS, MAX_OF_RUN = 64, 4, 4096
"""Connections in a report: fewer in a run of more than 64 nodes, whose log would grow."""
_ANY = (bytes(4), bytes(16))
"""The addresses of a listener at all addresses."""


class RankSocket(NamedTuple):
    """A connection of a rank."""

    rank: int
    socket: TcpSocket


class NodeAddresses(Struct, frozen=True, kw_only=True):
    """This node's addresses that other nodes reach, and the interface of each."""

    interfaces: Mapping[bytes, str]
    promised: tuple[str, ...] = ()
    """The interfaces that the run names; what it names if there are none here; empty if it names none."""

    @classmethod
    def of(cls, interfaces: Sequence[Interface], words: Iterable[str]) -> NodeAddresses:
        """`words` are the run's, as NCCL_SOCKET_IFNAME has them."""
        usable = [each for each in interfaces if each.usable and not all(one.is_loopback for one in each.usable)]
        words = tuple(words)
        admitted = {found.name: None for one in words for _, chosen in chosen_by_nccl(one, usable) for found in chosen}
        return cls(
            interfaces={address.packed: each.name for each in usable for address in each.usable},
            promised=tuple(admitted) or tuple(one.removeprefix("=") for one in words),
        )

    def interface(self, socket: TcpSocket) -> str:
        """The interface with a socket's local address; empty if it is gone."""
        return self.interfaces.get(socket.local.address, "")

    def is_other(self, socket: TcpSocket) -> bool:
        """Whether the run names interfaces, and not the one of this socket."""
        return bool(self.promised) and self.interface(socket) not in self.promised


def public_ports(sockets: Iterable[TcpSocket]) -> frozenset[int]:
    """The ports at which this node listens at all of its addresses."""
    return frozenset(each.local.port for each in sockets if each.listening and each.local.address in _ANY)


def to_other_nodes(
    sockets: Iterable[TcpSocket], own: Collection[bytes], store_ports: Collection[int], public: Collection[int]
) -> Iterator[TcpSocket]:
    """The connections that may carry data to other nodes, of a node with these addresses and public ports."""
    for each in sockets:
        if (
            each.inode  # 0 until a program has accepted it
            and not each.listening
            and each.remote.address not in own
            and each.local.port not in public
            and each.local.port not in store_ports
            and each.remote.port not in store_ports
            and not each.remote.is_loopback
        ):
            yield each


def report_limit(nodes: int) -> int:
    """Connections that each of so many nodes reports."""
    return min(MAX_CONNECTIONS, max(MIN_CONNECTIONS, MAX_OF_RUN // nodes))


def sample(sockets: Iterable[RankSocket], addresses: NodeAddresses, limit: int) -> tuple[SocketEnds, ...]:
    """The ends of at most this many sockets.

    Those over another interface than the run's come first; they may lead to storage, so they take at most half of the
    places that others need. Otherwise a number that both ends compute decides, so that the other node reports mostly
    the same connections.
    """

    def place(each: RankSocket) -> tuple[bool, int]:
        ends = sorted((each.socket.local, each.socket.remote))
        return not is_near(each.socket), zlib.crc32(repr(ends).encode())

    sockets = [*sockets]
    others = nsmallest(limit, (each for each in sockets if addresses.is_other(each.socket)), key=place)
    named = nsmallest(limit, (each for each in sockets if not addresses.is_other(each.socket)), key=place)
    first = others[: max(limit // 2, limit - len(named))]
    return tuple(ends_of(each, addresses) for each in (*first, *named[: limit - len(first)]))


def is_near(socket: TcpSocket) -> bool:
    """Whether the first halves of both addresses are equal, as in most networks of nodes; storage is rarely so near."""
    local, remote = socket.local.address, socket.remote.address
    return len(local) == len(remote) and local[: len(local) // 2] == remote[: len(local) // 2]


def carried_bytes(socket: TcpSocket) -> int:
    """What a connection has sent and received."""
    return socket.counters.acked_bytes + socket.counters.received_bytes


def ends_of(each: RankSocket, addresses: NodeAddresses) -> SocketEnds:
    """A connection as events have it."""
    local, remote = each.socket.local, each.socket.remote
    return SocketEnds(
        rank=each.rank,
        interface=addresses.interface(each.socket),
        local=str(local),
        remote=str(remote),
        carried_bytes=carried_bytes(each.socket),
    )
