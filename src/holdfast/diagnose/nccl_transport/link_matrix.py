"""Builds the link matrix in one pass over all connections: the routes between nodes, and where two ends disagree."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from msgspec import Struct, field

from holdfast.diagnose.nccl_transport.networks import network_of
from holdfast.diagnose.nccl_transport.transport_report import (
    COLLNET,
    NET,
    P2P,
    RECEIVE,
    SHM,
    Communicator,
    Direction,
    Link,
    LinkType,
    NcclProcess,
)

Cells = Mapping[tuple[str, str], Mapping[str, int]]
"""For sender and receiver (nodes, or ranks as text) the labels of their connections, and the channels of each."""
UNKNOWN_NODE = "?"
"""The node of a rank without any log."""


class Disagreement(Struct, frozen=True, kw_only=True):
    """Two ends of a connection that use different transports."""

    communicator: str
    sender: int
    receiver: int
    nodes: tuple[str, str]
    send: str
    receive: str
    is_reverse: bool = False
    """Whether `receive` is the way back instead of the receiver's end."""


class NodeLinks(Struct, kw_only=True):
    """What one node's ranks used."""

    routes: dict[str, set[Direction]] = field(default_factory=lambda: defaultdict[str, set[Direction]](set))
    """Each route, and whether it sends or receives."""
    inter_node_links: int = 0
    """Connections over a network, or to other nodes."""
    nics: dict[str, set[int]] = field(default_factory=lambda: defaultdict[str, set[int]](set))
    """Indices of the network devices used, by network."""


class LinkMatrix(Struct, frozen=True, kw_only=True):
    """Routes by node, and where the two ends of connections disagree."""

    nodes: Mapping[str, NodeLinks]
    inter_node_routes: Counter[str]
    """Channel ends between nodes, and of all networks, by route."""
    disagreements: Sequence[Disagreement]


def build_link_matrix(processes: Sequence[NcclProcess], communicators: Sequence[Communicator]) -> LinkMatrix:
    """Builds the matrix in one pass over all connections."""
    nodes: dict[str, NodeLinks] = {process.node: NodeLinks() for process in processes}
    across: Counter[str] = Counter()
    disagreements: list[Disagreement] = []
    noted: dict[str, set[int]] = {node: set() for node in nodes}  # link types, by their id(), which costs no hashing
    for communicator in communicators:
        places = nodes_of_ranks(communicator, processes)
        sends: dict[tuple[int, int], LinkType] = {}
        receives: dict[tuple[int, int], LinkType] = {}
        for link in communicator.links:
            way, node, sender, receiver = link.link_type, places[link.reported_by], link.sender, link.receiver
            kind, used = way.kind, nodes[node]
            if id(way) not in noted[node]:
                noted[node].add(id(way))
                used.routes[way.route].add(way.direction)
                if kind is NET and way.nic is not None and way.proxy is None:
                    used.nics[way.name].add(way.nic)
            if kind is NET or (kind is P2P and places.get(sender, node) != places.get(receiver, node)):
                across[way.route] += link.channels.bit_count()
                used.inter_node_links += 1
            if kind is not COLLNET:
                (receives if way.direction is RECEIVE else sends).setdefault((sender, receiver), way)
        disagreements += _disagreements(communicator, places, sends, receives)
    return LinkMatrix(nodes=nodes, inter_node_routes=across, disagreements=disagreements)


def nodes_of_ranks(communicator: Communicator, processes: Sequence[NcclProcess]) -> Mapping[int, str]:
    """The node of each rank in the logs."""
    return {member.rank: processes[member.process].node for member in communicator.members}


def _disagreements(
    communicator: Communicator,
    places: Mapping[int, str],
    sends: Mapping[tuple[int, int], LinkType],
    receives: Mapping[tuple[int, int], LinkType],
) -> list[Disagreement]:
    found: list[Disagreement] = []

    def add(pair: tuple[int, int], send: LinkType, receive: LinkType, back: bool) -> None:
        if not _same_transport(send, receive):
            found.append(
                Disagreement(
                    communicator=communicator.name,
                    sender=pair[0],
                    receiver=pair[1],
                    nodes=(places.get(pair[0], UNKNOWN_NODE), places.get(pair[1], UNKNOWN_NODE)),
                    send=send.route,
                    receive=receive.route,
                    is_reverse=back,
                )
            )

    for pair, send in sends.items():
        if receive := receives.get(pair):
            add(pair, send, receive, False)
        if pair[0] < pair[1] and (back := sends.get((pair[1], pair[0]))):
            add(pair, send, back, True)
    return found


def _same_transport(one: LinkType, other: LinkType) -> bool:
    """Whether two ends use the same transport; GPUDirect may differ, since each node decides it."""
    return one.kind is other.kind and (one.kind is not NET or one.name == other.name)


def node_cells(communicator: Communicator, processes: Sequence[NcclProcess]) -> Cells:
    """Node by node, the connections between them."""
    return _cells(communicator, processes, dict(nodes_of_ranks(communicator, processes)))


def rank_cells(communicator: Communicator, processes: Sequence[NcclProcess]) -> Cells:
    """Rank by rank, the connections between them."""
    return _cells(communicator, processes, None)


def _cells(
    communicator: Communicator, processes: Sequence[NcclProcess], places: Mapping[int, str] | None
) -> dict[tuple[str, str], Counter[str]]:
    labels = {member.rank: LinkLabels(processes[member.process]) for member in communicator.members}
    cells: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for link in communicator.links:
        if link.receiver < 0:
            continue
        if places is None:
            pair = str(link.sender), str(link.receiver)
        else:
            pair = places.get(link.sender, UNKNOWN_NODE), places.get(link.receiver, UNKNOWN_NODE)
        cells[pair][labels[link.reported_by].of(link)] += link.channels.bit_count()
    return cells


class LinkLabels:
    """The labels in a matrix of the connections that a process logged."""

    def __init__(self, process: NcclProcess) -> None:
        """The process gives its GPUs' paths and the link layer of its devices."""
        self._nvlink = process.path == "NVL"
        self._roce = bool(process.hcas) and all(hca.endswith("/RoCE") for hca in process.hcas)

    def of(self, link: Link) -> str:
        """A short word: `NVLink`, `P2P`, `SHM`, `IB+GDR`, `RoCE`, `OFI+GDR`, `TCP`, …"""
        way = link.link_type
        if way.kind is P2P:
            return "NVLink" if self._nvlink or way.name == "MNNVL" else "P2P"
        if way.kind is SHM:
            return "SHM"
        name = network_of(way.name).name
        name = way.name if name == "plugin" else "RoCE" if name == "IB" and self._roce else name
        return f"{name}+GDR" if way.gdr else name
