"""Judges which interfaces carry the ranks' TCP connections, from the reports of all nodes. Pure.

A connection counts if two nodes report its two ends. So those to a store, a controller or any other server are left
out, and what remains is between two ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from statistics import median
from typing import NamedTuple

from msgspec import Struct

from holdfast.events import LinkRate, LinkSlowed, LinksMeasured, SocketEnds, SocketsObserved
from holdfast.findings import Finding, Owner, Severity

WRONG_INTERFACE = "wrong-interface"
LINK_SLOWED = "link-slowed"
DATA_BYTES, DATA_BYTES_WITH_GPUS = 1 << 20, 256 << 20
"""A node's data uses other interfaces if they have carried so much: barriers carry less, and with GPUs the metadata of
checkpoints, which groups on the CPU exchange."""
SLOW_SHARE = 0.6
"""A rate below this share of the earlier one is slow."""
_MAX_SHOWN = 4
_GLOO, _NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


class End(Struct, frozen=True, kw_only=True):
    """One end of a pair."""

    report: SocketsObserved
    ends: SocketEnds

    def __str__(self) -> str:
        return f"rank {self.ends.rank} on node{self.report.node}"

    @property
    def is_promised(self) -> bool:
        return self.ends.interface not in self.report.other_interfaces


Pair = tuple[End, End]


class TcpJudgement(Struct, frozen=True, kw_only=True):
    """Which interfaces carry the data of a replica's ranks, in one line."""

    line: str = ""
    """Such as `tcp over net1, as promised`; empty if no two nodes have reported the same connection."""
    pairs: int = 0
    """Connections that two nodes have reported."""
    finding: Finding | None = None
    """Set if an interface is not the promised one."""


def pairs(reports: Iterable[SocketsObserved]) -> list[Pair]:
    """The connections of which two nodes have reported an end each, the first by its address."""
    found: dict[tuple[str, str], End] = {}
    complete: list[Pair] = []
    for report in reports:
        for ends in report.connections:
            one = End(report=report, ends=ends)
            found[ends.local, ends.remote] = one
            other = found.get((ends.remote, ends.local))
            if other is not None and other.report.node != report.node:
                complete.append((one, other) if one.ends.rank < other.ends.rank else (other, one))
    return complete


def wrong_pairs(new: SocketsObserved, reports: Mapping[int, SocketsObserved]) -> list[Pair]:
    """The connections of a new report over other interfaces than the promised ones, if another node reports them too.

    The end of the new report is the first.
    """
    ends = {(each.remote, each.local): End(report=new, ends=each) for each in new.connections}
    both = (
        (one, End(report=report, ends=each))
        for report in reports.values()
        if report.node != new.node
        for each in report.connections
        if (one := ends.get((each.local, each.remote))) is not None
    )
    return [pair for pair in both if not (pair[0].is_promised and pair[1].is_promised)]


def carries_data(wrong: list[Pair], *, has_gpus: bool) -> bool:
    """Whether such pairs carry the data of the first one's node, rather than a side channel: most of its bytes."""
    carried = sum(one.ends.carried_bytes for one, _ in wrong)
    return carried >= (DATA_BYTES_WITH_GPUS if has_gpus else DATA_BYTES) and carried > wrong[0][0].report.promised_bytes


def judge_sockets(reports: Mapping[int, SocketsObserved]) -> TcpJudgement:
    """The judgement on one replica by what its nodes report, each under its number."""
    complete = pairs(reports[node] for node in sorted(reports))
    if not complete:
        return TcpJudgement()
    used = Counter(end.ends.interface for pair in complete for end in pair)
    shown = " and ".join(sorted(name or "a removed interface" for name in used))
    promised = " or ".join(next(iter(complete))[0].report.promised)
    wrong = [pair for pair in complete if not (pair[0].is_promised and pair[1].is_promised)]
    if not wrong:
        return TcpJudgement(line=f"tcp over {shown}{', as promised' if promised else ''}", pairs=len(complete))
    return TcpJudgement(
        line=f"tcp over {shown} instead of {promised}", pairs=len(complete), finding=wrong_interface(wrong)
    )


def wrong_interface(wrong: list[Pair]) -> Finding:
    """The finding on connections over another interface than the promised one."""
    one, other = sorted(wrong[0], key=lambda end: end.ends.rank)
    worst = one if not one.is_promised else other
    promised = " or ".join(worst.report.promised)
    also = f", and {len(wrong) - 1} other connections" if len(wrong) > 1 else ""
    cause, remedy = _cause(worst, promised)
    return Finding(
        code=WRONG_INTERFACE,
        severity=Severity.WARNING,
        what=f"{one} and {other} exchange data over {worst.ends.interface} instead of {promised}{also}: {cause}",
        where=f"rank {worst.ends.rank} on node{worst.report.node}",
        evidence=tuple(
            f"{near}: {near.ends.interface} {near.ends.local}; {far}: {far.ends.interface} {far.ends.local}"
            for near, far in wrong[:_MAX_SHOWN]
        ),
        remedy=remedy,
        owner=Owner.USER,
    )


