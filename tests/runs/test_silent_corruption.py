"""A rank with a flipped bit is found in a real run, its node replaced, and the state of before it resumed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.runs.conftest import Runs

from holdfast.events import (
    CorruptionObserved,
    FaultAction,
    FaultTarget,
    NodeRequested,
    Outcome,
    RecoveryDecided,
    StepCommitted,
)

LOOP = Path(__file__).parents[2] / "bench" / "programs" / "watched_loop.py"
STEPS, EVERY = 60, 10
AT_STEP = 14


@pytest.mark.slow
@pytest.mark.parametrize("target", [FaultTarget.OPTIMIZER, FaultTarget.GRADIENT])
def test_node_of_a_wrong_rank_is_replaced_and_the_run_resumes_from_what_all_ranks_agreed_on(
    runs: Runs, target: FaultTarget
) -> None:
    overrides = (
        f"recovery.verify_every_steps={EVERY}",
        "checkpoint.every_steps=4",
        f"checkpoint.path={runs.base / 'checkpoints'}",
    )
    watched = runs.start(sys.executable, str(LOOP), str(STEPS), "0.02", nodes=3, overrides=overrides)
    watched.wait_for(StepCommitted)
    watched.drill(target, 1, FaultAction.BITFLIP, at_step=AT_STEP)
    seen = watched.wait_for(CorruptionObserved)
    ended = watched.wait_for_end()
    assert ended.outcome is Outcome.SUCCEEDED
    assert (seen.rank, seen.node, seen.certain) == (1, 1, True)
    assert seen.step > AT_STEP
    (decided,) = watched.all(RecoveryDecided)
    assert (decided.finding.code, decided.action) == ("silent-corruption", "replace the node and restart")
    assert [(each.node, each.generation) for each in watched.all(NodeRequested) if each.generation] == [(1, 1)]
    resumed = min(each.step - each.steps for each in watched.all(StepCommitted) if each.attempt == 1)
    assert resumed == seen.agreed_step // 4 * 4
    assert max(watched.steps()) == STEPS
