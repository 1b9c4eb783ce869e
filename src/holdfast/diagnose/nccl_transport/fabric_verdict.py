"""Decides in one sentence whether the logs prove that the fabric carried the job, and if not, what is missing.

Every claim has a line that supports it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice

from holdfast.diagnose.nccl_transport.causes import CAUSES, Effect, first_cause, quoted_line
from holdfast.diagnose.nccl_transport.inconsistencies import DEGRADING, MergedSetup, find_inconsistencies
from holdfast.diagnose.nccl_transport.link_matrix import build_link_matrix
from holdfast.diagnose.nccl_transport.merge import MergedLogs, format_numbers, format_ranges
from holdfast.diagnose.nccl_transport.networks import Network, expected_network, network_by_label, network_of
from holdfast.diagnose.nccl_transport.transport_report import (
    FabricOutcome,
    FabricVerdict,
    LogLine,
    NcclProcess,
    TransportKind,
    TransportReport,
)
from holdfast.fabric.fabric import Fabric
from holdfast.findings import Finding, Owner, Severity

_MAX_QUOTED = 4
_TCP = "TCP"
_SOCKETS = ("NET/Socket", "NET/Socket/GDRDMA")
ONE_NODE = "one-node"
"""The cause of a verdict where no network was needed."""


def build_report(
    logs: MergedLogs,
    *,
    versions: Mapping[str, LogLine],
    info_lines: int,
    truncated_lines: int,
    left_out: int,
    expected: Fabric | None,
) -> TransportReport:
    """The whole result: what was read, what differs, and the verdict."""
    surveyed = build_link_matrix(logs.processes, logs.communicators)
    ranks = {member.process for communicator in logs.communicators for member in communicator.members}
    members = tuple(process for number, process in enumerate(logs.processes) if number in ranks or not ranks)
    nodes = [process.node for process in logs.processes]
    seen = MergedSetup(processes=members, communicators=logs.communicators, nodes=nodes, links=surveyed)
    findings = find_inconsistencies(seen)
    verdict = _verdict(seen, findings, info_lines, expected)
    proven = verdict.evidence and not (left_out and verdict.outcome is FabricOutcome.VERIFIED)
    if verdict.outcome is not FabricOutcome.UNKNOWN and not proven:
        missing = (
            "the logs of a part of the job: the input exceeded the limit, and the lines that prove it were left out"
        )
        what = f"{left_out:,} lines were left out; by the others {verdict.what}"
        verdict = FabricVerdict(outcome=FabricOutcome.UNKNOWN, what=what, expected=verdict.expected, missing=missing)
    return TransportReport(
        processes=logs.processes,
        communicators=logs.communicators,
        versions=versions,
        findings=(*_as_finding(verdict), *findings),
        verdict=verdict,
        info_lines=info_lines,
        truncated_lines=truncated_lines + logs.truncated_lines,
        unassigned_links=logs.unassigned_links,
        left_out=left_out,
    )


def _as_finding(verdict: FabricVerdict) -> tuple[Finding, ...]:
    if verdict.outcome not in {FabricOutcome.TCP_FALLBACK, FabricOutcome.DEGRADED}:
        return ()
    return (
        Finding(
            code=verdict.outcome.value,
            what=verdict.what,
            severity=Severity.ERROR if verdict.expected else Severity.WARNING,
            evidence=tuple(map(str, verdict.evidence)),
            remedy=verdict.remedy,
            owner=Owner.CLUSTER,
        ),
    )


def _verdict(seen: MergedSetup, findings: Sequence[Finding], info_lines: int, expected: Fabric | None) -> FabricVerdict:
    used = {
        network_of(_name(route)).name if route.startswith("NET/") else "NVLink"
        for route in seen.links.inter_node_routes
    }
    if not used:
        return _nothing_used(seen, findings, info_lines, expected)
    wanted, layer, why = _expected_network(seen, used, expected)
    builder = _VerdictBuilder(seen, why)
    if _TCP in used and (wanted is None or wanted.name != _TCP):
        return builder.fallback(wanted)
    if wanted is not None and wanted.name != _TCP and wanted.name not in used and used != {"NVLink"}:
        what = f"{_many(used)} connected the nodes instead of {wanted.name}"
        return builder.degraded("other-network", what, wanted.remedy)
    wrong = {hca for process in seen.processes for hca in process.hcas if layer and not hca.endswith(f"/{layer}")}
    if wrong and "IB" in used:
        return builder.degraded(
            "other-link-layer",
            f"{len(wrong)} of the devices used are not {layer}: {', '.join(sorted(wrong)[:_MAX_QUOTED])}",
            "Name those that are in NCCL_IB_HCA.",
        )
    worse = [finding for finding in findings if finding.code in DEGRADING]
    if worse:
        what = f"{_many(used)} connected the nodes, but {worse[0].what}"
        return builder.degraded(worse[0].code, what, worse[0].remedy)
    if unseen := _unverified(seen):
        what, missing = unseen
        return builder.unknown(f"the connections seen used {_many(used)}, but {what}", missing)
    gdr = (
        ", GPUDirect RDMA everywhere"
        if seen.links.inter_node_routes and all(map(_direct, seen.links.inter_node_routes))
        else ""
    )
    return builder.verified(f"{_many(used)} connected the nodes{gdr}")


def _unverified(seen: MergedSetup) -> tuple[str, str] | None:
    """What keeps the fabric from being verified, and which evidence would decide; None where all of it was seen."""
    for one in seen.communicators:
        if one.missing or not one.size:
            absent = (
                f"rank {format_ranges(one.missing)} of {one.name}" if one.size else "every rank, from the beginning"
            )
            return f"only {len(one.members):,} ranks were seen", f"the set-up log of {absent}"
        begun = [member.rank for member in one.members if not member.complete]
        if begun:
            return (
                f"{len(begun):,} ranks of {one.name} did not finish their set-up",
                f"the rest of the log of rank {format_numbers(begun)}, or why it ended there",
            )
    silent = sorted(node for node in _multi_node(seen) if not seen.links.nodes[node].inter_node_links)
    if silent:
        return (
            f"no connection of {len(silent):,} nodes was seen",
            f"the connection lines of {', '.join(silent[:_MAX_QUOTED])}: its logs up to the first collective",
        )
    return None


def _multi_node(seen: MergedSetup) -> set[str]:
    """The nodes that share a communicator with others."""
    members = ({seen.nodes[member.process] for member in one.members} for one in seen.communicators)
    return {node for nodes in members if len(nodes) > 1 for node in nodes}


def _expected_network(seen: MergedSetup, used: set[str], expected: Fabric | None) -> tuple[Network | None, str, str]:
    """The expected network, its link layer, and why; None where nothing names it."""
    if expected is not None:
        wanted, layer = expected_network(expected)
        return wanted, layer, f"the job's fabric is {expected.name}"
    asked = {process.env.get("NCCL_NET", "") for process in seen.processes}
    if asked == {"Socket"}:
        return network_by_label(_TCP), "", "NCCL_NET=Socket is set on every rank"
    better = sorted(used - {_TCP, "NVLink"})
    if better:
        return network_by_label(better[0]), "", f"some connections use {better[0]}"
    if any(process.hcas for process in seen.processes):
        return network_by_label("IB"), "", "NCCL found RDMA devices"
    if any(process.plugin for process in seen.processes):
        return network_by_label("OFI"), "", "the network plugin was loaded"
    return None, "", ""


def _nothing_used(
    seen: MergedSetup, findings: Sequence[Finding], info_lines: int, expected: Fabric | None
) -> FabricVerdict:
    counted = max((communicator.nodes or 0 for communicator in seen.communicators), default=0)
    chosen = {network_of(process.network).name for process in seen.processes if process.network}
    builder = _VerdictBuilder(seen, f"the job's fabric is {expected.name}" if expected else "")
    if not info_lines:
        return builder.unknown(
            "the input has no NCCL set-up lines", "NCCL's set-up lines: run with NCCL_DEBUG=INFO on every rank"
        )
    spanned = _multi_node(seen)
    if chosen == {_TCP} and (spanned or counted > 1):
        wanted, _, why = _expected_network(seen, {_TCP}, expected)
        builder = _VerdictBuilder(seen, why)
        if wanted is not None and wanted.name == _TCP:
            return builder.verified("TCP was chosen on every rank")
        return builder.fallback(wanted)
    if seen.communicators and not spanned and counted <= 1 and not any(one.missing for one in seen.communicators):
        worse = [finding for finding in findings if finding.code in DEGRADING]
        if worse:
            return builder.degraded(worse[0].code, worse[0].what, worse[0].remedy)
        return builder.unknown(
            "every communicator is within one node, so no network was needed",
            "the set-up of a run over two nodes",
            ONE_NODE,
        )
    if chosen:
        return builder.unknown(
            f"{_many(chosen)} was chosen, but no connection between nodes is in these logs",
            "the connection lines: logs up to the first collective (NCCL connects then, since 2.22), of every node, "
            "with INIT in NCCL_DEBUG_SUBSYS if that is set",
        )
    return builder.unknown(
        "no line says which network NCCL chose",
        "the lines `Using network …` and `Channel … via NET/…`: unset NCCL_DEBUG_SUBSYS, or set it to INIT,NET,ENV",
    )


class _VerdictBuilder:
    """Builds verdicts, with the lines that prove them."""

    def __init__(self, seen: MergedSetup, expected: str) -> None:
        self._seen = seen
        self._expected = expected

    def verified(self, what: str) -> FabricVerdict:
        return FabricVerdict(
            outcome=FabricOutcome.VERIFIED, what=what, expected=self._expected, evidence=self._routes()
        )

    def degraded(self, cause: str, what: str, remedy: str) -> FabricVerdict:
        return FabricVerdict(
            outcome=FabricOutcome.DEGRADED,
            what=what,
            cause=cause,
            expected=self._expected,
            evidence=self._routes(),
            remedy=remedy,
        )

    def unknown(self, what: str, missing: str, cause: str = "") -> FabricVerdict:
        return FabricVerdict(
            outcome=FabricOutcome.UNKNOWN,
            what=what,
            cause=cause,
            expected=self._expected,
            missing=missing,
            evidence=self._routes(),
        )

    def fallback(self, wanted: Network | None) -> FabricVerdict:
        on_tcp = [process for process in self._seen.processes if _on_tcp(process)]
        nodes = sorted({process.node for process in on_tcp})
        everybody = len(nodes) == len({process.node for process in self._seen.processes})
        where = (
            "between all nodes"
            if everybody
            else f"on {', '.join(nodes[:_MAX_QUOTED])}{' …' if len(nodes) > _MAX_QUOTED else ''}"
        )
        quoted = {
            cause.name: next(filter(None, (quoted_line(process, cause) for process in on_tcp)), None)
            for cause in CAUSES
            if cause.effect is Effect.SOCKETS
        }
        proofs = {name: line for name, line in quoted.items() if line is not None}
        cause = first_cause(proofs, Effect.SOCKETS)
        remedy = cause.remedy if cause else wanted.remedy if wanted else ""
        what = f"plain TCP sockets carry the traffic {where}{_format_socket_communicators(self._seen)}"
        if wanted is None:
            what += "; NCCL uses them when it finds nothing better"
            remedy = f"{remedy} If these nodes have no other fabric, set NCCL_NET=Socket.".strip()
        return FabricVerdict(
            outcome=FabricOutcome.TCP_FALLBACK,
            what=what,
            cause=FabricOutcome.TCP_FALLBACK.value,
            expected=self._expected,
            evidence=(*islice(proofs.values(), 2), *_lines(on_tcp, (*_SOCKETS, "network", "interfaces")))[:_MAX_QUOTED],
            remedy=remedy,
        )

    def _routes(self) -> tuple[LogLine, ...]:
        names = [route for route, _ in self._seen.links.inter_node_routes.most_common()]
        return _lines(self._seen.processes, (*names, "network"))[:_MAX_QUOTED]


def _format_socket_communicators(seen: MergedSetup) -> str:
    """The communicators that use sockets, where others do not."""
    slow = [one.name for one in seen.communicators if any(link.link_type.route in _SOCKETS for link in one.links)]
    if not slow or len(slow) == sum(
        any(link.link_type.kind is TransportKind.NET for link in one.links) for one in seen.communicators
    ):
        return ""
    more = f"; and {len(slow) - _MAX_QUOTED:,} more" if len(slow) > _MAX_QUOTED else ""
    return f", of {'; '.join(slow[:_MAX_QUOTED])}{more}"


def _on_tcp(process: NcclProcess) -> bool:
    return process.network == "Socket" or any(route in process.evidence for route in _SOCKETS)


def _lines(processes: Sequence[NcclProcess], names: Sequence[str]) -> tuple[LogLine, ...]:
    found = [
        next((process.evidence[name] for process in processes if name in process.evidence), None) for name in names
    ]
    return tuple(one for one in found if one is not None)


def _name(route: str) -> str:
    return route.removeprefix("NET/").removesuffix("/GDRDMA")


def _direct(route: str) -> bool:
    return route.endswith("/GDRDMA")


def _many(names: set[str]) -> str:
    return " and ".join(sorted(names))
