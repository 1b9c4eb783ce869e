"""Empties and refills node slots: with a new node from the target, or with a standby.

A standby and a missing node swap roles: the standby's slot gets the replica and node rank of the missing node's, so
that ranks keep their numbers; the other slot becomes a standby's once refilled.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from holdfast.control.commands import AvoidMachine, CheckNode, ReplaceNode, StartProbe
from holdfast.control.context import Context, FollowUp
from holdfast.control.node_set import NodeSet
from holdfast.control.policy import CHECK_TRIES, check_failed_finding
from holdfast.control.replays import leave_replay
from holdfast.control.state import (
    CheckPhase,
    NodePhase,
    NodeState,
    Probe,
    ProbePhase,
    ReplicaPhase,
    ReplicaState,
    Timer,
)
from holdfast.events import NodeRequested, StandbyPromoted
from holdfast.findings import Finding, Owner
from holdfast.job.quarantine import Certainty, MachineEvidence
from holdfast.job.spec import CheckLevel
from holdfast.protocol.orders import StopProbe

CHECK_MARGIN_S = 5.0
"""Seconds from the deadline of a node's checks to that of its report."""
PROBE_MARGIN_S = 90.0
"""The same of a probe, whose processes first import torch, and at the end are killed."""
MIN_PROBE_NODES = 4
"""Nodes of a probe, if there are as many: of fewer it cannot say which one is slow."""


def empty_slot(ctx: Context, index: int, reason: str, *, maybe_alive: bool) -> None:
    """Empty the slot of a lost node: its next generation is to be requested."""
    leave_probe(ctx, index, gone=True)
    leave_replay(ctx, index, gone=True)
    node = ctx.change_node(
        index,
        phase=NodePhase.REQUESTED,
        since=ctx.at,
        reason=reason,
        maybe_alive=maybe_alive or ctx.state.nodes[index].maybe_alive,
        has_processes=False,
        evicted=False,
        corruptions=(),
        link_losses=(),
        machine="",
        incarnation="",
        check=CheckPhase.NONE,
        probe=ProbePhase.NONE,
        facts={},
        evidence=None,
        generation=ctx.state.nodes[index].generation + 1,
    )
    arm_join_timeout(ctx, node)
    for timer in (Timer.RECONNECT, Timer.CHECK):
        ctx.set_timer(timer, index, None)


def avoid_machine(ctx: Context, index: int, evidence: MachineEvidence | None) -> None:
    """Create no further node on the machine of a failed node; with evidence, later runs avoid it too."""
    node = ctx.state.nodes[index]
    ctx.change(avoided=(*ctx.state.avoided, (node.node_id, node.machine)))
    ctx.emit(AvoidMachine(node_id=node.node_id, machine=node.machine, evidence=evidence))


def avoid_again(ctx: Context) -> None:
    """Avoid the machines of failed nodes, for a target that may not know them.

    None is quarantined again: meanwhile somebody may have repaired it.
    """
    ctx.emit(*(AvoidMachine(node_id=node_id, machine=name) for node_id, name in ctx.state.avoided))


def arm_join_timeout(ctx: Context, node: NodeState) -> None:
    """Start the join timeout of a node that was requested or created."""
    timer, index = (Timer.STANDBY_JOIN, node.node) if node.replica is None else (Timer.JOIN, node.replica)
    ctx.set_timer(timer, index, node.since + ctx.job.recovery.join_timeout_s, earliest=True)


def record_requested(ctx: Context, node: NodeState, reason: str = "") -> None:
    """Log that a node was requested."""
    standby = node.replica is None
    ctx.record(NodeRequested(at=ctx.at, node=node.node, generation=node.generation, reason=reason, standby=standby))


def refill_slot(ctx: Context, index: int) -> None:
    """Request a node for an empty slot, unless the run ends or every node that came failed its checks."""
    node = ctx.state.nodes[index]
    if ctx.state.ending:
        return
    if node.failed_checks >= CHECK_TRIES:
        ctx.change_node(index, phase=NodePhase.UNAVAILABLE)
    else:
        record_requested(ctx, node, node.reason)
        ctx.emit(ReplaceNode(node_id=node.node_id, reason=node.reason))


def request_check(ctx: Context, index: int) -> None:
    """Have a node that has joined check itself before it gets ranks, if the job wants it and it has not passed."""
    checks, node = ctx.job.checks, ctx.state.nodes[index]
    wanted = checks.before_start is not CheckLevel.OFF or is_examined(ctx, node)
    if not wanted or node.check is CheckPhase.PASSED or node.has_processes:
        return
    ctx.change_node(index, check=CheckPhase.PENDING)
    ctx.set_timer(Timer.CHECK, index, ctx.at + checks.quick_deadline_s + CHECK_MARGIN_S)
    ctx.emit(CheckNode(node=index, number=node.checks))


def begin_probe(ctx: Context, index: int, nodes: tuple[NodeState, ...]) -> bool:
    """Have nodes that are new since the last probe probe each other and some others, before ranks start on them.

    Returns whether a probe has begun.
    """
    new = [node for node in nodes if node.probe is not ProbePhase.PASSED]
    examined = ctx.state.replicas[index].examined and (len(nodes) > 1 or ctx.job.gpus_per_node > 0)
    if not new or not (ctx.job.checks.before_start is CheckLevel.FULL or examined):
        return False
    passed = [node for node in nodes if node.probe is ProbePhase.PASSED]
    partners = passed[: max(len(new), MIN_PROBE_NODES - len(new))]
    members = tuple(node for node in nodes if node in new or node in partners)
    numbers = tuple(node.node for node in members)
    number = ctx.state.replicas[index].probes + 1
    probe = Probe(number=number, members=numbers, new=NodeSet.of(node.node for node in new))
    ctx.change_replica(index, probes=number, probe=probe)
    ctx.state = ctx.state.with_nodes(replace(node, probe=ProbePhase.RUNNING) for node in members)
    _arm_probe_timeout(ctx, index)
    ctx.emit(StartProbe(replica=index, number=number, members=numbers))
    return True


