"""Numbers that are damaged or spike on one rank of a real DDP run: who is named, and what the run does."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tests.runs.conftest import Runs, WatchedRun

from holdfast.events import (
    CheckpointCommitted,
    FaultAction,
    FaultInjected,
    FaultTarget,
    FindingRaised,
    NodeChecked,
    NodeProbed,
    NumericFault,
    NumericFaultObserved,
    Outcome,
    RankExited,
    RecoveryDecided,
)

WATCHED_LOOP = Path(__file__).parents[2] / "bench" / "programs" / "watched_loop.py"
SAVE_EVERY = 5


def _train(runs: Runs, steps: int) -> WatchedRun:
    command = (sys.executable, str(WATCHED_LOOP), str(steps), "0.02")
    return runs.start(*command, overrides=(f"checkpoint.every_steps={SAVE_EVERY}",))


def test_damaged_weights_stop_every_rank_in_that_step_and_the_second_time_the_run_goes_back_further(runs: Runs) -> None:
    watched = _train(runs, 80)
    watched.drill(FaultTarget.GRADIENT, 1, FaultAction.NAN, at_step=12)
    watched.drill(FaultTarget.LOSS, 0, FaultAction.NAN, at_step=42)
    assert watched.wait_for_end().outcome is Outcome.SUCCEEDED
    first, second = watched.all(NumericFaultObserved)
    assert (first.rank, first.parameter_group, first.damaged) == (1, "1 (1.bias)", True)
    assert (second.rank, second.quantity, second.damaged) == (0, "loss", True)
    for fault in (first, second):
        last_steps = {end.last_step for end in watched.all(RankExited) if end.attempt == fault.attempt}
        assert last_steps <= {fault.step, fault.step - 1}
    decided = watched.all(RecoveryDecided)
    assert [(each.finding.code, each.first_failed_rank) for each in decided] == [
        ("weights-not-finite", 1),
        ("weights-not-finite", 0),
    ]
    assert [each.action for each in decided] == ["check the nodes and restart", "restart from an earlier checkpoint"]
    assert f"after step {first.step}: its gradient of parameter group 1 (1.bias) is not finite" in str(decided[0])
    at = watched.seen.index
    checks = [*watched.all(NodeChecked), *watched.all(NodeProbed)]
    assert len(checks) == 4
    assert all(at(decided[0]) < at(check) < at(decided[1]) for check in checks)
    # A checkpoint may be complete although its rank ended before it could report it.
    reported = [
        max(each.step for each in watched.all(CheckpointCommitted) if at(each) < at(decision)) for decision in decided
    ]
    assert _resumed_after(watched, 1) in (reported[0], reported[0] + SAVE_EVERY)
    (aside,) = watched.folder.checkpoints.glob("*.diverged")
    newest = int(aside.stem.removeprefix("step-"))
    assert newest in (reported[1], reported[1] + SAVE_EVERY)
    assert _resumed_after(watched, 2) == newest - SAVE_EVERY


def _resumed_after(watched: WatchedRun, attempt: int) -> int:
    """The step after which an attempt resumed."""
    found = re.search(r"resumed after step (\d+) from", watched.log(0, attempt=attempt))
    assert found is not None
    return int(found[1])


def test_spike_of_one_rank_is_reported_once_and_stops_nothing(runs: Runs) -> None:
    watched = _train(runs, 60)
    watched.drill(FaultTarget.LOSS, 1, FaultAction.SPIKE, at_step=30, amount=1000.0)
    assert watched.wait_for_end().outcome is Outcome.SUCCEEDED
    assert watched.all(FaultInjected)
    seen = [event for event in watched.all(NumericFaultObserved) if event.quantity == "loss"]
    assert [(event.rank, event.fault, event.damaged) for event in seen] == [(1, NumericFault.SPIKE, False)]
    found = [event.finding for event in watched.all(FindingRaised) if event.finding.code == "loss-spike"]
    assert [finding.where for finding in found] == ["rank 1"]
    assert not watched.all(RecoveryDecided)
