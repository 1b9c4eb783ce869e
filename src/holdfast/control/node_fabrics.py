"""Compares what the nodes of one communicator report of the fabric: a node unlike all others is named."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import islice

from msgspec import Struct

from holdfast.control.node_set import NO_NODES, NodeSet
from holdfast.events import FabricObserved
from holdfast.findings import Finding, Owner, Severity

NODES_DIFFER = "fabric-nodes-differ"
MAX_COMPARED = 8
"""Communicators of an attempt whose nodes are compared: the first that span nodes, mostly all ranks."""
MAX_NAMED = 4
_NET, _GDR = "NET/", "/GDRDMA"


class NodeFabric(Struct, frozen=True, kw_only=True):
    """What counts of a node's report."""

    ranks: int
    """Its ranks of the communicator."""
    connected: tuple[str, ...]
    """What it has connected, rings or trees; empty before, and where it has other connections too."""
    network: str
    nics: int
    devices: int
    direct: bool
    """Whether any connection between nodes reaches GPU memory itself."""
    nccl: str


Reports = Mapping[NodeFabric, NodeSet]
"""The nodes of a communicator by their latest reports, which are mostly alike: 2,048 nodes cost what two do."""
FabricNodes = Mapping[tuple[str, int], Reports]
"""The reports by communicator and its size."""


class _Aspect(Struct, frozen=True, kw_only=True):
    """Something that should be alike on all nodes."""

    name: str
    value: Callable[[NodeFabric], str | int]
    noun: str
    of_ranks: bool = False
    """Whether nodes with more ranks may have more."""
    when_connected: bool = False
    """Whether only connections show it."""
    remedy: str


_ASPECTS = (
    _Aspect(
        name="network",
        value=lambda node: node.network,
        noun="network",
        remedy="Give it what the other nodes have: libraries, devices, the plugin, and the same NCCL_* variables.",
    ),
    _Aspect(
        name="devices",
        value=lambda node: node.devices or "",
        noun="RDMA devices",
        of_ranks=True,
        remedy="`ibv_devinfo` on that node: a port that is down, a device missing from the pod, or NCCL_IB_HCA.",
    ),
    _Aspect(
        name="nics",
        value=lambda node: node.nics or "",
        noun="NICs in use",
        of_ranks=True,
        when_connected=True,
        remedy="Compare the node's devices and its topology (`nvidia-smi topo -m`) with those of another.",
    ),
    _Aspect(
        name="GPUDirect",
        value=lambda node: "used" if node.direct else "not used",
        noun="GPUDirect",
        of_ranks=True,
        when_connected=True,
        remedy="`modprobe nvidia_peermem` on that node, or the kernel, driver and PCIe settings (ACS) of the others.",
    ),
    _Aspect(
        name="version",
        value=lambda node: node.nccl,
        noun="version of NCCL",
        remedy="Use one image for all nodes; LD_LIBRARY_PATH and LD_PRELOAD must not name another libnccl.",
    ),
)


def with_report(known: FabricNodes, seen: FabricObserved) -> FabricNodes:
    """The reports with this one; one of a communicator within a node, or of one too many, is left out."""
    key = (seen.communicator, seen.size)
    if not seen.spans_nodes or (key not in known and len(known) >= MAX_COMPARED):
        return known
    routes = [route for route in seen.between if route.startswith(_NET)]
    used = {route.removeprefix(_NET).removesuffix(_GDR) for route in routes} or {seen.network} - {""}
    node = NodeFabric(
        ranks=sum(last - first + 1 for first, last in seen.ranks),
        connected=seen.connected if routes else (),
        network=" and ".join(sorted(used)),
        nics=seen.nics,
        devices=len(seen.devices),
        direct=any(route.endswith(_GDR) for route in routes),
        nccl=seen.nccl,
    )
    others = {each: nodes.with_member(seen.node, False) for each, nodes in known.get(key, {}).items()}
    reports = others | {node: others.get(node, NO_NODES).with_member(seen.node)}
    return {**known, key: {each: nodes for each, nodes in reports.items() if nodes}}


def differences(reports: Reports, size: int) -> Iterator[tuple[str, Finding]]:
    """How nodes of a communicator of this size differ, each with its aspect; nothing before all have reported."""
    if len(reports) < 2 or sum(each.ranks * len(nodes) for each, nodes in reports.items()) < size:
        return
    is_even = len({each.ranks for each in reports}) == 1
    # Who has only connected trees is not done yet. Sends and receives of pairs of ranks need not be alike.
    connected = len({each.connected for each in reports}) == 1 and all(each.connected for each in reports)
    for aspect in _ASPECTS:
        groups: dict[str | int, NodeSet] = defaultdict(NodeSet)
        for each, nodes in reports.items():
            groups[aspect.value(each)] |= nodes
        shows = (is_even or not aspect.of_ranks) and (connected or not aspect.when_connected)
        if shows and len(groups) > 1 and "" not in groups:
            yield aspect.name, _finding(aspect, sorted(groups.items(), key=lambda group: min(group[1])))


def _finding(aspect: _Aspect, groups: Sequence[tuple[str | int, NodeSet]]) -> Finding:
    """It names the nodes outside the largest group, or all where several are the largest."""
    usual, *others = sorted(groups, key=lambda group: -len(group[1]))
    clear = len(usual[1]) > len(others[0][1])
    rest = f"the other {len(usual[1]):,} nodes" if len(usual[1]) > 1 else _named(usual[1])
    told = [*(f"{value} on {_named(nodes)}" for value, nodes in others[:MAX_NAMED]), f"{usual[0]} on {rest}"]
    odd = reduce(NodeSet.__or__, (nodes for _, nodes in (others if clear else groups)))
    return Finding(
        code=NODES_DIFFER,
        severity=Severity.WARNING,
        what=f"nodes differ in their {aspect.noun}: {', '.join(told)}",
        where=_named(odd),
        evidence=tuple(f"{_named(nodes)}: {aspect.noun} {value}" for value, nodes in groups[:MAX_NAMED]),
        remedy=aspect.remedy,
        owner=Owner.CLUSTER,
    )


def _named(nodes: NodeSet) -> str:
    more = f" and {len(nodes) - MAX_NAMED:,} more" if len(nodes) > MAX_NAMED else ""
    return ", ".join(f"node{node}" for node in islice(nodes, MAX_NAMED)) + more