def is_examined(ctx: Context, node: NodeState) -> bool:
    """Whether a node is checked after a failure without a culprit."""
    return node.replica is not None and ctx.state.replicas[node.replica].examined


def examine_nodes(ctx: Context, index: int) -> None:
    """Have the nodes of a replica, which stay, be checked and probe each other before its next attempt."""
    ctx.change_replica(index, examined=True)
    for node in ctx.state.nodes_of(index):
        if node.phase is NodePhase.JOINED:
            ctx.change_node(node.node, check=CheckPhase.NONE, checks=node.checks + 1, probe=ProbePhase.NONE)
            request_check(ctx, node.node)


def leave_probe(ctx: Context, index: int, *, gone: bool) -> None:
    """A node of a probe is gone, or may not have its order: all end it, and are probed again once they are there."""
    node = ctx.state.nodes[index]
    if gone:
        ctx.change_node(index, probe=ProbePhase.NONE)
    probe = None if node.replica is None else ctx.state.replicas[node.replica].probe
    if node.replica is None or probe is None or index not in probe.members:
        return
    if not gone and node.probe is not ProbePhase.RUNNING:  # it has reported
        return
    reports = tuple(report for report in probe.reports if report.node != index) if gone else probe.reports
    ctx.change_replica(node.replica, probe=replace(probe, stopped=True, reports=reports))
    _stop_probe(ctx, node.replica, probe, probe.members)
    ctx.raise_(FollowUp.PROBED, index=node.replica)


def stop_probe_again(ctx: Context, index: int) -> None:
    """A node that was disconnected during a probe is back: the probe has been stopped."""
    node = ctx.state.nodes[index]
    probe = None if node.replica is None else ctx.state.replicas[node.replica].probe
    if node.probe is ProbePhase.RUNNING and node.replica is not None and probe is not None:
        _stop_probe(ctx, node.replica, probe, (index,))


def _stop_probe(ctx: Context, index: int, probe: Probe, nodes: tuple[int, ...]) -> None:
    running = tuple(each for each in nodes if ctx.state.nodes[each].probe is ProbePhase.RUNNING)
    if running:
        ctx.send(StopProbe(replica=index, number=probe.number, nodes=probe.members), running)
        _arm_probe_timeout(ctx, index)


def _arm_probe_timeout(ctx: Context, index: int) -> None:
    ctx.set_timer(Timer.PROBE, index, ctx.at + ctx.job.checks.probe_deadline_s + PROBE_MARGIN_S)


def mark_failed(ctx: Context, index: int, problem: Finding, certainty: Certainty | None) -> None:
    """A node has failed its checks: it gets no ranks, and leaves (FollowUp.LOSE_FAILED).

    With a certainty, its machine is remembered, unless the problem is the job's.
    """
    if problem.owner is not Owner.CLUSTER:
        certainty = None
    ctx.report(check_failed_finding(index, problem))
    failed = ctx.state.nodes[index].failed_checks + 1
    evidence = MachineEvidence(certainty=certainty, finding=problem) if certainty else None
    ctx.change_node(index, check=CheckPhase.FAILED, failed_checks=failed, reason=problem.what, evidence=evidence)


def nodes_changed(ctx: Context, replica: int | None) -> None:
    """Promote ready standbys, and advance replicas that may have waited for this."""
    for index in dict.fromkeys((*promote_standbys(ctx), *(() if replica is None else (replica,)))):
        ctx.raise_(FollowUp.ADVANCE, FollowUp.SCALE_UP, index=index)


def promote_standbys(ctx: Context) -> tuple[int, ...]:
    """Put ready standbys in place of missing nodes; returns the replicas that gained a node."""
    gained: list[int] = []
    for replica in () if ctx.state.ending else ctx.state.replicas:
        for missing in _replaceable(ctx, replica):
            standby = next(iter(ctx.state.ready_standbys & ctx.state.ready_nodes), None)
            if standby is None:
                return tuple(gained)
            _swap_roles(ctx, ctx.state.nodes[standby], missing, replica.replica)
            ctx.record(StandbyPromoted(at=ctx.at, node=standby, replaces=missing.node, replica=replica.replica))
            gained.append(replica.replica)
    return tuple(gained)


def _replaceable(ctx: Context, replica: ReplicaState) -> Iterator[NodeState]:
    """Slots of a replica that a standby may take.

    Not a slot whose former ranks may still live, and at first not one whose node is on its way: it was requested no
    later.
    """
    if replica.phase is not ReplicaPhase.DONE and ctx.state.ready_standbys:
        for slot in replica.slots - ctx.state.ready_nodes - ctx.state.nodes_with_processes:
            node = ctx.state.nodes[slot]
            if node.is_missing and not node.maybe_alive and (node.generation > 0 or not node.is_expected):
                yield node


def _swap_roles(ctx: Context, standby: NodeState, missing: NodeState, index: int) -> None:
    ctx.change(ready_standbys=ctx.state.ready_standbys.with_member(standby.node, False))
    # A standby must start immediately: it has passed its own checks, and is not probed with the others.
    ctx.change_node(standby.node, replica=index, node_rank=missing.node_rank, probe=ProbePhase.PASSED)
    arm_join_timeout(ctx, ctx.change_node(missing.node, replica=None, node_rank=standby.node_rank))
    slots = ctx.state.replicas[index].slots
    ctx.change_replica(index, slots=slots.with_member(missing.node, False).with_member(standby.node))
