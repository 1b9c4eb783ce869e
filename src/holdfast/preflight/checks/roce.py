"""RoCE ports of a node: the GID that NCCL uses, and the MTU of their network interfaces."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from msgspec import Struct

from holdfast.findings import Finding, Owner, Severity
from holdfast.preflight.node_view import NodeView, NotLookedAt
from holdfast.preflight.rdma_devices import (
    Gid,
    Port,
    gids,
    interface_of,
    judged_ports,
    optional,
    setting,
    usable_gids,
    uses_verbs,
)

ROCE_MTU_BYTES = 4200
"""Smallest MTU of an interface for packets of 4096 bytes; with the default of 1500 they have 1024 bytes.

Linux (`iboe_get_mtu`) subtracts up to 96 bytes of headers and takes the largest of 256, 512, ..., 4096 that remains.
"""
MAX_EVIDENCE = 8
"""Lines of a finding."""


class _GidProblem(Struct, frozen=True, kw_only=True):
    """What is wrong with the GIDs of ports; `{index}` and `{interfaces}` are those of the first port."""

    code: str
    severity: Severity
    what: str
    remedy: str
    owner: Owner = Owner.USER


_LET_NCCL_CHOOSE = "Remove NCCL_IB_GID_INDEX: NCCL finds the GID itself since 2.21."
_PROBLEMS = (
    _GidProblem(
        code="rdma-gid-empty",
        severity=Severity.ERROR,
        what="there is no GID at NCCL_IB_GID_INDEX={index}",
        remedy=_LET_NCCL_CHOOSE,
    ),
    _GidProblem(
        code="rdma-gid-version",
        severity=Severity.ERROR,
        what="the GID at NCCL_IB_GID_INDEX={index} is of RoCE v1, which no router forwards, and there is one of v2",
        remedy=_LET_NCCL_CHOOSE,
    ),
    _GidProblem(
        code="rdma-gid-link-local",
        severity=Severity.WARNING,
        what="the GID at NCCL_IB_GID_INDEX={index} is link-local: it does not reach nodes in other subnets",
        remedy=_LET_NCCL_CHOOSE,
    ),
    _GidProblem(
        code="rdma-gid-none",
        severity=Severity.WARNING,
        what="there is no RoCE v2 GID of an address that is not link-local, so nodes in other subnets are out of reach",
        remedy="Give the port's interface an IPv4 address: `ip addr add ... dev ...`. In a pod, attach an interface of "
        "the adapter with Multus, or use the host's network.",
        owner=Owner.CLUSTER,
    ),
    _GidProblem(
        code="rdma-gid-other-namespace",
        severity=Severity.WARNING,
        what="the GIDs belong to {interfaces}, and this container has no such interface: RoCE needs an interface "
        "of the adapter in its own network namespace",
        remedy="Use the host's network, or attach the adapter's interface to the pod with Multus: fabric `sriov`.",
        owner=Owner.CLUSTER,
    ),
)


def rdma_gid(view: NodeView) -> Iterator[Finding]:
    """RoCE: the GID that NCCL uses exists, is of version 2, reaches other subnets, and belongs to this namespace."""
    if not uses_verbs(view.wanted):
        return
    found: dict[Port, tuple[Gid, ...]] = {}
    for port in judged_ports(view).ports:
        if port.is_roce and port.active:
            if not view.list(f"{port.folder}/gids"):
                raise NotLookedAt(f"/{port.folder}/gids: there is no table of GIDs")
            table = found[port] = gids(view, port)
            if table and not any(gid.type for gid in table):
                raise NotLookedAt(f"/{port.folder}/gid_attrs/types: it does not tell the types of GIDs")
    codes = {port: _problem(view, of_port) for port, of_port in found.items()}
    for problem in _PROBLEMS:
        if ports := [port for port in found if codes[port] == problem.code]:
            table = found[ports[0]]
            names = ", ".join(port.name for port in ports)
            interfaces = ", ".join(dict.fromkeys(gid.interface for gid in table if gid.interface))
            what = problem.what.format(index=gid_index(view), interfaces=interfaces)
            yield Finding(
                code=problem.code,
                severity=problem.severity,
                what=f"{names}: {what}",
                where=names,
                evidence=evidence_lines(
                    f"{ports[0].name} GID {gid.index}: {gid.address} {gid.type} {gid.interface}" for gid in table
                ),
                remedy=problem.remedy,
                owner=problem.owner,
            )


def gid_index(view: NodeView) -> int | None:
    """NCCL_IB_GID_INDEX; without it, or with -1, NCCL chooses."""
    text = setting(view, "NCCL_IB_GID_INDEX")
    return int(text) if text.isdigit() else None


def _problem(view: NodeView, found: Sequence[Gid]) -> str:
    """The code of what is wrong with a port's GIDs; empty if nothing is."""
    index, usable = gid_index(view), usable_gids(found)
    gid = next((each for each in found if each.index == index), None)
    visible, of_gids = set(view.list("sys/class/net")), {gid.interface for gid in usable if gid.interface}
    if index is not None and gid is None:
        return "rdma-gid-empty"
    if not usable:
        return "" if gid else "rdma-gid-none"  # a GID that the user names works in its own subnet
    if gid and not gid.is_v2:
        return "" if setting(view, "NCCL_IB_ROCE_VERSION_NUM") == "1" else "rdma-gid-version"
    if gid and not gid.routable:
        return "rdma-gid-link-local"
    return "rdma-gid-other-namespace" if of_gids and visible and not of_gids & visible else ""


