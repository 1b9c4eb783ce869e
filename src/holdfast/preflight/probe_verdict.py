"""Judges a probe: which nodes may run ranks, which are replaced, and what no node in particular is to blame for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import msgspec
from msgspec import Struct, field

from holdfast.events import NodeProbed
from holdfast.events.probe_results import ProbeOutcome, ProbeResult, ProbeStage, ProbeSuspect
from holdfast.findings import CheckOutcome, CheckResult, Finding, Owner, Severity

_FINDINGS: Mapping[ProbeStage, Finding] = MappingProxyType(
    {
        ProbeStage.ARRIVE: Finding(
            code="probe-arrive",
            what="its probe does not reach that of the first node",
            remedy="Check that nodes reach each other on all ports: firewall, network policy, security group.",
            owner=Owner.CLUSTER,
        ),
        ProbeStage.MATMUL: Finding(
            code="probe-matmul",
            what="a device computes wrongly or slowly",
            remedy="Run `dcgmi diag -r 3` on this node, and look at `nvidia-smi -q -d ECC,PERFORMANCE`.",
            owner=Owner.CLUSTER,
        ),
        ProbeStage.MEMORY: Finding(
            code="probe-memory",
            what="a device's memory is wrong or slow",
            remedy="Run `dcgmi diag -r 3` on this node, and look at `nvidia-smi -q -d ECC,ROW_REMAPPER`.",
            owner=Owner.CLUSTER,
        ),
        ProbeStage.NODE_ALL_REDUCE: Finding(
            code="probe-node-all-reduce",
            what="its ranks communicate badly with each other",
            remedy="Look at `nvidia-smi nvlink -s`, `nvidia-smi topo -m` and the Fabric Manager of this node.",
            owner=Owner.CLUSTER,
        ),
        ProbeStage.PAIRS: Finding(
            code="probe-pairs",
            what="it communicates badly with other nodes",
            remedy="Compare its adapters and cables with those of the other nodes: rate, errors, firmware, routing.",
            owner=Owner.CLUSTER,
        ),
        ProbeStage.ALL_REDUCE: Finding(
            code="probe-all-reduce",
            what="the all-reduce over all nodes fails, though pairs of nodes communicate",
            remedy="Compare NCCL_* variables, fabric settings and firewalls of all nodes.",
            owner=Owner.CLUSTER,
        ),
        ProbeStage.STORAGE: Finding(
            code="probe-storage",
            what="it cannot write where checkpoints go while the other nodes do",
            remedy="Look at the mount, its server and its quota from this node: `df`, `mount`, `dmesg`.",
            owner=Owner.CLUSTER,
        ),
    }
)
"""Of each stage that can name a suspect."""

CHECKS = tuple(finding.code for finding in _FINDINGS.values())
"""Names of the probes for users, each with the finding of this code."""


class ProbeVerdict(Struct, frozen=True, kw_only=True):
    """What follows from a probe."""

    passed: tuple[int, ...] = ()
    failed: Mapping[int, Finding] = field(default_factory=dict[int, Finding])
    of_all: Finding | None = None
    """What no node in particular is to blame for."""
    warnings: tuple[Finding, ...] = ()


def judge(
    reports: Sequence[NodeProbed], *, new: frozenset[int], failed_before: frozenset[int] = frozenset()
) -> ProbeVerdict:
    """The verdict on a probe that has ended on all of its nodes.

    Of a bad link the end that is `new` is replaced. If both are, it is the later one, and then, if its successor
    communicates as badly, the other: `failed_before` are the nodes whose predecessors failed. Neither end passes.
    """
    nodes = reports[0].nodes
    blind = {report.node: report.not_looked_at for report in reports if report.not_looked_at}
    if len(blind) == len(nodes):
        return ProbeVerdict(passed=nodes, warnings=(_not_looked_at(nodes[0], blind[nodes[0]]),))
    result = result_of(reports)
    if result is None or result.outcome is ProbeOutcome.INCOMPLETE:
        return _without_result(reports, result, blind)
    suspects = [each for each in result.suspects if all(number < len(nodes) for number in each.nodes)]
    failed = {node: _no_result((reason,)) for node, reason in blind.items()}
    silent = {nodes[each.nodes[0]] for each in suspects if each.stage is ProbeStage.ARRIVE}
    if len(silent - failed.keys()) > (len(nodes) - 1) / 2 and len(nodes) > 2:
        return ProbeVerdict(failed=failed | {nodes[0]: _unreachable(silent)})
    of_all, doubtful = None, set[int]()
    refused = [each for each in suspects if each.stage is ProbeStage.STORAGE]
    if len(refused) > 1 and not result.storage:
        of_all = _no_storage(refused)
        suspects = [each for each in suspects if each not in refused]
    for suspect in suspects:
        named = tuple(nodes[each] for each in suspect.nodes)
        if suspect.stage is ProbeStage.ARRIVE and len(nodes) == 2:
            named = nodes  # the other one may be to blame as well
        if len(named) > 2 or (len(named) == 2 and suspect.stage is ProbeStage.ALL_REDUCE):
            of_all = of_all or _finding(suspect, named)
        elif not failed.keys() & set(named):
            doubtful |= set(named)
            failed[_to_blame(named, new, failed_before)] = _finding(suspect, named)
    if failed:
        of_all = None  # it may be their fault
    passed = () if of_all else tuple(node for node in nodes if node not in failed and node not in doubtful)
    return ProbeVerdict(passed=passed, failed=failed, of_all=of_all)


def _without_result(
    reports: Sequence[NodeProbed], result: ProbeResult | None, blind: Mapping[int, str]
) -> ProbeVerdict:
    """Nodes that cannot probe, unlike others; else the first, which coordinates; or no node, if all crashed."""
    if blind:
        return ProbeVerdict(failed={node: _no_result((reason,)) for node, reason in blind.items()})
    problems = [f"node{report.node}: {report.problem}" for report in reports if report.problem]
    evidence = (*((result.problem,) if result and result.problem else ()), *problems[:4])
    if len(reports) > 1 and all(report.crashed for report in reports):
        return ProbeVerdict(of_all=msgspec.structs.replace(_no_result(evidence), what="the probe crashed on all nodes"))
    return ProbeVerdict(failed={reports[0].nodes[0]: _no_result(evidence)})


def probe_results(reports: Sequence[NodeProbed]) -> Mapping[int, tuple[CheckResult, ...]]:
    """The outcome of each probe on each node, as of a check."""
    result, nodes = result_of(reports), reports[0].nodes
    blind = next((report.not_looked_at for report in reports if report.not_looked_at), "")
    if result is None:
        return dict.fromkeys(nodes, _unseen(blind or "there is no result"))
    return {node: tuple(_outcome(result, stage, number) for stage in _FINDINGS) for number, node in enumerate(nodes)}


def _unseen(reason: str) -> tuple[CheckResult, ...]:
    return tuple(CheckResult(check=name, outcome=CheckOutcome.NOT_LOOKED_AT, reason=reason) for name in CHECKS)


NOT_PROBED = _unseen("not probed")
"""Of a node that took part in no probe."""


def pair_rates(reports: Sequence[NodeProbed]) -> Mapping[tuple[int, int], float]:
    """The rate in bytes/s between two nodes, by their numbers: that of the slowest pair of their ranks."""
    result, rates = result_of(reports), dict[tuple[int, int], float]()
    for pair in result.pairs if result else ():
        if pair.gb_s:
            first, second = sorted(reports[0].nodes[each] for each in pair.nodes)
            rates[first, second] = min(pair.gb_s * 1e9, rates.get((first, second), math.inf))
    return rates


def result_of(reports: Sequence[NodeProbed]) -> ProbeResult | None:
    """The result that the node of rank 0 reported."""
    return next((report.result for report in reports if report.result), None)


def no_report(deadline_s: float) -> Finding:
    """The finding on a node whose probe has not ended in time."""
    return Finding(
        code="probe-hangs",
        what=f"its probe has not ended within {deadline_s:g} s, and cannot be killed: a driver does not answer",
        remedy="Look at `dmesg` on this node; restart it if a device hangs.",
        owner=Owner.CLUSTER,
    )


def _outcome(result: ProbeResult, stage: ProbeStage, number: int) -> CheckResult:
    name = _FINDINGS[stage].code
    if any(suspect.stage is stage and number in suspect.nodes for suspect in result.suspects):
        return CheckResult(check=name, outcome=CheckOutcome.FAILED)
    if stage in result.not_run:
        return CheckResult(check=name, outcome=CheckOutcome.NOT_LOOKED_AT, reason="not run")
    return CheckResult(check=name)


def _to_blame(named: tuple[int, ...], new: frozenset[int], failed_before: frozenset[int]) -> int:
    candidates = [node for node in named if node in new] or list(named)
    return max([node for node in candidates if node not in failed_before] or candidates)


def _finding(suspect: ProbeSuspect, named: tuple[int, ...]) -> Finding:
    general = _FINDINGS[suspect.stage]
    what, where = general.what, ""
    if len(named) > 2:
        where = ", ".join(f"node{node}" for node in named[:8])
    elif suspect.ranks and len(named) == 1:
        where = f"rank {', '.join(map(str, suspect.ranks))}"
    if suspect.stage is ProbeStage.PAIRS and len(named) > 1:
        both = f"node{named[0]} and node{named[1]} communicate badly with each other"
        what = both if len(named) == 2 else "all pairs of nodes communicate badly"
    return msgspec.structs.replace(general, what=what, where=where, evidence=suspect.evidence[:8])


def _not_looked_at(node: int, reason: str) -> Finding:
    return Finding(
        code="probe-not-possible",
        severity=Severity.WARNING,
        what="nodes were not probed: ranks start on them untested",
        where=f"node{node}",
        evidence=(reason,),
        remedy="Install `holdfast[train]`, with a torch for the job's devices, in the interpreter of its command.",
        owner=Owner.USER,
    )


def _no_result(evidence: tuple[str, ...]) -> Finding:
    return Finding(
        code="probe-no-result",
        what="its probe ended without a result",
        evidence=evidence,
        remedy="Read `probe-*.log` in the node's folder, and check that nodes reach each other on all ports.",
        owner=Owner.CLUSTER,
    )


def _no_storage(refused: Sequence[ProbeSuspect]) -> Finding:
    return msgspec.structs.replace(
        _FINDINGS[ProbeStage.STORAGE],
        what="no node can write where checkpoints go",
        evidence=tuple(sorted({words for each in refused for words in each.evidence}))[:8],
        remedy="Look at the file system, its quota and its free space: `df`, `mount`, the server's log.",
    )


def _unreachable(silent: set[int]) -> Finding:
    others = ", ".join(f"node{node}" for node in sorted(silent)[:8])
    return msgspec.structs.replace(
        _FINDINGS[ProbeStage.ARRIVE],
        what="most other nodes do not reach its probe",
        evidence=(f"no answer from {others}",),
    )
