"""Handles the checks of nodes before ranks start on them: a node that fails is replaced, and gets no ranks."""

from __future__ import annotations

from holdfast import events
from holdfast.control.context import Context
from holdfast.control.node_handlers import lose_nodes
from holdfast.control.node_slots import avoid_machine, nodes_changed
from holdfast.control.policy import CHECK_TRIES, FailureKind, check_failed_finding
from holdfast.control.state import CheckPhase, Timer
from holdfast.findings import Finding, Owner, Severity
from holdfast.preflight.compare import compare


def node_checked(ctx: Context, event: events.NodeChecked) -> None:
    """The node gets ranks unless it failed; once all have passed, those that differ from the others fail."""
    if ctx.state.nodes[event.node].check is not CheckPhase.PENDING:
        return
    ctx.set_timer(Timer.CHECK, event.node, None)
    if problem := event.problem:
        _fail(ctx, event.node, problem)
    else:
        node = ctx.change_node(event.node, check=CheckPhase.PASSED, failed_checks=0, facts=event.facts)
        _compare_nodes(ctx)
        nodes_changed(ctx, node.replica)
    if not any(node.check is CheckPhase.PENDING or node.is_expected for node in ctx.state.nodes):
        for node in ctx.state.nodes:
            _lose_failed(ctx, node.node)


def check_timed_out(ctx: Context, index: int) -> None:
    """The node has not reported its checks: something on it hangs. Or it has failed, and the others' time is up."""
    if ctx.state.nodes[index].check is CheckPhase.PENDING:
        _fail(ctx, index, _no_report(ctx.job.checks.deadline_s))
    _lose_failed(ctx, index)


def _compare_nodes(ctx: Context) -> None:
    """Once no check is pending: nodes without ranks fail if they must not differ from the others, and do."""
    if any(node.check is CheckPhase.PENDING for node in ctx.state.nodes):
        return
    found = compare({node.node: node.facts for node in ctx.state.nodes if node.check is CheckPhase.PASSED})
    reported = set[str]()
    for node, findings in found.items():
        errors = [finding for finding in findings if finding.severity is Severity.ERROR]
        if errors and not ctx.state.nodes[node].has_processes:
            _fail(ctx, node, errors[0])
        for finding in findings:
            if finding not in errors and finding.where not in reported:  # once for all nodes: the evidence names them
                reported.add(finding.where)
                ctx.report(finding)


def _fail(ctx: Context, index: int, problem: Finding) -> None:
    """Replace the node; the last that may fail in its slot stays until the others have reported, since it ends the run.

    The user then knows of all that fail.
    """
    ctx.report(check_failed_finding(index, problem))
    failed = ctx.state.nodes[index].failed_checks + 1
    ctx.change_node(index, check=CheckPhase.FAILED, failed_checks=failed, reason=problem.what)
    if failed < CHECK_TRIES:
        _lose_failed(ctx, index)
    else:
        ctx.set_timer(Timer.CHECK, index, ctx.at + ctx.job.checks.deadline_s)


def _lose_failed(ctx: Context, index: int) -> None:
    node = ctx.state.nodes[index]
    if node.check is CheckPhase.FAILED:
        avoid_machine(ctx, index, cordon=False)
        lose_nodes(ctx, (node,), node.reason, kind=FailureKind.CHECK_FAILED)


def _no_report(deadline_s: float) -> Finding:
    return Finding(
        code="node-check-hangs",
        what=f"its checks have not ended within {deadline_s:g} s: a driver, a device or a file system does not answer",
        remedy="Look at `dmesg` on this node; restart it if a device hangs.",
        owner=Owner.CLUSTER,
    )
