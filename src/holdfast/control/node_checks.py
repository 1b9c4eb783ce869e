"""Handles the checks of nodes before ranks start on them: a node that fails is replaced, and gets no ranks.

lifecycle.py compares the nodes of an attempt just before it starts (`start_attempt`).
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from msgspec.structs import replace

from holdfast import events
from holdfast.control import elastic
from holdfast.control.context import Context, FollowUp
from holdfast.control.lifecycle import end_run
from holdfast.control.node_handlers import lose_nodes
from holdfast.control.node_slots import avoid_machine, mark_failed, nodes_changed
from holdfast.control.policy import CHECK_TRIES, FailureKind
from holdfast.control.state import CheckPhase, Ending, NodeState, ProbePhase, Timer
from holdfast.errors import ExitCode
from holdfast.findings import Finding, Owner, Severity
from holdfast.job.quarantine import Certainty
from holdfast.preflight.probe_verdict import ProbeVerdict, judge, no_report, pair_rates


def node_checked(ctx: Context, event: events.NodeChecked) -> None:
    """The node gets ranks unless it failed; a late report of an earlier check does not count."""
    node = ctx.state.nodes[event.node]
    if node.check is not CheckPhase.PENDING or event.number != node.checks:
        return
    ctx.set_timer(Timer.CHECK, event.node, None)
    if problem := event.problem:
        fail_nodes(ctx, {event.node: problem}, Certainty.CHECK)
    else:
        node = ctx.change_node(event.node, check=CheckPhase.PASSED, facts=event.facts)
        nodes_changed(ctx, node.replica)
        fail_nodes(ctx, {}, None)


def check_timed_out(ctx: Context, index: int) -> None:
    """The node has not reported its checks: something on it hangs. Or it has failed, and the others' time is up."""
    if ctx.state.nodes[index].check is CheckPhase.PENDING:
        mark_failed(ctx, index, _no_report(ctx.job.checks.quick_deadline_s), Certainty.CHECK)
    ctx.raise_(FollowUp.LOSE_FAILED, index=index)


def node_probed(ctx: Context, event: events.NodeProbed) -> None:
    """The probe has ended on this node; once it has on all of them, its result says which may run ranks."""
    probe = ctx.state.replicas[event.replica].probe
    if probe is None or event.number != probe.number or ctx.state.nodes[event.node].probe is not ProbePhase.RUNNING:
        return
    ctx.change_node(event.node, probe=ProbePhase.NONE, port=event.port)
    ctx.change_replica(event.replica, probe=replace(probe, reports=(*probe.reports, event)))
    ctx.raise_(FollowUp.PROBED, index=event.replica)


def probe_timed_out(ctx: Context, index: int) -> None:
    """Nodes that have not reported the end of their probe have failed."""
    probe = ctx.state.replicas[index].probe
    silent = [n for n in (probe.members if probe else ()) if ctx.state.nodes[n].probe is ProbePhase.RUNNING]
    for node in silent:
        ctx.change_node(node, probe=ProbePhase.NONE)
    if probe and ctx.state.replicas[index].examined and len(silent) == len(probe.members):
        _acquit(ctx, probe.members, no_report(ctx.job.checks.probe_deadline_s))
    else:
        fail_nodes(ctx, dict.fromkeys(silent, no_report(ctx.job.checks.probe_deadline_s)), Certainty.CHECK)
    ctx.raise_(FollowUp.PROBED, index=index)


