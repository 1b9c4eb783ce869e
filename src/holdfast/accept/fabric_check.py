"""Checks that ranks communicate over the promised fabric, and how fast: probes of all links, then a real training."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.accept.agreement import CheckName, FabricTerms
from holdfast.accept.check_report import CheckReport, Figure, Verdict
from holdfast.accept.site import ObservedRun, Site
from holdfast.events import NodeProbed
from holdfast.events.probe_results import ProbeResult
from holdfast.fabric.catalog import CATALOG, LOCAL_DEFAULT
from holdfast.findings import Finding, Owner
from holdfast.job.run_spec import RunSpec
from holdfast.report.formatting import size

RAISED = ("wrong-interface", "tcp-fallback", "fabric-", "link-slowed", "probe-", "node-differs", "rdma-")
"""Beginnings of the codes with which a run itself says that its network is not as promised."""
MAX_PAIRS = 16
LEAST_SHARE = 0.5
"""Of one port's line rate, which the bus bandwidth has to reach where nothing else is agreed: TCP does not."""


def check_fabric(site: Site) -> CheckReport:
    """Start a run whose nodes are probed first, and judge what carried its traffic."""
    terms, nodes = site.agreement.fabric, site.nodes
    if nodes < 2:
        return _not_applicable("one node sends nothing to others", "Add a second node to the target.")
    site.log(f"probing all links of {nodes} nodes, then {terms.steps} steps of training")
    run = site.start(
        "fabric",
        site.program("--steps", str(terms.steps), *(() if site.agreement.program else ("--pace", "0.05"))),
        nodes=nodes,
        checks__before_start="full",
        checks__deadline_s=terms.probe_s,
    )
    return judge_fabric(
        site.observe(run, deadline_s=terms.probe_s + terms.deadline_s), terms, one_machine=site.is_one_machine
    )


def judge_fabric(run: ObservedRun, terms: FabricTerms, *, one_machine: bool) -> CheckReport:
    """What its findings, its probes and the observed connections say."""
    probe = next((event.result for event in run.events if isinstance(event, NodeProbed) and event.result), None)
    promised = RunSpec.read(run.folder.job).fabric
    least = terms.min_gbit_s or LEAST_SHARE * CATALOG[promised].port_gbit_s
    finding = (
        run.raised(*RAISED)
        or run.problem
        or _unobserved(run, promised, one_machine=one_machine)
        or _too_slow(probe, least)
    )
    seen = run.status.fabric or ("not observed: all nodes are on this machine" if one_machine else "not observed")
    return CheckReport(
        check=CheckName.FABRIC,
        verdict=Verdict.FAILED if finding else Verdict.PASSED,
        finding=finding,
        figures=(
            Figure(name="promised", value=promised),
            Figure(name="traffic between nodes", value=seen),
            *(_rates(probe, least) if probe else ()),
        ),
        evidence=tuple(_pair_lines(probe)) if probe else (),
        runs=(run.folder.run_id,),
        bus_bytes_s=_bus_gbit_s(probe) * 1e9 / 8 if probe and probe.all_reduce else None,
    )


def _unobserved(run: ObservedRun, promised: str, *, one_machine: bool) -> Finding | None:
    """A fast fabric that nothing was seen of is not accepted."""
    if promised == LOCAL_DEFAULT or one_machine or run.status.fabric:
        return None
    return Finding(
        code="fabric-not-observed",
        what=f"nothing shows that traffic between nodes used {promised}",
        where=run.folder.run_id,
        remedy="Give the job GPUs, so that NCCL logs what it uses, and leave NCCL_DEBUG_FILE unset.",
    )


def _too_slow(probe: ProbeResult | None, min_gbit_s: float) -> Finding | None:
    measured = _bus_gbit_s(probe) if probe else 0.0
    if measured >= min_gbit_s:
        return None
    if not measured:
        return Finding(
            code="fabric-below-agreed",
            what="no all-reduce over all nodes was measured in the time for probes",
            where="fabric.probe_s",
            remedy="Raise `fabric.probe_s` in the agreement.",
        )
    return Finding(
        code="fabric-below-agreed",
        what=f"the bus bandwidth over all nodes is {measured:.3g} Gbit/s, less than the agreed {min_gbit_s:g}",
        where="all-reduce over all nodes",
        evidence=tuple(_pair_lines(probe)) if probe else (),
        remedy="Compare the pairs: one slow node or link points at its cable or adapter, all of them at the fabric.",
        owner=Owner.CLUSTER,
    )


def _bus_gbit_s(probe: ProbeResult) -> float:
    """The bandwidth of the largest all-reduce."""
    largest = max(probe.all_reduce, key=lambda each: each.size_bytes, default=None)
    return largest.bus_gb_s * 8 if largest else 0.0


def _rates(probe: ProbeResult, min_gbit_s: float) -> Iterable[Figure]:
    measured = _bus_gbit_s(probe)
    agreed = f"at least {min_gbit_s:g} Gbit/s" if min_gbit_s else ""
    met = measured >= min_gbit_s
    if measured:
        largest = max(each.size_bytes for each in probe.all_reduce)
        name = f"bus bandwidth, all-reduce of {size(largest)}"
        yield Figure(name=name, value=f"{measured:.4g} Gbit/s", agreed=agreed, met=met)
    rates = sorted(pair.gb_s * 8 for pair in probe.pairs if pair.gb_s)
    if rates:
        yield Figure(name="slowest and fastest pair of nodes", value=f"{rates[0]:.4g} and {rates[-1]:.4g} Gbit/s")


def _pair_lines(probe: ProbeResult) -> Iterable[str]:
    """The slowest pairs, then the all-reduces by size."""
    slowest = sorted(probe.pairs, key=lambda pair: pair.gb_s or 0.0)
    for pair in slowest[:MAX_PAIRS]:
        rate = pair.problem or "no answer" if pair.gb_s is None else f"{pair.gb_s * 8:.3g} Gbit/s"
        yield f"nodes {pair.nodes[0]} and {pair.nodes[1]}: {rate}"
    for each in probe.all_reduce:
        yield f"all-reduce of {each.size_bytes:,} B: {each.time_s * 1e6:,.0f} us, bus {each.bus_gb_s * 8:.3g} Gbit/s"


def _not_applicable(why: str, remedy: str) -> CheckReport:
    found = Finding(code="acceptance-not-applicable", what=why, where=CheckName.FABRIC.value, remedy=remedy)
    return CheckReport(check=CheckName.FABRIC, verdict=Verdict.NOT_APPLICABLE, finding=found)
