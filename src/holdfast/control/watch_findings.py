"""Findings about running ranks that are slow, or wait."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.diagnose.stack_groups import describe_origin, describe_stacks
from holdfast.events import StacksCompared
from holdfast.findings import Finding, Owner, Severity, replica_suffix
from holdfast.job.parallel_layout import format_spans
from holdfast.protocol.phase_times import Phase
from holdfast.watch.data_stalls import DataStall
from holdfast.watch.slow_runs import SlowRun
from holdfast.watch.stragglers import Straggler

MAX_CANDIDATES = 5
"""Other findings of the same time that are quoted."""

_REMEDIES = {
    Phase.DATA: "Look at what that node reads: its disk, its network path to the data, its DataLoader workers.",
    Phase.FORWARD: "Compare clocks, temperature and power limit of its device with others, and its samples' lengths.",
    Phase.BACKWARD: "Compare clocks, temperature and power limit of its device with others, and its samples' lengths.",
    Phase.OPTIMIZER: "Compare clocks, temperature and power limit of its device with others.",
    Phase.COMMUNICATION: "Look at that node's network: link speed, errors, retransmits, another job on its adapter.",
    Phase.HOST: "Look at what that rank does alone between steps, such as logging, and at the load of its node's CPUs.",
}
_DEVICE_PHASES = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.COMMUNICATION)


def straggler_finding(one: Straggler, node: int, replica: int, *, others: Sequence[Straggler] = ()) -> Finding:
    """A rank that others wait for; `others` are slow ranks of the same node."""
    more = ", ".join(str(each.rank) for each in others)
    waits = one.phase is Phase.DATA
    why = f"because it waits for samples{_from(one.loader)}" if waits else f"in phase `{one.phase}`"
    return Finding(
        code="data-stall" if waits else "straggler",
        severity=Severity.WARNING,
        what=f"the other ranks wait for rank {one.rank}{replica_suffix(replica)} on node{node}: it takes "
        f"{one.slowdown - 1:.0%} longer, {why}",
        where=f"rank {one.rank}{replica_suffix(replica)} on node{node}",
        evidence=(
            f"steps {one.first_step} to {one.last_step}: {one.lost_s * 1e3:.1f} ms more in `{one.phase}` than the "
            f"others' median",
            f"the others' own time is {one.others_s * 1e3:.1f} ms per step",
            *([f"also slow on this node: ranks {more}"] if more else []),
        ),
        remedy=_REMEDIES[one.phase],
        owner=Owner.CLUSTER if one.phase in _DEVICE_PHASES else Owner.USER,
    )


def data_stall_finding(one: DataStall, node: int, replica: int) -> Finding:
    """Ranks that wait for samples."""
    who, loader = f"rank {one.rank}{replica_suffix(replica)} on node{node}", _from(one.loader)
    what = (
        f"{who} waited {one.wait_s:.1f} s for samples{loader}, while it usually waits a tenth of that or less"
        if one.is_single
        else f"{who} waits for samples{loader} in {one.wait_s / one.step_s:.0%} of each step"
    )
    several = f"{one.ranks} ranks wait so" if one.ranks > 1 else "no other rank waits so"
    return Finding(
        code="data-stall",
        severity=Severity.WARNING,
        what=what,
        where=who,
        evidence=(f"steps {one.first_step} to {one.last_step}, of {one.step_s:.3f} s", several),
        remedy="If all ranks wait: more or faster DataLoader workers, fewer bytes per sample, data on a nearer disk. "
        "If one does: look at its node's disk, network and CPUs.",
    )


def _from(loader: str) -> str:
    return f" from `{loader}`" if loader else ""


def run_slow_finding(slow: SlowRun, replica: int, notes: Sequence[Finding]) -> Finding:
    """A replica that has become slower, with candidates for the cause."""
    grown = [f"`{part}` takes {seconds * 1e3:.1f} ms more per step" for part, seconds in slow.lost.items()]
    if not grown:
        grown = ["no part of a step that is measured explains it"]
    quoted = dict.fromkeys(f"meanwhile: {each.code}: {each.what}" for each in notes)
    return Finding(
        code="run-slow",
        severity=Severity.WARNING,
        what=f"steps{replica_suffix(replica)} take {slow.step_s / slow.best_s - 1:.0%} longer than in the run's best "
        f"time: {slow.step_s:.3f} s instead of {slow.best_s:.3f} s",
        where=f"steps {slow.first_step} to {slow.last_step}",
        evidence=(*grown, *[*quoted][:MAX_CANDIDATES]),
        remedy="Begin with the part that has grown most. If communication has and no straggler is named, look at the "
        "network; if forward and backward have, on all ranks alike, at clocks and throttling, or longer samples.",
    )


def waited_for_finding(compared: StacksCompared) -> Finding:
    """Ranks for which the others wait in most dumps of a slow run."""
    (what,) = describe_origin(compared)
    ranks, nodes = format_spans(compared.suspects), format_spans(compared.nodes)
    return Finding(
        code="rank-waited-for",
        severity=Severity.WARNING,
        what=what,
        where=f"rank {ranks}{replica_suffix(compared.replica)} on node{nodes}",
        evidence=describe_stacks(compared)[:-1],
        remedy="Its frames show what it does while the others wait. If that is a wait for its device, look at the "
        "device, and at the node's network.",
    )
