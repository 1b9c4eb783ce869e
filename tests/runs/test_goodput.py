"""The time that a run accounts for is the time that an outside count from raw steps finds."""

from __future__ import annotations

import pytest
from tests.runs.conftest import Runs, WatchedRun

from holdfast.events import AgentDisconnected, FaultAction, FaultTarget, RunCreated, StepCommitted
from holdfast.report.status_reducer import status_from_events

STEPS = 60


def ettr_from_outside(watched: WatchedRun, total_s: float) -> float:
    """Each step counted once, from the ranks' own files: in the first attempt that finished and reported it.

    What the ranks of a lost node finish last is not reported; the next attempt repeats it, or has it in a checkpoint.
    """
    events = watched.all(StepCommitted)
    reported = {(event.attempt, step) for event in events for step in range(event.first, event.step + 1)}
    by_rank = []
    for rank in (0, 1):
        lines = (watched.folder.checkpoints / f"steps-{rank}.txt").read_text().splitlines()
        by_rank.append({(int(a), int(s)): (float(t0), float(t1)) for a, s, t0, t1 in map(str.split, lines)})
    best: dict[int, float] = {}
    for attempt, step in sorted(by_rank[0].keys() & by_rank[1].keys() & reported):
        spans = [by_rank[rank][attempt, step] for rank in (0, 1)]
        best.setdefault(step, max(end for _, end in spans) - max(start for start, _ in spans))
    assert [*best] == [*range(1, STEPS + 1)] or watched.all(AgentDisconnected)[0].at < events[-1].at
    return sum(best.values()) / total_s


@pytest.mark.parametrize("target", [None, FaultTarget.RANK, FaultTarget.NODE])
def test_ettr_equals_an_outside_count(runs: Runs, target: FaultTarget | None) -> None:
    watched = runs.steps(STEPS, 0.03)
    if target is not None:
        watched.drill(target, 1, FaultAction.KILL, at_step=33)
    ended = watched.wait_for_end()
    total_s = ended.at - watched.all(RunCreated)[0].at
    accounts = status_from_events(watched.seen).account()
    assert accounts.total_s == pytest.approx(total_s)
    assert accounts.ettr == pytest.approx(ettr_from_outside(watched, total_s), abs=0.02)
