"""Handles what agents observe of the fabric: warns of one that is not as promised or differs, or ends the run."""

from __future__ import annotations

import msgspec

from holdfast import events
from holdfast.control.context import Context
from holdfast.control.lifecycle import end_run
from holdfast.control.node_fabrics import differences, with_report
from holdfast.control.state import Ending
from holdfast.errors import ExitCode
from holdfast.findings import Severity
from holdfast.job.spec import OnFallback


def fabric_observed(ctx: Context, event: events.FabricObserved) -> None:
    """Report once per attempt that the fabric is not as promised; another network ends the run, if the job says so."""
    from holdfast.diagnose.nccl_transport import judge  # 40 ms, which runs without NCCL need not spend

    _compare_nodes(ctx, event)
    judgement = judge(event)
    known = ctx.state.replicas[event.replica].fabric_findings
    if judgement.finding is None or judgement.finding.code in known:
        return
    ctx.change_replica(event.replica, fabric_findings=known | {judgement.finding.code})
    if not judgement.other_network or ctx.job.fabric.on_fallback is OnFallback.WARN or ctx.state.ending:
        ctx.report(judgement.finding)
        return
    remedy = f"{judgement.finding.remedy} `--set fabric.on_fallback=warn` runs on this network all the same."
    finding = msgspec.structs.replace(judgement.finding, severity=Severity.ERROR, remedy=remedy)
    ending = Ending(outcome=events.Outcome.FAILED, exit_code=ExitCode.CANNOT_RUN_HERE, reason=finding.what)
    end_run(ctx, ending, finding)


def _compare_nodes(ctx: Context, event: events.FabricObserved) -> None:
    """Report once per attempt and aspect that a node differs from the others of a communicator."""
    replica = ctx.state.replicas[event.replica]
    nodes = with_report(replica.fabric_nodes, event)
    found = dict(differences(nodes.get((event.communicator, event.size), {}), event.size))
    new = {aspect: finding for aspect, finding in found.items() if aspect not in replica.fabric_findings}
    ctx.change_replica(event.replica, fabric_nodes=nodes, fabric_findings=replica.fabric_findings | new.keys())
    for finding in new.values():
        ctx.report(finding)
