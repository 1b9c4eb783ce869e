"""Handles what agents observe of the fabric: warns of one that is not as promised or differs, or ends the run."""

from __future__ import annotations

import msgspec

from holdfast import events
from holdfast.control.context import Context
from holdfast.control.lifecycle import end_run
from holdfast.control.node_fabrics import differences, with_report
from holdfast.control.state import Ending
from holdfast.diagnose.tcp_pairs import (
    WRONG_INTERFACE,
    SlowLink,
    carries_data,
    link_slowed,
    slower_than_probed,
    wrong_interface,
    wrong_pairs,
)
from holdfast.errors import ExitCode
from holdfast.findings import Finding, Severity
from holdfast.job.spec import OnFallback

MAX_SLOW_LINKS = 16
"""Links of one attempt that are reported as slow."""

FAR_SLOWER = 0.25
"""A link that is below this part of the share that was reported is reported again."""


def fabric_observed(ctx: Context, event: events.FabricObserved) -> None:
    """Report once per attempt that the fabric differs from its promise; another network ends the run, if wanted."""
    from holdfast.diagnose.nccl_transport import judge  # 40 ms, which runs without NCCL need not spend

    _compare_nodes(ctx, event)
    judgement = judge(event)
    if judgement.finding is not None:
        _report(ctx, event.replica, judgement.finding, may_stop=judgement.other_network)


def sockets_observed(ctx: Context, event: events.SocketsObserved) -> None:
    """The same for the interfaces of TCP connections, as soon as two nodes have reported both ends of one.

    Only connections that carry a node's data end the run: a group for barriers may use any interface.
    """
    replica = ctx.state.replicas[event.replica]
    reports = {**replica.sockets, event.node: event}
    ctx.change_replica(event.replica, sockets=reports)
    may_stop = ctx.job.fabric.on_fallback is OnFallback.STOP and not ctx.state.ending
    if WRONG_INTERFACE in replica.fabric_findings and not may_stop:
        return
    if wrong := wrong_pairs(event, reports):
        stops = may_stop and carries_data(wrong, has_gpus=ctx.job.gpus_per_node > 0)
        _report(ctx, event.replica, wrong_interface(wrong), may_stop=stops, once_for="data" if stops else "")


def connection_slowed(ctx: Context, event: events.LinkSlowed) -> None:
    """Report a connection between two nodes that has become slow."""
    if slow := link_slowed(event, ctx.state.replicas[event.replica].sockets):
        _report_slow(ctx, event.replica, slow)


def links_measured(ctx: Context, event: events.LinksMeasured) -> None:
    """Report a connection that is slower than what its nodes did in the probe before the start."""
    replica, nodes = ctx.state.replicas[event.replica], ctx.state.nodes

    def probed_bytes_s(one: int, other: int) -> float:
        if not all(0 <= node < len(nodes) for node in (one, other)):
            return 0.0
        return replica.probed_bytes_s.get(frozenset((nodes[one].node_id, nodes[other].node_id)), 0.0)

    if slow := slower_than_probed(event, replica.sockets, probed_bytes_s):
        _report_slow(ctx, event.replica, slow)


def _report_slow(ctx: Context, replica: int, slow: SlowLink) -> None:
    """Report a slow link, and again if it is far slower in the other direction.

    Acknowledgements that wait in the slow direction slow the other one too, which may be noticed first.
    """
    reported = ctx.state.replicas[replica].slow_links
    known = reported.get(slow.nodes)
    is_news = len(reported) < MAX_SLOW_LINKS if known is None else slow.share < FAR_SLOWER * known
    if is_news:
        ctx.change_replica(replica, slow_links={**reported, slow.nodes: slow.share})
        ctx.report(slow.finding)


def _report(ctx: Context, replica: int, finding: Finding, *, may_stop: bool = False, once_for: str = "") -> None:
    known, name = ctx.state.replicas[replica].fabric_findings, f"{finding.code} {once_for}".strip()
    if name in known:
        return
    ctx.change_replica(replica, fabric_findings=known | {name})
    if not may_stop or ctx.job.fabric.on_fallback is OnFallback.WARN or ctx.state.ending:
        ctx.report(finding)
        return
    remedy = f"{finding.remedy} `--set fabric.on_fallback=warn` runs on this network all the same."
    finding = msgspec.structs.replace(finding, severity=Severity.ERROR, remedy=remedy)
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
