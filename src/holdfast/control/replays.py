"""Begins and stops replays: groups of a replica's nodes repeat the run's last steps, twice, to find a bad node.

What follows their reports: replay_handlers.py; the groups: watch/dual_phase.py.
"""

from __future__ import annotations

from msgspec.structs import replace

from holdfast.control.commands import StartReplay
from holdfast.control.context import Context, FollowUp
from holdfast.control.rollout import code_of_next_attempt
from holdfast.control.state import NodeState, Replay, ReplicaState, State, Timer
from holdfast.findings import Finding, Owner, Severity
from holdfast.job.spec import Job, Launch
from holdfast.protocol.orders import StopReplay
from holdfast.protocol.replay_env import MAX_STEPS
from holdfast.watch.dual_phase import PEERS

START_S = 120.0
"""Seconds that ranks have to import their libraries and load the checkpoint, whatever the run's own starts took."""
SLOWNESS = 3.0
"""How much longer steps and starts may take than the run's own, on as many nodes."""
REPORT_MARGIN_S = 90.0
"""Seconds from a replay's deadline, at which a node kills its ranks, to that of its report."""


def why_no_replay(job: Job, nodes: int) -> str:
    """Why so many nodes of a job cannot repeat its steps; empty if they can."""
    rows = (
        (job.recovery.replicas > 1, "the run has several replicas (recovery.replicas)"),
        (nodes < PEERS, f"it takes {PEERS} nodes, and the attempt has {nodes}"),
        (job.checkpoint.local is not None, "checkpoints are on the nodes' own disks (checkpoint.local)"),
        (job.checkpoint.is_remote, "checkpoints are in a store (checkpoint.path)"),
        (job.launch in (Launch.DEEPSPEED, Launch.MPI), f"the launcher `{job.launch}` starts the ranks"),
    )
    return next((why for holds, why in rows if holds), "")


def begin_replay(ctx: Context, index: int, nodes: tuple[NodeState, ...]) -> bool:
    """Have groups of these nodes repeat the last steps, if a failure has asked for it; returns whether they do."""
    until = ctx.state.replicas[index].replay_until
    if until is None:
        return False
    ctx.change_replica(index, replay_until=None)
    if why := why_no_replay(ctx.job, len(nodes)):
        ctx.report(found_nothing((why,)))
        return False
    begin_phase(ctx, index, Replay(number=0, members=tuple(node.node for node in nodes), until_step=until))
    return True


def begin_phase(ctx: Context, index: int, replay: Replay) -> None:
    """Begin the first replay of a pair, or the second, with the next number."""
    number = ctx.state.replicas[index].replays + 1
    replay = replace(replay, number=number, reports=())
    replica = ctx.change_replica(index, replays=number, replay=replay)
    ctx.state = ctx.state.with_nodes(replace(ctx.state.nodes[node], replays=True) for node in replay.members)
    ctx.set_timer(Timer.REPLAY, index, ctx.at + deadline_s(ctx.state, replica, replay) + REPORT_MARGIN_S)
    ctx.emit(_start(ctx, replica, replay, replay.members))


def deadline_s(state: State, replica: ReplicaState, replay: Replay) -> float:
    """Seconds for a replay: its groups do the work of all nodes."""
    fewer = len(replay.members) / min(len(group) for group in replay.groups)
    steps_s = MAX_STEPS * (replica.step_rate.step_s or 0.0)
    return START_S + SLOWNESS * fewer * (steps_s + state.longest_first_step_s)


def leave_replay(ctx: Context, index: int, *, gone: bool) -> None:
    """A node of a replay is gone, which ends the replay on all; or it is back, and gets its order again."""
    node = ctx.state.nodes[index]
    replay = None if node.replica is None else ctx.state.replicas[node.replica].replay
    if node.replica is None or replay is None or index not in replay.members:
        return
    if not gone:
        if node.replays and replay.stopped:
            stop_replay(ctx, node.replica, replay, (index,))
        elif node.replays:
            ctx.emit(_start(ctx, ctx.state.replicas[node.replica], replay, (index,)))
        return
    ctx.change_node(index, replays=False)
    ctx.change_replica(node.replica, replay=replace(replay, stopped=True))
    stop_replay(ctx, node.replica, replay, replay.members)
    ctx.raise_(FollowUp.REPLAYED, index=node.replica)


def stop_replay(ctx: Context, index: int, replay: Replay, nodes: tuple[int, ...]) -> None:
    """Have those of these nodes that still repeat steps end that."""
    if running := tuple(node for node in nodes if ctx.state.nodes[node].replays):
        ctx.send(StopReplay(replica=index, number=replay.number), running)


def found_nothing(evidence: tuple[str, ...]) -> Finding:
    """The finding for a replay that names no node."""
    return Finding(
        code="replay-found-nothing",
        severity=Severity.WARNING,
        what="the replay of the last steps names no node",
        evidence=evidence,
        remedy="All ranks restart. If it happens again, look at the program and its data: `holdfast explain "
        "replay-found-nothing`.",
        owner=Owner.USER,
    )


def _start(ctx: Context, replica: ReplicaState, replay: Replay, nodes: tuple[int, ...]) -> StartReplay:
    code = code_of_next_attempt(ctx.state, replica, replay.members).get("code", replica.code)
    return StartReplay(
        replica=replica.replica,
        number=replay.number,
        groups=replay.groups,
        nodes=nodes,
        until_step=replay.until_step,
        deadline_s=deadline_s(ctx.state, replica, replay),
        code=code,
        checkpoints_back=replica.checkpoints_back,
    )
