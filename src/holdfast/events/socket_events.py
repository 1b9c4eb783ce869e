"""Events about the TCP sockets by which ranks exchange data with ranks of other nodes."""

from __future__ import annotations

import msgspec

from holdfast.events.base import Event


class SocketEnds(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One end of a connection of a rank to another node."""

    rank: int
    interface: str
    """The interface with the local address; empty if it is gone."""
    local: str
    """`ADDRESS:PORT` at this end."""
    remote: str
    """The same at the other: the rank there has these two in the opposite order."""
    carried_bytes: int = 0
    """Sent and received so far."""


class SocketsObserved(Event, frozen=True, kw_only=True):
    """Which interfaces the ranks of a node use for data, from the kernel's table of their sockets.

    An agent sends it as soon as its ranks have connected, and again when their connections have changed, or have
    carried many bytes over an interface that the run does not name. Connections to anything but another rank have no
    second end in another node's report (diagnose/tcp_pairs.py).
    """

    node: int
    replica: int
    attempt: int
    promised: tuple[str, ...] = ()
    """This node's interfaces that the run names for data; what it names if there are none; empty if it names none."""
    other_interfaces: tuple[str, ...] = ()
    """Interfaces in use that the run does not name, although it names some."""
    connections: tuple[SocketEnds, ...] = ()
    """Those over such interfaces first, and at most half of them if there are others; at most 64, so chosen that both
    ends choose the same."""
    promised_bytes: int = 0
    """What all connections over interfaces that the run names have carried so far."""
    count: int = 0
    """All connections of these ranks to other nodes."""
    addresses: dict[str, str] = {}
    """This node's addresses, and the interface of each."""
    variables: dict[str, str] = {}
    """The variables of its ranks that name interfaces, such as GLOO_SOCKET_IFNAME."""
    host_name: str = ""
    """This node's name and the interface that it resolves to, as `node1 (eth0)`, if other interfaces are in use."""


class LinkRate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the connections over one interface to one address can do together, by their first steps."""

    ends: SocketEnds
    """The slowest of them."""
    bytes_s: int
    """Bytes/s of the time in which there was data to send."""


class LinksMeasured(Event, frozen=True, kw_only=True):
    """The rates of a node's connections in the first steps, once in an attempt; what the network limits, slowest first.

    The controller compares them with those of a probe before the start.
    """

    node: int
    replica: int
    attempt: int
    links: tuple[LinkRate, ...]
    """At most 16."""


class LinkSlowed(Event, frozen=True, kw_only=True):
    """A rank's connection to another node has become slow, and stays so. Rates are in bytes/s of busy time."""

    node: int
    replica: int
    attempt: int
    ends: SocketEnds
    before_bytes_s: int
    """The rate of its first steps."""
    now_bytes_s: int
    retransmits: int
    """Segments that were sent again in the time of the fall so far."""
    segments: int
    """Segments that were sent in that time."""
    others_bytes_s: dict[str, int] = {}
    """The present rate of the fastest other connections of this node, by their remote end."""
