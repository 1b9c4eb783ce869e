"""Ranks that are slow, wait for samples or leak memory are named in real runs of DDP over Gloo, and acted on."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.runs.conftest import Runs, WatchedRun

from holdfast import api
from holdfast.events import (
    FaultAction,
    FaultTarget,
    FindingRaised,
    RecoveryDecided,
    StepCommitted,
    StepTimesCompared,
    StragglerObserved,
)
from holdfast.host.cgroups import CgroupParent, cgroup_parent
from holdfast.protocol.phase_times import Phase

WATCHED_LOOP = Path(__file__).parents[2] / "bench" / "programs" / "watched_loop.py"
STEP_S = 0.1
AT_STEP = 45


def started(runs: Runs, *overrides: str, steps: int = 4000, nodes: int = 2) -> WatchedRun:
    command = (sys.executable, str(WATCHED_LOOP), str(steps), str(STEP_S))
    watched = runs.start(*command, nodes=nodes, overrides=overrides)
    watched.wait_for(StepCommitted, lambda event: event.step >= AT_STEP - 5)
    return watched


def ended(watched: WatchedRun) -> None:
    api.cancel(watched.folder, force=True)
    watched.wait_for_end()


@pytest.mark.slow
def test_rank_that_is_slow_in_a_phase_is_named_with_it(runs: Runs) -> None:
    watched, at_step = started(runs), AT_STEP
    for number, phase in enumerate(Phase):
        rank = (number + 1) % 2
        watched.drill(FaultTarget(phase.value), rank, FaultAction.SLOW, at_step, amount=2.5, for_s=8.0)
        found = watched.wait_for(StragglerObserved)
        assert (found.rank, found.node, found.phase) == (rank, rank, phase.value)
        assert 1.08 < found.slowdown < 4.0
        at_step = found.last_step + 60
    ended(watched)
    assert len(watched.all(StragglerObserved)) == len(Phase)
    assert watched.all(RecoveryDecided) == []
    compared = [each for each in watched.all(StepTimesCompared) if each.ranks == 2]
    slow = {(each.slowest[0].rank, each.slowest[0].phase) for each in compared if each.lag_of(each.slowest[0]) > 0.1}
    assert slow & {(rank, phase.value) for phase, rank in zip(Phase, (1, 0) * 3, strict=True)}


@pytest.mark.slow
def test_rank_that_waits_for_samples_and_one_that_leaks_are_named_before_memory_runs_out(runs: Runs) -> None:
    if not isinstance(reason := cgroup_parent(), CgroupParent):
        pytest.skip(str(reason))
    watched = started(runs, "resources.memory=1GiB")
    watched.drill(FaultTarget.RANK, 0, FaultAction.DATA_STALL, AT_STEP, amount=0.2, for_s=8.0)
    found = watched.wait_for(FindingRaised, lambda event: event.finding.code == "data-stall")
    assert found.finding.where == "rank 0 on node0"
    assert "`batches`" in found.finding.what
    # It takes half a minute, in which eight parts of one window have to grow, on a busy machine too.
    watched.drill(FaultTarget.RANK, 1, FaultAction.LEAK, amount=1.5)
    found = watched.wait_for(FindingRaised, lambda event: event.finding.code == "memory-growing")
    assert found.finding.where == "rank 1 on node1"
    decided = watched.wait_for(RecoveryDecided)
    assert decided.finding.code == "rank-out-of-memory"
    ended(watched)
    assert len([each for each in watched.all(FindingRaised) if each.finding.code == "memory-growing"]) == 1


@pytest.mark.slow
def test_rank_for_which_others_wait_is_named_in_most_dumps_of_the_controller_and_of_a_user(runs: Runs) -> None:
    watched = started(runs, "recovery.step_timeout_s=120", nodes=4)
    # The others wait 97 % of the time, less on a busy machine; of four ranks, three dumps of five have to show it.
    watched.drill(FaultTarget.HOST, 1, FaultAction.SLOW, AT_STEP, amount=40.0)
    found = watched.wait_for(FindingRaised, lambda event: event.finding.code == "rank-waited-for")
    assert found.finding.where == "rank 1 on node1"
    answer = api.diagnose_running_ranks(watched.folder)
    shown = [each.text for each in answer.evidence]
    assert any("dumps the others wait for rank 1 on node 1" in line for line in shown), shown
    ended(watched)