def _cause(end: End, promised: str) -> tuple[str, str]:
    """Why a rank uses another interface, and what to do: from its variables and its node's host name."""
    used, variables = end.ends.interface, end.report.variables
    naming = [name for name, value in variables.items() if _names(value, used)]
    if naming:
        return f"{naming[0]}={variables[naming[0]]} in its environment", (
            f"Set {naming[0]}={promised} in the job's `fabric.env`, and remove it from the job's `env`, the image and "
            "the node."
        )
    if _GLOO not in variables:
        host = f", {end.report.host_name}" if end.report.host_name else ""
        return f"{_GLOO} is not set, so Gloo uses the interface that the host name resolves to{host}", (
            f"Set {_GLOO}={promised} in the job's `fabric.env`, or have the host name resolve to the address of "
            f"{promised}. NCCL reads {_NCCL} instead."
        )
    return "the program names another interface itself", (
        f"Remove what sets {_GLOO} or {_NCCL}, or creates a Gloo device, in the program: the job sets "
        f"{_GLOO}={variables[_GLOO]}."
    )


def _names(value: str, interface: str) -> bool:
    """Whether a variable's value names an interface, exactly or by NCCL's prefixes."""
    names = [name for name in value.removeprefix("=").split(",") if name]
    return not value.startswith("^") and interface.startswith(tuple(names))


class SlowLink(NamedTuple):
    """A link that is slow."""

    nodes: tuple[int, int]
    """In order."""
    share: float
    """Of its usual rate."""
    finding: Finding


def link_slowed(event: LinkSlowed, reports: Mapping[int, SocketsObserved]) -> SlowLink | None:
    """The finding on a connection that has become slow; None if it does not lead to another node of the run."""
    far = _far_node(event.ends, event.node, reports)
    if far is None:
        return None
    rates = f"{format_rate(event.now_bytes_s)} instead of {format_rate(event.before_bytes_s)}"
    others = tuple(
        f"{format_rate(rate)} to {_peer(remote, reports)} at the same time"
        for remote, rate in list(event.others_bytes_s.items())[:_MAX_SHOWN]
    )
    again = f"{event.retransmits:,} of {event.segments:,} segments were sent again"
    share = event.now_bytes_s / max(event.before_bytes_s, 1.0)
    return _slow(event.ends, event.node, far, share, f"has become slow: {rates}", (again, *others))


def slower_than_probed(
    event: LinksMeasured, reports: Mapping[int, SocketsObserved], probed_bytes_s: Callable[[int, int], float]
) -> SlowLink | None:
    """The finding on the connection that is slowest, by what its two nodes did in a probe; None if none is slow.

    `probed_bytes_s` returns the rate of two nodes, or 0 if they were not probed with each other. They had the interface
    to themselves then: a link that is about as slow as the node's others over the same interface shares it with them.
    """
    slow: list[tuple[float, LinkRate, SocketsObserved]] = []
    for link in event.links:
        far = _far_node(link.ends, event.node, reports)
        if far is None or link.bytes_s >= SLOW_SHARE * (probed := probed_bytes_s(event.node, far.node)):
            continue
        others = [
            each.bytes_s for each in event.links if each is not link and each.ends.interface == link.ends.interface
        ]
        if not others or link.bytes_s < SLOW_SHARE * median(others):
            slow.append((probed, link, far))
    if not slow:
        return None
    probed, link, far = min(slow, key=lambda each: each[1].bytes_s / each[0])
    rates = f"{format_rate(link.bytes_s)}, and {format_rate(probed)} when the nodes probed each other"
    others = tuple(
        f"{format_rate(other.bytes_s)} to {_peer(other.ends.remote, reports)} at the same time"
        for other in reversed(event.links)
        if other is not link
    )
    what = f"has been slow since the first steps: {rates}"
    return _slow(link.ends, event.node, far, link.bytes_s / probed, what, others[:_MAX_SHOWN])


def _slow(
    near: SocketEnds, node: int, far: SocketsObserved, share: float, what: str, evidence: tuple[str, ...]
) -> SlowLink:
    rank = next((each.rank for each in far.connections if (each.local, each.remote) == (near.remote, near.local)), None)
    peer = f"node{far.node}" if rank is None else f"rank {rank} on node{far.node}"
    name = near.interface
    finding = Finding(
        code=LINK_SLOWED,
        severity=Severity.WARNING,
        what=f"the link from rank {near.rank} on node{node} to {peer} over {name} {what}",
        where=f"node{node}, {name}",
        evidence=(f"{near.local} to {near.remote}", *evidence),
        remedy=f"Look at `ip -s link show {name}`, `ethtool -S {name}` and `tc -s qdisc` on both nodes, at other "
        "traffic of theirs, and at the switch ports. `holdfast check --full` measures pairs of nodes.",
        owner=Owner.CLUSTER,
    )
    return SlowLink((min(node, far.node), max(node, far.node)), share, finding)


def _far_node(ends: SocketEnds, node: int, reports: Mapping[int, SocketsObserved]) -> SocketsObserved | None:
    """The report of the node that a connection leads to; None if it is not another one of the run."""
    far = next((report for report in reports.values() if _address(ends.remote) in report.addresses), None)
    return None if far is None or far.node == node else far


def _peer(remote: str, reports: Mapping[int, SocketsObserved]) -> str:
    return next((f"node{each.node}" for each in reports.values() if _address(remote) in each.addresses), remote)


def _address(end: str) -> str:
    return end.rpartition(":")[0].strip("[]")


def format_rate(bytes_s: float) -> str:
    """A rate as in `1.2 GB/s`."""
    for unit, size in (("GB/s", 1e9), ("MB/s", 1e6)):
        if bytes_s >= size:
            return f"{bytes_s / size:.3g} {unit}"
    return f"{bytes_s / 1e3:.3g} kB/s"
