"""Compares the stacks of a hung replica's ranks, as their agents reported them."""

from __future__ import annotations

from holdfast.control.state import ReplicaState
from holdfast.diagnose.stack_groups import group_stacks, to_event
from holdfast.events import StacksCompared
from holdfast.job.parallel_layout import ParallelLayout
from holdfast.job.spec import Job


def layout_of(job: Job, world_size: int) -> ParallelLayout | None:
    """How the job says that its program divides so many ranks; None if it does not say."""
    return ParallelLayout.of(job.parallel, world_size) if job.parallel else None


def compare_stacks(job: Job, replica: ReplicaState, at: float) -> StacksCompared | None:
    """What the stacks show together; None unless at least two ranks have reported one and they differ."""
    stacks = {hung.rank: hung.frames for hung in replica.hangs}
    if sum(map(bool, stacks.values())) < 2:
        return None
    world_size = len(replica.members) * job.local_world_size
    layout = layout_of(job, world_size)
    verdict = group_stacks(stacks, layout, world_size=world_size)
    if len(verdict.groups) < 2:
        return None
    suspects = set(verdict.suspects)
    nodes = {hung.node for hung in replica.hangs if hung.rank in suspects}
    return to_event(verdict, at=at, replica=replica.replica, attempt=replica.attempt, nodes=nodes)
