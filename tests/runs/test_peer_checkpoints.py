"""A node and the storage are lost, and the ranks resume bit-exact from another node's memory."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.runs.conftest import NCCL_LIKE, Runs, WatchedRun

from holdfast import api
from holdfast.events import AttemptStarted, FaultAction, FaultTarget, FindingRaised, StepCommitted

pytestmark = pytest.mark.slow

UPDATE_TRAINER = Path(__file__).parents[1] / "programs" / "update_trainer.py"

Start = Callable[..., WatchedRun]


@pytest.fixture
def start(runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Starts the program, which writes to OUT/NAME."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def started(name: str, steps: int, step_s: float, *words: str, overrides: tuple[str, ...] = ()) -> WatchedRun:
        out = tmp_path / name
        out.mkdir()
        return runs.start(
            sys.executable, str(UPDATE_TRAINER), str(out), str(steps), str(step_s), *words, overrides=overrides
        )

    return started


def losses(out: Path, rank: int) -> dict[int, set[str]]:
    """By step, all that a rank had for it."""
    found: dict[int, set[str]] = {}
    for line in (out / f"rank-{rank}").read_text().splitlines():
        step, loss, *_ = line.split()
        found.setdefault(int(step), set()).add(loss)
    return found


def unplug(store: Path) -> None:
    """Nothing is there any more, and nothing can be put there."""
    store.rename(store.with_suffix(".away"))
    store.write_text("")


@pytest.mark.parametrize("group", [(), (NCCL_LIKE,)], ids=["gloo", "nccl-like"])
def test_lost_node_with_storage_unplugged_costs_the_steps_since_the_last_copy(
    start: Start, tmp_path: Path, group: tuple[str, ...]
) -> None:
    """Each of a node's two ranks has its own shard, which the other node's ranks have as well.

    The ranks that remain block for ever, as with NCCL; on Gloo they end with an error.
    """
    store = tmp_path / "store"
    told = (
        *group,
        "ranks_per_node=2",
        f"checkpoint={store}",
        "checkpoint.every_steps=4",
        "recovery.peer_checkpoints=1",
    )
    watched = start("broken", 100_000, 0.05, "hsdp", overrides=told)
    watched.wait_for(StepCommitted, lambda event: event.step >= 10)
    unplug(store)
    seen = watched.wait_for(StepCommitted).step
    watched.drill(FaultTarget.NODE, 1, FaultAction.KILL)
    assert watched.wait_for(AttemptStarted).attempt == 1
    recalled = watched.wait_for(FindingRaised, lambda event: event.finding.code == "state-restored-from-peers").finding
    assert recalled.evidence == ("rank 2: from rank 0's node", "rank 3: from rank 1's node")
    again = watched.wait_for(StepCommitted, lambda event: event.attempt == 1)
    assert again.step - again.steps + 1 >= seen
    watched.wait_for(StepCommitted, lambda event: event.step >= again.step + 5)
    api.cancel(watched.folder, force=True)
    watched.wait_for_end()
    broken = [losses(tmp_path / "broken", rank) for rank in range(4)]
    start("whole", min(max(each) for each in broken), 0.0, "hsdp", overrides=("ranks_per_node=2",)).wait_for_end()
    for rank in range(4):
        whole = losses(tmp_path / "whole", rank)
        assert {step: broken[rank][step] for step in whole} == whole
