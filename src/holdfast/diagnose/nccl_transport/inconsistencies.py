"""Finds differences between ranks and nodes that should be alike: one function for each difference, each a Finding.

fabric_verdict.py decides whether the fabric is good enough.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice

import msgspec
from msgspec import Struct

from holdfast.diagnose.nccl_transport.causes import CAUSES, Effect, first_cause, quoted_line
from holdfast.diagnose.nccl_transport.link_matrix import Disagreement, LinkMatrix
from holdfast.diagnose.nccl_transport.merge import format_numbers, format_ranges
from holdfast.diagnose.nccl_transport.networks import network_of
from holdfast.diagnose.nccl_transport.transport_report import Communicator, Direction, LogLine, NcclProcess
from holdfast.findings import Finding, Owner, Severity

DEGRADING = frozenset(
    {"gdr-missing", "rdma-device-missing", "link-layer-mixed", "network-mixed", "transport-asymmetric", "p2p-disabled"}
)
"""The codes that mean a degraded fabric."""
_MAX_NAMED = 4
"""How many of a kind are named."""
_MAX_FINDINGS = 8
"""How many findings of a kind are listed separately."""
_MOST_NAMES = 512
"""Of variables, of which NCCL has some 300."""
_PER_RANK_VARIABLES = {"NCCL_HOSTID", "NCCL_DEBUG_FILE", "NCCL_COMM_ID", "NCCL_SOCKET_IFNAME", "NCCL_TOPO_FILE"}
"""Variables that may differ from node to node."""
# NCCL_SOCKET_IFNAME=docker0, or nothing set on a node where the first interface is a container's bridge
_NODE_LOCAL_INTERFACE = re.compile(
    r"(lo|docker\d*|veth\w*|virbr\d*|cni\d*|flannel[\w.]*|cali\w*|br-\w+|tunl\d*|ip6tnl\d*):"
)


class MergedSetup(Struct, frozen=True, kw_only=True):
    """All that was read, indexed for the comparisons."""

    processes: Sequence[NcclProcess]
    """Those that are ranks of a communicator."""
    communicators: Sequence[Communicator]
    nodes: Sequence[str]
    """The node of each process, by its index."""
    links: LinkMatrix


def find_inconsistencies(seen: MergedSetup) -> tuple[Finding, ...]:
    """What should be alike and is not, the worst kinds first."""
    return tuple(finding for rule in _RULES for finding in _limit(iter(rule(seen))))


def _limit(findings: Iterator[Finding]) -> Iterator[Finding]:
    """The first of a kind, and how many more there are: a job has hundreds of communicators, a hostile file more."""
    shown = 0
    for finding in islice(findings, _MAX_FINDINGS):
        shown += 1
        yield finding
    if shown == _MAX_FINDINGS and (finding := next(findings, None)) is not None:
        more = 1 + sum(1 for _ in findings)
        yield msgspec.structs.replace(finding, what=f"the same of {more:,} more, the first of them {finding.what}")


def _network_mixed(seen: MergedSetup) -> Iterator[Finding]:
    by_name = _grouped(seen.processes, lambda process: process.network)
    if len(by_name) > 1:
        yield Finding(
            code="network-mixed",
            what=f"ranks chose different networks: {_shares(by_name)}",
            where=_nodes(by_name.get("Socket") or _rarest(by_name)),
            evidence=_quotes(by_name, "network"),
            remedy="NCCL uses the first network that works, so the better one failed on some nodes: compare their "
            "lines above `Using network`.",
            owner=Owner.CLUSTER,
        )


def _transport_asymmetric(seen: MergedSetup) -> Iterator[Finding]:
    found = seen.links.disagreements
    if found:
        yield Finding(
            code="transport-asymmetric",
            what=f"{len(found):,} connections differ between their ends or directions",
            severity=Severity.WARNING,
            where=", ".join(sorted({node for one in found[:64] for node in one.nodes})[:_MAX_NAMED]),
            evidence=tuple(_format_disagreement(one) for one in found[:_MAX_NAMED]),
            remedy="Check the node that most of them have in common.",
            owner=Owner.CLUSTER,
        )


def _format_disagreement(one: Disagreement) -> str:
    other = f"{one.receiver} -> {one.sender} sends" if one.is_reverse else f"{one.receiver} receives"
    return f"{one.communicator}: {one.sender} -> {one.receiver} sends via {one.send}, {other} via {one.receive}"


def _gdr_missing(seen: MergedSetup) -> Iterator[Finding]:
    linked = {process.node for process in seen.processes if process.path == "NVL"}
    without: dict[str, str] = {}
    using = 0
    for node, used in seen.links.nodes.items():
        able = [route for route in used.routes if _may_gdr(route)]
        plain = [route for route in able if not route.endswith("/GDRDMA")]
        using += bool(able)
        # Where GPUs have no NVLink, NCCL receives into GPU memory and sends from host memory on purpose
        # (NCCL_NET_GDR_READ).
        sends = {side for route in plain for side in used.routes[route]} == {Direction.SEND}
        if plain and not (sends and len(plain) < len(able) and node not in linked):
            without[node] = plain[0]
    if without:
        chosen = [process for process in seen.processes if process.node in without]
        reasons = [cause for cause in CAUSES if cause.effect is Effect.HOST_MEMORY]
        shown = {cause.name for process in chosen for cause in reasons if quoted_line(process, cause)}
        why = first_cause(shown, Effect.HOST_MEMORY)
        names = (*(why.shown_by or (why.name,) if why else ()), "gdr disabled", *sorted(set(without.values())))
        yield Finding(
            code="gdr-missing",
            what=f"{len(without):,} of {using:,} nodes send or receive through host memory, without GPUDirect RDMA"
            + (f": {why.phrase}" if why else ""),
            severity=Severity.WARNING,
            where=_format_nodes(sorted(without)),
            evidence=_first(chosen, tuple(dict.fromkeys(names))),
            remedy=why.remedy
            if why
            else "`modprobe nvidia_peermem` on the node (or a kernel and driver with DMA-BUF), NIC and GPU under "
            "one PCIe switch or NCCL_NET_GDR_LEVEL=SYS, and no NCCL_NET_GDR_* set against it.",
            owner=Owner.CLUSTER,
        )


def _may_gdr(route: str) -> bool:
    kind, _, name = route.partition("/")
    return kind == "NET" and network_of(name.removesuffix("/GDRDMA")).name in {"IB", "OFI"}


def _device_missing(seen: MergedSetup) -> Iterator[Finding]:
    with_devices = [process for process in seen.processes if process.hcas]
    by_count = _grouped(with_devices, lambda process: str(len(process.hcas)))
    if len(by_count) > 1:
        fewest = by_count[min(by_count, key=int)]
        yield Finding(
            code="rdma-device-missing",
            what=f"nodes have different numbers of RDMA devices: {_shares(by_count)}",
            where=_nodes(fewest),
            evidence=_quotes(by_count, "hcas"),
            remedy="`ibv_devinfo` on the node with fewer: a port that is down, a device missing from the pod, or "
            "NCCL_IB_HCA.",
            owner=Owner.CLUSTER,
        )
    by_nics = _grouped(
        [process for process in seen.processes if process.nics is not None], lambda process: str(process.nics)
    )
    if len(by_nics) > 1:
        yield Finding(
            code="rdma-device-missing",
            what=f"the network plugin found different numbers of devices: {_shares(by_nics)}",
            where=_nodes(by_nics[min(by_nics, key=int)]),
            evidence=_quotes(by_nics, "nics"),
            remedy="Compare the devices of the nodes, `fi_info -p efa` for EFA, and what the pods request.",
            owner=Owner.CLUSTER,
        )


def _link_layer_mixed(seen: MergedSetup) -> Iterator[Finding]:
    with_devices = [process for process in seen.processes if process.hcas]
    by_layer = _grouped(
        with_devices, lambda process: "+".join(sorted({hca.rpartition("/")[2] for hca in process.hcas}))
    )
    if len(by_layer) > 1 or any("+" in layer for layer in by_layer):
        yield Finding(
            code="link-layer-mixed",
            what=f"InfiniBand and Ethernet devices are used together: {_shares(by_layer)}",
            severity=Severity.WARNING,
            where=_nodes(_rarest(by_layer)),
            evidence=_quotes(by_layer, "hcas"),
            remedy="Name the devices of one kind in NCCL_IB_HCA, such as NCCL_IB_HCA=mlx5_0,mlx5_1.",
            owner=Owner.CLUSTER,
        )


def _fewer_nics(seen: MergedSetup) -> Iterator[Finding]:
    if any(communicator.missing or not communicator.size for communicator in seen.communicators):
        return  # the missing ranks may be those that use the other devices
    counts: dict[str, dict[str, int]] = defaultdict(dict)
    for node, used in seen.links.nodes.items():
        for name, nics in used.nics.items():
            counts[name][node] = len(nics)
    for name, by_node in counts.items():
        usual, often = Counter(by_node.values()).most_common(1)[0]
        fewer = sorted(node for node, count in by_node.items() if count < usual)
        if fewer and often > len(by_node) / 2:
            chosen = [process for process in seen.processes if process.node in fewer]
            yield Finding(
                code="fewer-nics-used",
                what=f"{len(fewer):,} of {len(by_node):,} nodes use fewer than {usual} devices of {name}",
                severity=Severity.WARNING,
                where=_format_nodes(fewer),
                evidence=_first(chosen, ("hcas", "nics", *(f"NET/{name}{gdr}" for gdr in ("/GDRDMA", "")))),
                remedy="Compare the node's devices and its topology with those of the others.",
                owner=Owner.CLUSTER,
            )


def _p2p_disabled(seen: MergedSetup) -> Iterator[Finding]:
    shared = {node for node, used in seen.links.nodes.items() if any(route.startswith("SHM/") for route in used.routes)}
    direct = {node for node, used in seen.links.nodes.items() if any(route.startswith("P2P/") for route in used.routes)}
    linked = {process.node for process in seen.processes if process.path == "NVL"}
    unlike = shared - direct if direct - shared else frozenset[str]()
    odd = sorted(unlike | (shared & linked))
    if odd:
        chosen = [process for process in seen.processes if process.node in odd]
        names = sorted({name for process in chosen[:64] for name in process.evidence if name.startswith("SHM/")})
        yield Finding(
            code="p2p-disabled",
            what=f"{len(odd):,} of {len(shared | direct):,} nodes connect their GPUs through host memory",
            severity=Severity.WARNING,
            where=_format_nodes(odd),
            evidence=_first(chosen, ("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", *names, "path")),
            remedy="Unset NCCL_P2P_DISABLE; else turn PCIe ACS off, set the IOMMU to passthrough, and let the "
            "container see all GPUs of the node. `nvidia-smi topo -p2p r` shows the allowed paths.",
            owner=Owner.CLUSTER,
        )


def _version_mismatch(seen: MergedSetup) -> Iterator[Finding]:
    by_version = _grouped(seen.processes, lambda process: process.nccl and f"{process.nccl}+cuda{process.cuda}")
    if len(by_version) > 1:
        yield Finding(
            code="version-mismatch",
            what=f"ranks load different versions of NCCL: {_shares(by_version)}",
            where=_nodes(_rarest(by_version)),
            evidence=_quotes(by_version, "nccl"),
            remedy="Use one image for all nodes; LD_LIBRARY_PATH and LD_PRELOAD must not name another libnccl.",
        )
    for name, what in (("driver", "CUDA drivers"), ("plugin", "network plugins")):
        by_value = _grouped(seen.processes, lambda process: str(getattr(process, name)))  # noqa: B023 - used immediately
        if len(by_value) > 1:
            yield Finding(
                code=f"{name}-mismatch",
                what=f"ranks have different {what}: {_shares(by_value)}",
                severity=Severity.WARNING,
                where=_nodes(_rarest(by_value)),
                evidence=_quotes(by_value, name),
                remedy=f"Give all nodes the same {what[:-1]}.",
                owner=Owner.CLUSTER,
            )


def _env_skew(seen: MergedSetup) -> Iterator[Finding]:
    values: dict[str, dict[str, list[NcclProcess]]] = defaultdict(lambda: defaultdict(list))
    for process in seen.processes:
        for name, value in process.env.items():
            if name not in _PER_RANK_VARIABLES:
                values[name][value].append(process)
    whole = _complete_nodes(seen)
    for name, by_value in islice(sorted(values.items()), _MOST_NAMES):
        having = {process.node for members in by_value.values() for process in members}
        without = sorted(whole - having) if having & whole else []
        if len(by_value) > 1:
            what, where = f"{name} differs between ranks: {_shares(by_value)}", _nodes(_rarest(by_value))
        elif without:
            value = next(iter(by_value))
            what, where = (
                f"{name}={value} on {len(having):,} nodes, but not set on {len(without):,}",
                _format_nodes(without),
            )
        else:
            continue
        yield Finding(
            code="env-skew",
            what=what,
            severity=Severity.WARNING,
            where=where,
            evidence=_quotes(by_value, name),
            remedy=f"Set {name} to one value on all ranks, or on none.",
        )


def _complete_nodes(seen: MergedSetup) -> set[str]:
    """The nodes whose variables are all known: NCCL logged some, and every set-up there finished."""
    ended: dict[str, bool] = {}
    for communicator in seen.communicators:
        for member in communicator.members:
            node = seen.nodes[member.process]
            ended[node] = ended.get(node, True) and member.complete
    return {process.node for process in seen.processes if process.env and ended.get(process.node)}


def _wrong_interface(seen: MergedSetup) -> Iterator[Finding]:
    nodes = {process.node for process in seen.processes}
    inward = [process for process in seen.processes if _NODE_LOCAL_INTERFACE.match(process.bootstrap)]
    if inward and len(nodes) > 1:
        yield Finding(
            code="wrong-interface",
            what=f"{len(inward):,} ranks bootstrap over {inward[0].bootstrap}, which no other node can reach",
            where=_nodes(inward),
            evidence=_first(inward, ("bootstrap", "NCCL_SOCKET_IFNAME")),
            remedy="Set NCCL_SOCKET_IFNAME to the interface that connects the nodes, such as "
            "NCCL_SOCKET_IFNAME=eth0, or exclude these: NCCL_SOCKET_IFNAME=^lo,docker,virbr.",
        )


def _ranks_missing(seen: MergedSetup) -> Iterator[Finding]:
    for communicator in seen.communicators:
        if gaps := communicator.missing:
            yield Finding(
                code="ranks-missing",
                what=f"{communicator.name}: {sum(map(len, gaps)):,} of {communicator.size:,} ranks have no logs",
                severity=Severity.WARNING,
                where=f"rank {format_ranges(gaps)}",
                evidence=tuple(str(member.evidence) for member in communicator.members[:1]),
                remedy="Add their logs. If the input has them, these ranks never started their set-up: find out why.",
            )


def _setup_unfinished(seen: MergedSetup) -> Iterator[Finding]:
    for communicator in seen.communicators:
        begun = [member for member in communicator.members if not member.complete]
        if begun and communicator.size:
            yield Finding(
                code="comm-init-unfinished",
                what=f"{communicator.name}: {len(begun):,} of {communicator.size:,} ranks did not finish their set-up",
                where=f"rank {format_numbers([member.rank for member in begun])}",
                evidence=tuple(str(member.evidence) for member in begun[:_MAX_NAMED]),
                remedy="A set-up waits for every rank: check first for a rank that is missing here, then the last "
                "lines of these.",
                owner=Owner.PEER,
            )


_RULES: tuple[Callable[[MergedSetup], Iterable[Finding]], ...] = (
    _network_mixed,
    _device_missing,
    _gdr_missing,
    _link_layer_mixed,
    _transport_asymmetric,
    _p2p_disabled,
    _fewer_nics,
    _wrong_interface,
    _version_mismatch,
    _env_skew,
    _setup_unfinished,
    _ranks_missing,
)


def _grouped(processes: Iterable[NcclProcess], key: Callable[[NcclProcess], str]) -> dict[str, list[NcclProcess]]:
    """Processes by value, without those that log none."""
    groups: dict[str, list[NcclProcess]] = defaultdict(list)
    for process in processes:
        if value := key(process):
            groups[value].append(process)
    return groups


def _shares(groups: Mapping[str, Sequence[NcclProcess]]) -> str:
    ordered = sorted(groups.items(), key=lambda item: -len(item[1]))
    shares = [f"{value} on {len(members):,} ranks" for value, members in ordered[:_MAX_NAMED]]
    return ", ".join(shares) + (f", and {len(ordered) - _MAX_NAMED} others" if len(ordered) > _MAX_NAMED else "")


def _rarest(groups: Mapping[str, Sequence[NcclProcess]]) -> Sequence[NcclProcess]:
    """The smallest group; None where no group is smaller than all others."""
    first, second = sorted(groups.values(), key=len)[:2] if len(groups) > 1 else (*groups.values(), ())
    return first if len(groups) == 1 or len(first) < len(second) else ()


def _nodes(processes: Iterable[NcclProcess]) -> str:
    return _format_nodes(sorted({process.node for process in processes}))


def _format_nodes(nodes: Sequence[str]) -> str:
    return ", ".join(nodes[:_MAX_NAMED]) + (f" and {len(nodes) - _MAX_NAMED:,} more" if len(nodes) > _MAX_NAMED else "")


def _quotes(groups: Mapping[str, Sequence[NcclProcess]], name: str) -> tuple[str, ...]:
    """A line of each group, the rarest first."""
    ordered = sorted(groups.values(), key=len)[:_MAX_NAMED]
    return tuple(str(members[0].evidence[name]) for members in ordered if name in members[0].evidence)


def _first(processes: Iterable[NcclProcess], names: Sequence[str]) -> tuple[str, ...]:
    """The first line of each of these facts, where there is one."""
    quotes: dict[str, LogLine] = {}
    for process in processes:
        for name in names:
            if name in process.evidence:
                quotes.setdefault(name, process.evidence[name])
    return tuple(str(quotes[name]) for name in names if name in quotes)
