"""TorchTitan's trainer in real runs: killed, over replicas, with what it brings itself."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from tests.runs.conftest import Runs, WatchedRun
from tests.runs.forked_starts import ForkedStarts

from holdfast import api
from holdfast.events import (
    AttemptStarted,
    CheckpointCommitted,
    FaultAction,
    FaultTarget,
    Outcome,
    RanksStarted,
    StepCommitted,
)
from holdfast.train.checkpoint import safe_state

EXAMPLE = Path(__file__).parents[2] / "examples" / "torchtitan"
STEPS, EVERY, DIES = 8, 3, 6
SMALL = (
    *("--metrics.log-freq", "2", "--training.seq-len", "64", "--training.local-batch-size", "2"),
    *("--training.steps", str(STEPS), "--lr-scheduler.warmup-steps", "2"),
)


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory, forked_starts: ForkedStarts) -> Path:
    """A tokenizer and text, made by the first run."""
    folder = tmp_path_factory.mktemp("torchtitan") / "assets"
    forked_starts.preload("torchtitan.train", environ=hub(folder))
    return folder


def hub(assets: Path) -> dict[str, str]:
    """Variables that are read when the trainer is imported."""
    return {"HF_HOME": str(assets.parent / "hub"), "HF_HUB_OFFLINE": "1"}


def start(runs: Runs, assets: Path, out: Path, *arguments: str, overrides: tuple[str, ...] = ()) -> WatchedRun:
    env = {"ASSETS": str(assets), "OMP_NUM_THREADS": "1", **hub(assets)}
    command = (sys.executable, "-m", "torchtitan.train", "--module", "small_llama", "--config", "small_llama")
    return runs.start(
        *(*command, *SMALL, "--dump-folder", str(out), *arguments),
        overrides=(f"workdir={EXAMPLE}", *(f"env.{name}={value}" for name, value in env.items()), *overrides),
    )


def committed(watched: WatchedRun, attempt: int) -> list[int]:
    events = [event for event in watched.all(StepCommitted) if event.attempt == attempt]
    return [step for event in events for step in range(event.first, event.step + 1)]


def test_run_that_is_killed_ends_bit_exact_with_one_that_is_not_which_validates_and_exports(
    runs: Runs, assets: Path, tmp_path: Path
) -> None:
    own = (
        "--checkpoint.enable",
        "--checkpoint.interval",
        "1000",
        "--checkpoint.last-save-model-only",
        "--checkpoint.last-save-in-hf",
    )
    checks = ("--validator.enable", "--validator.freq", "4", "--validator.steps", "1")
    saves = (f"checkpoint.every_steps={EVERY}",)
    unfailed = start(runs, assets, tmp_path / "one", *own, *checks, overrides=saves)
    killed = start(runs, assets, tmp_path / "other", *checks, overrides=saves)
    killed.drill(FaultTarget.RANK, 1, FaultAction.KILL, at_step=DIES)
    assert [each.wait_for_end().outcome for each in (unfailed, killed)] == [Outcome.SUCCEEDED] * 2

    assert [event.attempt for event in killed.all(AttemptStarted)] == [0, 1]
    resumed = committed(killed, 1)
    assert resumed == [*range(resumed[0], STEPS + 1)]
    assert resumed[0] in {1, EVERY + 1}
    assert [event.step for event in unfailed.all(CheckpointCommitted)] == [3, 6, 8]
    for name in ("__0_0.distcp", "__1_0.distcp"):  # model and optimizer
        assert (last(killed) / name).read_bytes() == (last(unfailed) / name).read_bytes()
    for rank in range(2):
        one, other = (safe_state.load(last(run) / f"rank-{rank:05}.pt") for run in (killed, unfailed))
        assert torch.equal(one["random"]["torch"], other["random"]["torch"])
        assert (one["scheduler"], one["state"]["tokens"]) == (other["scheduler"], other["state"]["tokens"])

    assert list((tmp_path / "one" / "checkpoint" / f"step-{STEPS}").glob("*.safetensors"))
    reported = {event.step: event.metrics for event in unfailed.all(StepCommitted)}
    assert all(0 < metrics["loss"] < 10 and metrics["tokens"] == 2 * 2 * 64 for metrics in reported.values())
    assert {"grad_norm", "mfu(%)", "throughput(tps)", "n_tokens_seen"} <= reported[4].keys()
    assert "validation_metrics/loss" in reported[5]  # of step 4


def last(watched: WatchedRun) -> Path:
    """The checkpoint of the last step."""
    return watched.folder.checkpoints / f"step-{STEPS:08}"


def test_replica_that_is_killed_rejoins_one_that_went_on_with_all_samples(
    runs: Runs, assets: Path, tmp_path: Path
) -> None:
    watched = start(
        runs,
        assets,
        tmp_path / "out",
        *("--training.steps", "10000"),
        overrides=("recovery={replicas: 2, min_replicas: 1, verify_every_steps: 2}",),
    )
    watched.wait_for(StepCommitted, lambda event: event.step >= 3)
    watched.drill(FaultTarget.RANK, 1, FaultAction.KILL)
    restarted = watched.wait_for(RanksStarted, lambda event: (event.replica, event.attempt) == (1, 1))
    os.kill(restarted.ranks[0].pid, signal.SIGSTOP)  # it is prewarmed, and a step may take longer than to join
    try:
        watched.wait_for(StepCommitted, lambda event: event.replica == 0 and event.metrics["replicas"] == 1)
    finally:
        os.kill(restarted.ranks[0].pid, signal.SIGCONT)
    joined = watched.wait_for(StepCommitted, lambda event: (event.replica, event.attempt) == (1, 1))
    watched.wait_for(StepCommitted, lambda event: event.step >= joined.step + 3)
    api.cancel(watched.folder)
    assert watched.wait_for_end().outcome is Outcome.CANCELLED

    survivor = [event for event in watched.all(StepCommitted) if event.replica == 0]
    assert {event.attempt for event in survivor} == {0}
    assert {event.metrics["tokens"] for event in survivor} == {4 * 64}
    assert {event.metrics["replicas"] for event in survivor} == {1, 2}
    steps = [step for event in survivor for step in range(event.first, event.step + 1)]
    assert steps == [*range(1, steps[-1] + 1)]
    assert [code for code in watched.codes() if "differ" in code or "diverge" in code] == []


def test_diloco_of_torchtitans_settings_synchronises_replicas_every_few_steps(
    runs: Runs, assets: Path, tmp_path: Path
) -> None:
    method = ("--fault-tolerance.semi-sync-method", "diloco", "--fault-tolerance.sync-steps", "3")
    watched = start(
        runs,
        assets,
        tmp_path / "out",
        *(*method, "--training.steps", "6", "--metrics.log-freq", "1"),
        overrides=("recovery={replicas: 2, min_replicas: 2}",),
    )
    assert watched.wait_for_end().outcome is Outcome.SUCCEEDED
    norms = {
        (event.replica, event.step): event.metrics["grad_norm"]
        for event in watched.all(StepCommitted)
        if "grad_norm" in event.metrics
    }
    print(norms, watched.codes())
    assert all(norms[0, step] != norms[1, step] for step in range(1, 7))
