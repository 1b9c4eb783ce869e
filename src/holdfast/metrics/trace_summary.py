"""Summarises the traces of several ranks: what takes the time, and how much faster a step would be without it.

A step ends on all ranks together, so it takes as long as the slowest rank's own work, and the transfers that every rank
waits for. Of a rank, *own work* is the step without exposed communication; the *transfers* are the least exposed
communication of any rank, which the slowest rank has. A step without some part would take the largest own
work that is left, plus the transfers. That is the most it could gain: work that is removed may expose other work.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from msgspec import Struct

from holdfast.metrics.profiler_events import ON_DEVICE, OPERATOR, ProfilerEvent, step_trace
from holdfast.metrics.rank_trace import RankTrace
from holdfast.metrics.step_breakdown import OVERLAPPED, StepPart, breakdown_metric, covered_s, step_breakdown

TOP = 5
"""Operators or kernels that are listed."""
_PEER_TO_PEER = re.compile(r"send|recv", re.IGNORECASE)
_WITHOUT = {
    "data wait": StepPart.DATA,
    "optimizer": StepPart.OPTIMIZER,
    "checkpoint": StepPart.CHECKPOINT,
}


class RankProfile(Struct, frozen=True, kw_only=True):
    """Where the time of one rank's steps went; seconds per step."""

    rank: int
    node: str
    step_s: float
    parts: Mapping[StepPart, float]
    overlapped_s: float
    """Communication during computation."""
    bubble_s: float
    """Exposed communication of sends and receives: a pipeline's bubbles."""
    idle_s: float | None
    """Time in which the device ran nothing; None without a device."""
    top: tuple[tuple[str, float], ...]
    """Kernels, or operators of the host without a device, and their own seconds."""

    @property
    def own_s(self) -> float:
        return self.step_s - self.parts[StepPart.COMMUNICATION]


class Gain(Struct, frozen=True, kw_only=True):
    """What a step would gain at most."""

    without: str
    spent_s: float
    """Mean over the ranks."""
    step_s: float
    """A step's time without it, at least."""

    def share_of(self, whole_s: float) -> float:
        """The share of a step that is gained."""
        return max(0.0, 1 - self.step_s / whole_s)


def rank_profile(trace: RankTrace) -> RankProfile:
    """The profile of one rank; raises ValueError if the trace has no step."""
    events = trace.events()
    steps = step_trace(events)
    count = len(steps.step_starts) - 1
    if count < 1:
        raise ValueError("no whole step is recorded")
    metrics = step_breakdown(steps)
    whole = steps.step_starts[0], steps.step_starts[-1]
    on_device = [event.span for event in events if event.activity in ON_DEVICE]
    step_s = (whole[1] - whole[0]) / count / 1e9
    peers = [event.span for event in events if event.is_communication and _PEER_TO_PEER.search(event.name)]
    computing = [span for _, span in steps.kernels] or list(steps.operators)
    return RankProfile(
        rank=trace.rank,
        node=trace.node,
        step_s=step_s,
        parts={part: metrics[breakdown_metric(part)] for part in StepPart},
        overlapped_s=metrics[breakdown_metric(OVERLAPPED)],
        bubble_s=(covered_s([*peers, *computing], within=whole) - covered_s(computing, within=whole)) / count,
        idle_s=step_s - covered_s(on_device, within=whole) / count if on_device else None,
        top=_top(events, steps=count, within=whole),
    )


def _top(events: Sequence[ProfilerEvent], *, steps: int, within: tuple[int, int]) -> tuple[tuple[str, float], ...]:
    inside = [event for event in events if within[0] <= event.begin < within[1]]
    kernels = Counter[str]()
    for event in inside:
        if event.activity in ON_DEVICE:
            kernels[event.name] += event.end - event.begin
    spent = kernels or _own_times(event for event in inside if event.activity == OPERATOR)
    return tuple((name, nanoseconds / steps / 1e9) for name, nanoseconds in spent.most_common(TOP))


def _own_times(operators: Iterable[ProfilerEvent]) -> Counter[str]:
    """Nanoseconds of each operator without those that it calls."""
    spent, threads = Counter[str](), defaultdict[int | str, list[ProfilerEvent]](list)
    for event in operators:
        threads[event.thread].append(event)
    for of_thread in threads.values():
        above: list[ProfilerEvent] = []
        for event in sorted(of_thread, key=lambda event: (event.begin, -event.end)):
            while above and above[-1].end <= event.begin:
                above.pop()
            spent[event.name] += event.end - event.begin
            if above:
                spent[above[-1].name] -= event.end - event.begin
            above.append(event)
    return spent


def gains(profiles: Sequence[RankProfile]) -> tuple[Gain, ...]:
    """What a step would gain without each part, the largest gain first; parts that take nothing are left out."""
    transfers_s = min(each.parts[StepPart.COMMUNICATION] for each in profiles)

    def without(name: str, part: Callable[[RankProfile], float]) -> Gain:
        left_s = max(each.own_s - part(each) for each in profiles) + transfers_s
        return Gain(without=name, spent_s=_mean(map(part, profiles)), step_s=left_s)

    slowest_s = max(each.own_s for each in profiles)
    waits_s = _mean(each.parts[StepPart.COMMUNICATION] - transfers_s for each in profiles)
    found = [
        *(without(name, lambda each, part=part: each.parts[part]) for name, part in _WITHOUT.items()),
        Gain(without="transfers" if len(profiles) > 1 else "communication", spent_s=transfers_s, step_s=slowest_s),
        Gain(
            without="waiting for the slowest rank",
            spent_s=waits_s,
            step_s=min(each.own_s for each in profiles) + transfers_s,
        ),
        without("device idle", lambda each: each.idle_s or 0.0),
        Gain(
            without="pipeline bubbles",
            spent_s=_mean(each.bubble_s for each in profiles),
            step_s=step_s(profiles) - max(each.bubble_s for each in profiles),
        ),
    ]
    known = [each for each in found if each.spent_s > 0.005 * step_s(profiles)]
    return tuple(sorted(known, key=lambda gain: (round(gain.step_s, 9), gain.without)))


def step_s(profiles: Sequence[RankProfile]) -> float:
    """Seconds of a step: the longest of the ranks, which end it together."""
    return max(each.step_s for each in profiles)


def summary_lines(traces: Sequence[RankTrace]) -> list[str]:
    """The summary of traces in words; raises ValueError if one has no step."""
    profiles = [rank_profile(trace) for trace in traces]
    whole_s = step_s(profiles)
    lines = [f"If it were gone, a step of {_seconds(whole_s)} would take at least:"]
    lines += [
        f"  {_seconds(gain.step_s)} ({gain.share_of(whole_s):.0%} less) without {gain.without}: "
        f"{_seconds(gain.spent_s)} on average"
        for gain in gains(profiles)
    ]
    for each in profiles:
        exposed_s = each.parts[StepPart.COMMUNICATION]
        idle = "" if each.idle_s is None else f", device idle {_seconds(each.idle_s)}"
        lines.append(
            f"rank {each.rank} on {each.node}: own work {_seconds(each.own_s)}, exposed communication "
            f"{_seconds(exposed_s)}, overlapped {_seconds(each.overlapped_s)}{idle}"
        )
        lines += [f"  {_seconds(spent_s)} {name[:100]}" for name, spent_s in each.top]
    return lines


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"


def _mean(values: Iterable[float]) -> float:
    known = list(values)
    return sum(known) / len(known)
