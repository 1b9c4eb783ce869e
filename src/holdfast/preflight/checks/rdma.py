"""RDMA devices of a node: present, active, at full rate, and in the right partition."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from holdfast.findings import Finding, Owner, Severity
from holdfast.preflight.checks.roce import evidence_lines, gid_index, roce_mtus
from holdfast.preflight.node_view import NodeView, NotLookedAt
from holdfast.preflight.rdma_devices import (
    DEVICES,
    FULL_MEMBER,
    Port,
    device_files,
    find_ports,
    gids,
    hca_list,
    judged_ports,
    needs_rdma,
    partition_keys,
    setting,
    usable_gids,
    used_ports,
    uses_verbs,
)


def rdma_devices(view: NodeView) -> Iterator[Finding]:
    """The node has the devices, NCCL_IB_HCA names existing ones, and the container has their files."""
    if not needs_rdma(view.wanted):
        return
    ports = find_ports(view)
    if not ports:
        yield Finding(
            code="rdma-no-device",
            what=f"the network {view.wanted.network} needs RDMA devices, and this node or its container has none",
            where=f"/{DEVICES}",
            remedy="On a machine load the adapter's driver (`modprobe mlx5_ib`, `modprobe efa`) and look for the "
            "adapter in `lspci`. In a pod request the device plugin's resource: the target's `fabric_device`.",
            owner=Owner.CLUSTER,
        )
        return
    text, wanted = setting(view, "NCCL_IB_HCA"), hca_list(view)
    names = ", ".join(dict.fromkeys(port.device for port in ports))
    if not any(wanted.selects(port) for port in ports):
        yield Finding(
            code="rdma-hca-unknown",
            what=f"NCCL_IB_HCA={text} selects no device of this node",
            where="NCCL_IB_HCA",
            evidence=(f"devices: {names}",),
            remedy="Set it to devices that every node has, or remove it: NCCL then finds the devices itself.",
            owner=Owner.USER,
        )
        return
    if missing := wanted.unmatched(ports):
        yield Finding(
            code="rdma-hca-missing",
            severity=Severity.WARNING,
            what=f"NCCL_IB_HCA asks for {', '.join(missing)}, which this node does not have",
            where="NCCL_IB_HCA",
            evidence=(f"NCCL_IB_HCA={text}", f"devices: {names}"),
            remedy="If other nodes have it, the adapter has failed: see `lspci` and `dmesg`. Else correct NCCL_IB_HCA.",
            owner=Owner.CLUSTER,
        )
    yield from _without_file(view, ports)


def _without_file(view: NodeView, ports: Sequence[Port]) -> Iterator[Finding]:
    files = device_files(view).keys() & {port.device for port in ports}
    named = [port.device for port in ports if hca_list(view).names(port)]
    missing = tuple(dict.fromkeys(device for device in named if device not in files))
    if files and not missing:
        return
    yield Finding(
        code="rdma-device-file-missing",
        severity=Severity.WARNING if files else Severity.ERROR,
        what="sysfs shows RDMA devices, and /dev/infiniband has no file to open "
        + (", ".join(missing) if files else "any of them"),
        where="/dev/infiniband",
        evidence=(
            f"devices: {', '.join(dict.fromkeys(port.device for port in ports))}",
            f"/dev/infiniband: {', '.join(view.list('dev/infiniband')) or 'nothing'}",
        ),
        remedy="In a pod request the device plugin's resource (the target's `fabric_device`); for a container "
        "`--device=/dev/infiniband`; on a machine `modprobe ib_uverbs`.",
        owner=Owner.CLUSTER,
    )


def rdma_ports(view: NodeView) -> Iterator[Finding]:
    """The ports that the job uses are ACTIVE and LinkUp, and full members of their partition."""
    if not needs_rdma(view.wanted):
        return
    used = judged_ports(view)
    certain = used.named or not any(port.active for port in used.ports)
    waiting = [port for port in used.ports if port.awaits_subnet_manager]
    if waiting:
        names = ", ".join(port.name for port in waiting)
        yield Finding(
            code="rdma-subnet-manager",
            severity=Severity.ERROR if certain else Severity.WARNING,
            what=f"{names}: the link is up, and no subnet manager has activated the port, so it carries no data",
            where=names,
            evidence=evidence_lines(f"{port.name}: {port.state}, {port.phys_state}" for port in waiting),
            remedy="Start the subnet manager (`opensm`, or that of the switch or UFM) and see its log: `sminfo` asks "
            "which one is master.",
            owner=Owner.CLUSTER,
        )
    down = [port for port in used.ports if not port.active and port not in waiting]
    if down and (certain or _is_minority(down, used.ports)):
        yield Finding(
            code="rdma-port-down",
            severity=Severity.ERROR if certain else Severity.WARNING,
            what=f"{len(down)} of the {len(used.ports)} RDMA ports that the job uses "
            f"{'is' if len(down) == 1 else 'are'} not active; NCCL skips {'it' if len(down) == 1 else 'them'}",
            where=", ".join(port.name for port in down),
            evidence=evidence_lines(f"{port.name}: {port.state}, {port.phys_state}" for port in down),
            remedy="Look at the cable, the transceiver and the switch port. `Polling` or `Disabled`: no link. "
            "Ethernet: `ip link set ... up`.",
            owner=Owner.CLUSTER,
        )
    if uses_verbs(view.wanted):
        yield from _outside_partition(view, used.ports)


def _outside_partition(view: NodeView, ports: Sequence[Port]) -> Iterator[Finding]:
    place = setting(view, "NCCL_IB_PKEY")
    index = int(place) if place.isdigit() else 0
    keys = {port.name: partition_keys(view, port) for port in ports if port.is_infiniband}
    limited = [name for name, of_port in keys.items() if of_port and not of_port.get(index, 0) & FULL_MEMBER]
    if limited:
        yield Finding(
            code="rdma-partition-limited",
            severity=Severity.WARNING,
            what=f"{', '.join(limited)}: the partition key at index {index} is none of a full member, and limited "
            "members cannot reach each other",
            where=", ".join(limited),
            evidence=evidence_lines(
                f"{name}: pkeys " + ", ".join(f"{at}: 0x{key:04x}" for at, key in keys[name].items())
                for name in limited
            ),
            remedy="Set NCCL_IB_PKEY to the index of a key of 0x8000 or more, or make the port a full member in the "
            "subnet manager.",
            owner=Owner.CLUSTER,
        )


def rdma_rate(view: NodeView) -> Iterator[Finding]:
    """No port is slower than the others of its kind: collectives run at the rate of the slowest."""
    if not needs_rdma(view.wanted):
        return
    used = judged_ports(view)
    active = [port for port in used.ports if port.active and port.rate_gbps]
    for kind in dict.fromkeys(port.kind for port in active):
        siblings = [port for port in active if port.kind == kind]
        expected = max(port.rate_gbps for port in siblings)
        slow = [port for port in siblings if port.rate_gbps < expected]
        if slow and (used.named or _is_minority(slow, siblings)):
            yield Finding(
                code="rdma-port-slow",
                severity=Severity.WARNING,
                what=f"{len(slow)} of {len(siblings)} {kind[1] or kind[0] or 'RDMA'} ports "
                f"{'runs' if len(slow) == 1 else 'run'} at {slow[0].rate_gbps:g} Gbit/s, the others at {expected:g}",
                where=", ".join(port.name for port in slow),
                evidence=evidence_lines(f"{port.name}: {port.rate}" for port in siblings),
                remedy="Clean or replace the cable or transceiver, and look at the switch port: fewer lanes (1X, 2X) "
                "or a lower speed come from a bad link. `mlxlink -d DEVICE` names the reason.",
                owner=Owner.CLUSTER,
            )


def rdma_facts(view: NodeView) -> Mapping[str, str]:
    """What must be equal on all nodes of a run; an index of a GID only if the job sets it."""
    if not needs_rdma(view.wanted):
        return {}
    try:
        ports = used_ports(view).ports
    except NotLookedAt:
        return {}
    active = [port for port in ports if port.active]
    roce = [port for port in active if port.is_roce]
    of_ports = {port: gids(view, port) for port in roce}
    index = gid_index(view)
    chosen = [
        next((gid for gid in found if gid.index == index), None)
        if index is not None
        else next(iter(usable_gids(found)), None)
        for found in of_ports.values()
    ]
    place = "" if index is None else f"index {index}, "
    facts = {
        "active RDMA ports": _counted(f"{port.rate} {port.link_layer}".strip() for port in active),
        "RDMA adapters": _counted(port.model or port.driver or port.device for port in ports),
        "RDMA firmware": ", ".join(
            sorted({f"{port.model} {port.firmware}".strip() for port in ports if port.firmware})
        ),
        "InfiniBand partitions": ", ".join(
            f"0x{key:04x}"
            for key in sorted(
                {key for port in active if port.is_infiniband for key in partition_keys(view, port).values()}
            )
        ),
        "RoCE MTU": _counted(map(str, roce_mtus(view, roce).values())),
        "RoCE GID": _counted(f"{place}{gid.type}, {gid.family}" for gid in chosen if gid),
    }
    return {label: value for label, value in facts.items() if value}


def _is_minority(some: Sequence[Port], ports: Sequence[Port]) -> bool:
    """Whether they are fewer than half: on a healthy node every second port may have no cable, or another network."""
    return 2 * len(some) < len(ports)


def _counted(values: Iterable[str]) -> str:
    return ", ".join(f"{count} x {value}" for value, count in sorted(Counter(values).items()))
