"""What a real job's committed steps took of its data, after a rank was killed, a node was lost and came back."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from tests.runs.conftest import Runs, Watched

from holdfast import api
from holdfast.events import AttemptStarted, CheckpointCommitted, DrillAction, DrillTarget, StepCommitted

READER = Path(__file__).parents[1] / "programs" / "reader.py"
TORCH_S = 150.0
"""Longest that a few ranks with torch take to their first step on a busy machine."""
LENGTH, BATCH = 101, 3
"""No whole number of steps is an epoch, with one rank or two."""


def trained(watched: Watched, attempt: int) -> None:
    """Wait until an attempt has gone on from its checkpoint and taken one of its own."""
    kept = watched.until(CheckpointCommitted, lambda event: event.attempt == attempt, TORCH_S)
    watched.until(StepCommitted, lambda event: event.step > kept.step + 1, TORCH_S)


def items(watched: Watched) -> list[list[int]]:
    """What each committed step took: the last attempt at it is the one whose work was kept."""
    taken: defaultdict[int, defaultdict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for file in watched.folder.checkpoints.glob("items-*.txt"):
        attempt = int(file.stem.split("-")[1])
        for line in file.read_text().splitlines():
            step, *of_step = map(int, line.split())
            taken[step][attempt] += of_step
    assert sorted(taken) == list(range(1, len(taken) + 1))
    return [taken[step][max(taken[step])] for step in sorted(taken)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["numbered", "stream"])
def test_every_item_is_in_one_committed_step_an_epoch_whatever_died(runs: Runs, kind: str) -> None:
    command = (sys.executable, str(READER), kind, str(LENGTH), str(BATCH), "0.01")
    overrides = ("nodes=1..2", "checkpoint.every_steps=7", "recovery.global_batch=scale", "nodes.wait_s=0.5")
    watched = runs.start(*command, overrides=overrides)
    watched.drill(DrillTarget.RANK, 1, DrillAction.KILL, 10)
    trained(watched, attempt=1)
    watched.drill(DrillTarget.NODE, 0, DrillAction.LOSE)
    trained(watched, attempt=2)
    watched.drill(DrillTarget.NODE, 0, DrillAction.RETURN)
    trained(watched, attempt=3)
    api.cancel(watched.folder)
    watched.end(TORCH_S)

    assert [event.world_size for event in watched.all(AttemptStarted)] == [2, 2, 1, 2]
    steps = items(watched)
    assert {len(step) for step in steps} == {BATCH, 2 * BATCH}
    taken = [item for step in steps for item in sorted(step)]
    epochs, rest = divmod(len(taken), LENGTH)
    counts = Counter(taken)
    assert epochs >= 1
    assert set(counts) == set(range(LENGTH))
    assert sorted(counts.values()) == [epochs] * (LENGTH - rest) + [epochs + 1] * rest
