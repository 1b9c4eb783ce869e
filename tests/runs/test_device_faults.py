"""A node that fails is replaced in a real run: at the first fault of hardware, else at the second failure."""

from __future__ import annotations

import os
import signal

import pytest
from tests.runs.conftest import Runs, WatchedRun

from holdfast import api
from holdfast.events import (
    ExitReason,
    FaultAction,
    FaultTarget,
    NodeRequested,
    RankExited,
    RanksStarted,
    RecoveryDecided,
    StepCommitted,
)

IN_PLACE, REPLACED = "restart in place", "replace the node and restart"


@pytest.mark.slow
def test_node_is_replaced_at_once_for_a_lost_gpu_and_the_second_time_for_a_lost_link_or_a_signal(runs: Runs) -> None:
    watched = runs.steps(4000)
    _drill(watched, FaultTarget.GPU, attempt=0)
    (ended,) = (event for event in watched.all(RankExited) if event.failed and event.rank == 1)
    assert (ended.reason, ended.code) == (ExitReason.SIGNAL, 6)
    assert "GPU is lost" in ended.evidence
    for attempt in (1, 2):
        _drill(watched, FaultTarget.NIC, attempt=attempt)
    for attempt in (3, 4):
        (started,) = (each for each in watched.all(RanksStarted) if (each.node, each.attempt) == (1, attempt))
        os.kill(started.ranks[0].pid, signal.SIGBUS)
        watched.wait_for(StepCommitted, lambda event, next_attempt=attempt + 1: event.attempt == next_attempt)
    api.cancel(watched.folder)
    watched.wait_for_end()
    verdicts = [(event.finding.code, event.action) for event in watched.all(RecoveryDecided)]
    assert verdicts == [
        ("gpu-failed", REPLACED),
        ("nic-link-down", IN_PLACE),
        ("nic-link-down", REPLACED),
        ("rank-killed", IN_PLACE),
        ("rank-killed", REPLACED),
    ]
    asked = [(event.node, event.generation) for event in watched.all(NodeRequested) if event.generation]
    assert asked == [(1, 1), (1, 2), (1, 3)]
    codes = watched.codes()
    assert codes.count("machine-not-avoided") == 2
    steps = set(watched.steps())
    assert steps == set(range(1, len(steps) + 1))


def _drill(watched: WatchedRun, target: FaultTarget, *, attempt: int) -> None:
    """Fail the device of rank 1 in this attempt, once it has made a step, and wait for a step of the next."""
    watched.wait_for(StepCommitted, lambda event: event.attempt == attempt)
    watched.drill(target, 1, FaultAction.FAIL)
    watched.wait_for(StepCommitted, lambda event: event.attempt == attempt + 1)
