"""Handles the reports of a replay: begins the second one, then has the bad nodes replaced or reports what it found."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from holdfast import events
from holdfast.control.context import Context, FollowUp
from holdfast.control.node_checks import fail_nodes
from holdfast.control.node_slots import nodes_changed
from holdfast.control.replays import begin_phase, deadline_s, found_nothing, stop_replay
from holdfast.control.state import Replay, Timer
from holdfast.findings import Finding, Owner, Severity
from holdfast.job.quarantine import Certainty
from holdfast.preflight.compare import name_nodes
from holdfast.watch.dual_phase import Digests, Group, find_bad, plan

MAX_GROUPS_SHOWN = 8
"""Most groups of a replay that a finding lists."""


def node_replayed(ctx: Context, event: events.NodeReplayed) -> None:
    """The replay has ended on this node; without a digest the rest of the group stops too."""
    replay = ctx.state.replicas[event.replica].replay
    if replay is None or event.number != replay.number or not ctx.state.nodes[event.node].replays:
        return
    ctx.change_node(event.node, replays=False, port=event.port)
    replay = replace(replay, reports=(*replay.reports, event))
    ctx.change_replica(event.replica, replay=replay)
    if not event.digest and not replay.stopped:
        stop_replay(ctx, event.replica, replay, next(group for group in replay.groups if event.node in group))
    ctx.raise_(FollowUp.REPLAYED, index=event.replica)


def replay_timed_out(ctx: Context, index: int) -> None:
    """Nodes that have not reported the end of their ranks, although they were to kill them, are replaced."""
    replica = ctx.state.replicas[index]
    replay = replica.replay
    if replay is None or ctx.state.ending:
        return
    silent = [node for node in replay.members if ctx.state.nodes[node].replays]
    for node in silent:
        ctx.change_node(node, replays=False)
    ctx.change_replica(index, replay=replace(replay, stopped=True))
    fail_nodes(ctx, dict.fromkeys(silent, _no_report(deadline_s(ctx.state, replica, replay))), Certainty.CHECK)
    ctx.raise_(FollowUp.REPLAYED, index=index)


def judge_replay(ctx: Context, index: int) -> None:
    """Once a replay has ended on all nodes, begin the second, or name the bad nodes after that."""
    replay = ctx.state.replicas[index].replay
    if replay is None or any(ctx.state.nodes[node].replays for node in replay.members):
        return
    ctx.clear_timers(index, Timer.REPLAY)
    ctx.change_replica(index, replay=None)
    if ctx.state.ending:
        return
    if replay.stopped:
        ctx.report(found_nothing(("one of its nodes was lost meanwhile",)))
    elif replay.first is None:
        begin_phase(ctx, index, replace(replay, first=_digests(replay)))
        return
    else:
        _name_bad(ctx, replay, replay.first)
    nodes_changed(ctx, index)


def _digests(replay: Replay) -> Digests:
    by_node = {report.node: report.digest for report in replay.reports}
    ended = {group: tuple(by_node.get(node, "") for node in group) for group in replay.groups}
    return {group: digest if all(digest) else None for group, digest in ended.items()}


def _name_bad(ctx: Context, replay: Replay, first: Digests) -> None:
    second, planned = _digests(replay), plan(replay.members)
    bad = find_bad(planned, first, second)
    lines = (
        *_lines("first", planned.first, first),
        *_lines("second", planned.second, second),
        *dict.fromkeys(f"node{report.node}: {report.problem}" for report in replay.reports if report.problem),
    )
    passed = {*replay.members} - {*bad.certain} - {*bad.suspects}
    if bad.suspects and passed:
        ctx.report(_suspects(bad.suspects, lines))
    elif not bad.certain:
        ctx.report(found_nothing(lines))
    fail_nodes(ctx, {node: _bad_node(replay, lines) for node in bad.certain}, Certainty.NAMED)


def _lines(which: str, groups: Sequence[Group], digests: Digests) -> tuple[str, ...]:
    """A line for each group that did not end like the others of its size, or one that says that all did."""
    shown = list[str]()
    for group in groups:
        digest = digests.get(group)
        alike = [other for other in groups if len(other) == len(group) and digests.get(other) == digest]
        if digest is None:
            shown.append(f"{which} replay: {name_nodes(group)} did not end it")
        elif 2 * len(alike) <= sum(len(other) == len(group) for other in groups):
            shown.append(f"{which} replay: {name_nodes(group)} ended with another state")
    return tuple(shown[:MAX_GROUPS_SHOWN]) or (f"{which} replay: equal states at the end",)


def _bad_node(replay: Replay, lines: tuple[str, ...]) -> Finding:
    return Finding(
        code="node-failed-replay",
        what=f"in two replays of the last steps up to step {replay.until_step}, the groups with this node failed, and "
        "all its partners passed in another group",
        evidence=lines,
        remedy="Test its devices, memory and network adapters before the machine is used again.",
        owner=Owner.CLUSTER,
    )


def _no_report(deadline: float) -> Finding:
    return Finding(
        code="node-failed-replay",
        what=f"it has not reported the end of a replay, at which it had to kill its ranks after {deadline:.0f} s",
        remedy="Look at `dmesg` on this node: a device or a file system does not answer.",
        owner=Owner.CLUSTER,
    )


def _suspects(nodes: tuple[int, ...], lines: tuple[str, ...]) -> Finding:
    return Finding(
        code="replay-suspects",
        severity=Severity.WARNING,
        what=f"two replays of the last steps suspect {len(nodes)} nodes, of which some compute wrongly",
        where=name_nodes(nodes),
        evidence=lines,
        remedy="Test these nodes, or cancel the run and resume without them.",
        owner=Owner.CLUSTER,
    )