def rdma_mtu(view: NodeView) -> Iterator[Finding]:
    """RoCE: the interfaces carry full packets, and all the same."""
    if not uses_verbs(view.wanted):
        return
    ports = [port for port in judged_ports(view).ports if port.is_roce and port.active]
    mtus = roce_mtus(view, ports)
    if ports and not mtus:
        raise NotLookedAt(f"{ports[0].name}: its network interface is not in this network namespace")
    small = {name: mtu for name, mtu in mtus.items() if mtu < ROCE_MTU_BYTES}
    lines = evidence_lines(f"{name}: mtu {mtu}" for name, mtu in mtus.items())
    if len(set(mtus.values())) > 1:
        low, high = min(mtus.values()), max(mtus.values())
        yield Finding(
            code="rdma-mtu-differs",
            severity=Severity.WARNING,
            what=f"the RoCE interfaces of this node have different MTUs, {low} to {high} bytes",
            where=", ".join(name for name, mtu in mtus.items() if mtu < high),
            evidence=lines,
            remedy=f"Set one MTU of {ROCE_MTU_BYTES} bytes or more on all of them: `ip link set ... mtu ...`.",
            owner=Owner.CLUSTER,
        )
    elif small:
        yield Finding(
            code="rdma-mtu-small",
            severity=Severity.WARNING,
            what=f"the RoCE interfaces have an MTU of {min(small.values())} bytes; packets of 4096 bytes need "
            f"{ROCE_MTU_BYTES}",
            where=", ".join(small),
            evidence=lines,
            remedy="Raise it on interfaces and switches, where the network allows: `ip link set ... mtu 9000`.",
            owner=Owner.CLUSTER,
        )


def roce_mtus(view: NodeView, ports: Sequence[Port]) -> dict[str, int]:
    """The MTU in bytes of the interface of each RoCE port that has one in this network namespace."""
    names = [interface_of(view, port, gids(view, port)) for port in ports]
    mtus = {name: optional(view, f"sys/class/net/{name}/mtu") for name in names if name}
    return {name: int(mtu) for name, mtu in mtus.items() if mtu}


def evidence_lines(lines: Iterable[str]) -> tuple[str, ...]:
    """The first lines, stripped: a finding is no table of the whole node."""
    return tuple(line.strip() for line in islice(lines, MAX_EVIDENCE))
