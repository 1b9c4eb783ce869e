"""What a real job's committed steps took of its data, after a rank was killed, a node was lost and came back."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from tests.runs.conftest import Runs, WatchedRun

from holdfast import api
from holdfast.events import AttemptStarted, CheckpointCommitted, FaultAction, FaultTarget, StepCommitted

DATA_READER = Path(__file__).parents[1] / "programs" / "data_reader.py"
TORCH_S = 150.0
"""Longest that a few ranks with torch take to their first step on a busy machine."""
LENGTH, BATCH = 101, 3
"""No whole number of steps is an epoch, with one rank or two."""


def trained(watched: WatchedRun, attempt: int) -> None:
    """Wait until an attempt has resumed from its checkpoint and taken a new one."""
    kept = watched.wait_for(CheckpointCommitted, lambda event: event.attempt == attempt, TORCH_S)
    watched.wait_for(StepCommitted, lambda event: event.step > kept.step + 1, TORCH_S)


def items(watched: WatchedRun) -> list[list[int]]:
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
    command = (sys.executable, str(DATA_READER), kind, str(LENGTH), str(BATCH), "0.01")
    overrides = ("nodes=1..2", "checkpoint.every_steps=7", "recovery.global_batch=scale", "nodes.min_nodes_wait_s=0.5")
    watched = runs.start(*command, overrides=overrides)
    watched.drill(FaultTarget.RANK, 1, FaultAction.KILL, 10)
    trained(watched, attempt=1)
    watched.drill(FaultTarget.NODE, 0, FaultAction.REMOVE)
    trained(watched, attempt=2)
    watched.drill(FaultTarget.NODE, 0, FaultAction.RESTORE)
    trained(watched, attempt=3)
    api.cancel(watched.folder)
    watched.wait_for_end(TORCH_S)

    assert [event.world_size for event in watched.all(AttemptStarted)] == [2, 2, 1, 2]
    steps = items(watched)
    assert {len(step) for step in steps} == {BATCH, 2 * BATCH}
    taken = [item for step in steps for item in sorted(step)]
    epochs, rest = divmod(len(taken), LENGTH)
    counts = Counter(taken)
    assert epochs >= 1
    assert set(counts) == set(range(LENGTH))
    assert sorted(counts.values()) == [epochs] * (LENGTH - rest) + [epochs + 1] * rest
