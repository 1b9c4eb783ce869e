"""A node limited to `resources.transfer_memory`: the kernel kills a rank at the limit; the run reports it, resumes."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.runs.conftest import Runs, WatchedRun

from holdfast.events import (
    AttemptStarted,
    FaultAction,
    FaultTarget,
    FindingRaised,
    Outcome,
    RecoveryDecided,
    StepCommitted,
)
from holdfast.host.cgroups import CgroupParent, cgroup_parent

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(not Path("/sys/fs/cgroup/memory").is_dir(), reason="needs a cgroup v1 memory controller"),
]


def groups(watched: WatchedRun) -> list[str]:
    where = cgroup_parent()
    assert isinstance(where, CgroupParent)
    return sorted(path.name for path in where.path.glob(f"holdfast-{watched.folder.run_id}-*"))


def test_rank_that_takes_more_than_its_node_has_is_ended_and_told(runs: Runs) -> None:
    watched = runs.steps(40, fault="allocate@1@12@0", overrides=("resources.memory=300MiB",))
    decided = watched.wait_for(RecoveryDecided)
    assert groups(watched) == [f"holdfast-{watched.folder.run_id}-{node}.0" for node in (0, 1)]
    assert watched.wait_for_end().outcome is Outcome.SUCCEEDED
    assert decided.finding.code == "rank-out-of-memory"
    assert decided.finding.what.startswith("rank 1 on node1 ")
    assert [event.attempt for event in watched.all(AttemptStarted)] == [0, 1]
    assert groups(watched) == []


def test_drilled_memory_is_told_before_a_rank_is_ended_and_the_run_continues(runs: Runs) -> None:
    watched = runs.steps(100_000, 0.02, overrides=("resources.memory=300MiB",))
    watched.wait_for(StepCommitted)
    watched.drill(FaultTarget.NODE, 1, FaultAction.OOM)
    short = watched.wait_for(FindingRaised).finding
    assert (short.code, short.where) == ("memory-pressure", "node1")
    decided = watched.wait_for(RecoveryDecided)
    assert (decided.finding.code, decided.first_failed_rank) == ("rank-out-of-memory", 1)
    step = watched.steps()[-1]
    watched.wait_for(StepCommitted, lambda event: event.step > step)
    assert [event.attempt for event in watched.all(AttemptStarted)] == [0, 1]
