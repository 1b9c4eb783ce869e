"""Reduces what one node's ranks have logged so far to an event for each communicator."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice

import msgspec

from holdfast.diagnose.nccl_transport.causes import CAUSES, Effect, quoted_line
from holdfast.diagnose.nccl_transport.inconsistencies import DEGRADING
from holdfast.diagnose.nccl_transport.merge import format_numbers
from holdfast.diagnose.nccl_transport.transport_report import (
    NET,
    Communicator,
    NcclProcess,
    TransportReport,
)
from holdfast.events import FabricObserved, to_ranges
from holdfast.findings import Finding

MAX_COMMUNICATORS = 32
"""Communicators of a node that are reported, the largest first; a job with every kind of parallelism has about 10."""
_MAX_QUOTED_CHARS = 240
_MAX_LISTED = 16


def observations(report: TransportReport, base: FabricObserved, interfaces: str) -> Iterator[FabricObserved]:
    """An event for each communicator whose set-up has ended on this node, or cannot end.

    `base` has the fields that are the same for all; `interfaces` is the run's NCCL_SOCKET_IFNAME.
    """
    findings = tuple(_shortened(finding) for finding in report.findings if finding.code in DEGRADING)
    for communicator in islice(report.communicators, MAX_COMMUNICATORS):
        processes = {member.rank: report.processes[member.process] for member in communicator.members}
        causes = _causes(communicator, processes)
        if communicator.size and (communicator.failures or all(member.complete for member in communicator.members)):
            seen = _observe(communicator, processes, base, interfaces, findings)
            yield msgspec.structs.replace(seen, causes=causes)


def _observe(
    communicator: Communicator,
    processes: Mapping[int, NcclProcess],
    base: FabricObserved,
    interfaces: str,
    findings: tuple[Finding, ...],
) -> FabricObserved:
    between, within = Counter[str](), Counter[str]()
    nics: set[tuple[str, int]] = set()
    channels = 0
    for link in communicator.links:
        way = link.link_type
        near = link.sender in processes and link.receiver in processes
        (within if near else between)[way.route] += link.channels.bit_count()
        channels |= link.channels
        if way.kind is NET and way.nic is not None and way.proxy is None:
            nics.add((way.name, way.nic))
    networks = Counter(process.network for process in processes.values() if process.network)
    versions = Counter(f"{process.nccl}+cuda{process.cuda}" for process in processes.values() if process.nccl)
    devices = {device: None for process in processes.values() for device in process.hcas}
    return msgspec.structs.replace(
        base,
        communicator=communicator.id or communicator.name,
        size=communicator.size,
        ranks=to_ranges(processes),
        spans_nodes=(communicator.nodes or 0) > 1 or communicator.size > len(processes),
        network=max(networks, key=networks.__getitem__, default=""),
        between=dict(between.most_common(_MAX_LISTED)),
        within=dict(within.most_common(_MAX_LISTED)),
        nics=len(nics),
        devices=tuple(islice(devices, _MAX_LISTED)),
        channels=channels.bit_count(),
        connected=communicator.connected,
        nccl=max(versions, key=versions.__getitem__, default=""),
        other_interfaces=tuple(sorted(_interfaces(processes.values(), interfaces)))[:_MAX_LISTED],
        differing=tuple(_differing(communicator, processes)),
        findings=findings,
    )


def _causes(communicator: Communicator, processes: Mapping[int, NcclProcess]) -> dict[str, str]:
    found: dict[str, str] = {}
    for cause in CAUSES:
        failing = cause.effect is Effect.FAILURE
        shown = (rank for rank in processes if not failing or cause.name in communicator.failures.get(rank, ()))
        quoted = (quoted_line(processes[rank], cause) for rank in shown)
        if line := next(filter(None, quoted), None):
            found[cause.name] = line.text[:_MAX_QUOTED_CHARS]
    return found


def _interfaces(processes: Collection[NcclProcess], wanted: str) -> Iterator[str]:
    """Interfaces of sockets that are not those of NCCL_SOCKET_IFNAME: `eth,ib`, `=eth0,eth1` or `^docker,lo`."""
    excluded = wanted.startswith("^")
    exact = wanted.lstrip("^").startswith("=")
    names = [name for name in wanted.lstrip("^=").split(",") if name]
    used = {
        each.partition(":")[0] for process in processes for each in (*process.interfaces, process.bootstrap) if each
    }
    for interface in used if names else ():
        named = interface in names if exact else interface.startswith(tuple(names))
        if named == excluded:
            yield interface


def _differing(communicator: Communicator, processes: Mapping[int, NcclProcess]) -> Iterator[str]:
    """How the ranks of a minority differ from the others of this node."""
    direct: dict[int, bool] = {}
    for link in communicator.links:
        if link.link_type.kind is NET:
            direct[link.reported_by] = direct.get(link.reported_by, False) or link.link_type.gdr
    yield from _minority({rank: process.network for rank, process in processes.items()}, "chose {}")
    found = {rank: str(len(process.hcas)) for rank, process in processes.items() if process.hcas}
    yield from _minority(found, "found {} RDMA devices")
    yield from _minority({rank: "with" if gdr else "without" for rank, gdr in direct.items()}, "send {} GPUDirect")


def _minority(values: Mapping[int, str], words: str) -> Iterator[str]:
    ranks: dict[str, list[int]] = defaultdict(list)
    for rank, value in sorted(values.items()):
        if value:
            ranks[value].append(rank)
    usual = max(ranks, key=lambda value: len(ranks[value]), default="")
    for value, odd in ranks.items():
        if 2 * len(odd) < len(values):
            yield f"rank {format_numbers(odd)}: {words.format(value)}, the others of this node {usual}"


def _shortened(finding: Finding) -> Finding:
    evidence: Sequence[str] = [line[:_MAX_QUOTED_CHARS] for line in finding.evidence[:2]]
    return msgspec.structs.replace(finding, evidence=tuple(evidence))