def judge_probe(ctx: Context, index: int) -> None:
    """Replace the nodes that the probe names; what no node in particular is to blame for ends the run.

    But not a run in which other replicas train, nor for a probe of some nodes only: those that are new are replaced.
    """
    probe = ctx.state.replicas[index].probe
    if probe is None or any(ctx.state.nodes[node].probe is ProbePhase.RUNNING for node in probe.members):
        return
    ctx.clear_timers(index, Timer.PROBE)
    ctx.change_replica(index, probe=None)
    whole = len(probe.reports) == len(probe.members) and not probe.stopped
    failed_before = frozenset(node for node in probe.members if ctx.state.nodes[node].failed_checks)
    verdict = judge(probe.reports, new=frozenset(probe.new), failed_before=failed_before) if whole else ProbeVerdict()
    for finding in verdict.warnings:
        ctx.report(finding)
    if whole:
        rates = {
            frozenset(ctx.state.nodes[node].node_id for node in nodes): rate
            for nodes, rate in pair_rates(probe.reports).items()
        }
        ctx.change_replica(index, probed_bytes_s={**ctx.state.replicas[index].probed_bytes_s, **rates})
    proven = (report.node for report in probe.reports if report.node not in probe.new)  # by an earlier probe
    for node in {*verdict.passed, *proven} - verdict.failed.keys():
        ctx.change_node(node, probe=ProbePhase.PASSED)
    fail_nodes(ctx, verdict.failed, Certainty.NAMED)
    if verdict.of_all and ctx.state.replicas[index].examined:
        _acquit(ctx, probe.members, verdict.of_all)
    elif verdict.of_all and not ctx.state.ending:
        if ctx.state.running_replicas or len(probe.new) < len(probe.members):
            fail_nodes(ctx, dict.fromkeys(probe.new, verdict.of_all), None)
        else:
            what = verdict.of_all.what
            ending = Ending(outcome=events.Outcome.FAILED, exit_code=ExitCode.CANNOT_RUN_HERE, reason=what)
            end_run(ctx, ending, verdict.of_all)
            return
    nodes_changed(ctx, index)


def _acquit(ctx: Context, members: tuple[int, ...], finding: Finding) -> None:
    """A probe after a failure has no result: it says nothing against any node, and the replica starts again."""
    ctx.report(msgspec.structs.replace(finding, severity=Severity.WARNING))
    for node in members:
        if ctx.state.nodes[node].probe is ProbePhase.NONE:
            ctx.change_node(node, probe=ProbePhase.PASSED)


def fail_nodes(ctx: Context, problems: Mapping[int, Finding], certainty: Certainty | None) -> None:
    """Replace nodes; the last that may fail in its slot stays until the others have reported, since it ends the run.

    The user then knows of all that fail. Without problems: the others may just have reported.
    """
    for index, problem in problems.items():
        mark_failed(ctx, index, problem, certainty)
    failed = [node for node in ctx.state.nodes if node.check is CheckPhase.FAILED]
    last = [node.node for node in failed if node.failed_checks >= CHECK_TRIES]
    awaited = any(node.check is CheckPhase.PENDING or node.is_expected for node in ctx.state.nodes)
    for index in last:
        if not awaited:
            ctx.raise_(FollowUp.LOSE_FAILED, index=index)
        elif index in problems:
            ctx.set_timer(Timer.CHECK, index, ctx.at + ctx.job.checks.quick_deadline_s)
    for index in problems:
        if index not in last:
            ctx.raise_(FollowUp.LOSE_FAILED, index=index)


def lose_failed(ctx: Context, index: int) -> None:
    """Replace a node that has failed its checks, or end the run if it cannot start without it."""
    node = ctx.state.nodes[index]
    if node.check is not CheckPhase.FAILED:
        return
    avoid_machine(ctx, index, node.evidence)
    if node.failed_checks >= CHECK_TRIES and _is_needed(ctx, node):
        finding = _failed_for_good(index, node.reason)
        ending = Ending(outcome=events.Outcome.FAILED, exit_code=ExitCode.CANNOT_RUN_HERE, reason=finding.what)
        end_run(ctx, ending, finding)
    else:
        lose_nodes(ctx, (node,), node.reason, kind=FailureKind.CHECK_FAILED)


def _is_needed(ctx: Context, node: NodeState) -> bool:
    """Whether nothing can run without a node in this slot."""
    if node.replica is None or ctx.state.running_replicas or ctx.state.ending:
        return False
    others = sum(not each.is_missing for each in ctx.state.nodes_of(node.replica)) - 1
    return others < elastic.min_nodes(ctx.job, ctx.state)


def _failed_for_good(node: int, problem: str) -> Finding:
    return Finding(
        code=FailureKind.CHECK_FAILED.value,
        what=f"node{node} failed its checks, and so did the node that it replaced",
        where=f"node{node}",
        evidence=(problem,),
        remedy="Fix what the check found, or start without checks: `--set checks=off`.",
        owner=Owner.CLUSTER,
    )


def _no_report(deadline_s: float) -> Finding:
    return Finding(
        code="node-check-hangs",
        what=f"its checks have not ended within {deadline_s:g} s: a driver, a device or a file system does not answer",
        remedy="Look at `dmesg` on this node; restart it if a device hangs.",
        owner=Owner.CLUSTER,
    )
