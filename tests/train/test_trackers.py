"""Trackers of experiments: real ones, on files; and some that misbehave."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from holdfast.errors import HoldfastError
from holdfast.findings import Finding
from holdfast.protocol.rank_messages import FindingReported, RankStep
from holdfast.train import RankConfig, Session
from holdfast.train.metrics import async_tracker, trackers
from holdfast.train.metrics.trackers import TrackedRun

LOOP = Path(__file__).with_name("loop.py")
PATIENT = (
    "import runpy, sys; from holdfast.train.metrics import async_tracker; async_tracker.CLOSE_S = 250.0; "
    "runpy.run_path(sys.argv.pop(1), run_name='__main__')"
)
"""Trackers take long to import on a busy machine."""


def train(folder: Path, steps: int, **variables: str) -> None:
    unset = {
        name: value for name, value in os.environ.items() if not name.startswith(("HOLDFAST_", "WANDB_", "MLFLOW_"))
    }
    told = {
        "HOLDFAST_CHECKPOINT_PATH": str(folder / "ckpt"),
        "HOLDFAST_CHECKPOINT_EVERY_STEPS": "4",
        "HOLDFAST_REPORT_TO": "tensorboard, wandb, mlflow",
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(folder),
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "MLFLOW_TRACKING_URI": (folder / "mlflow").as_uri(),
        "OMP_NUM_THREADS": "1",
    }
    argv = [sys.executable, "-c", PATIENT, str(LOOP), str(steps), str(folder / "weights")]
    subprocess.run(argv, env=unset | told | variables, cwd=folder, check=True, timeout=300)


@pytest.mark.slow
def test_run_with_a_restart_is_one_run_and_each_step_is_there_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(tmp_path, 6)
    shutil.rmtree(tmp_path / "ckpt" / "step-00000006")  # steps 5 and 6 are to be done again
    train(tmp_path, 10)
    name = (tmp_path / "ckpt" / "run.txt").read_text()  # that of the run, where holdfast has started it

    offline = [re.sub(r"offline-run-\d+_\d+-", "", path.name) for path in tmp_path.glob("wandb/offline-run-*")]
    assert offline == [name, name]

    (events,) = (tmp_path / "ckpt" / "tensorboard").iterdir()
    assert events.name == name
    shown = EventAccumulator(str(events), size_guidance={"scalars": 0}).Reload()
    assert [event.step for event in shown.Scalars("loss")] == list(range(1, 11))

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = MlflowClient(tracking_uri=(tmp_path / "mlflow").as_uri())
    (found,) = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    assert (found.info.run_name, found.info.status) == (name, "FINISHED")
    history = client.get_metric_history(found.info.run_id, "loss")
    assert Counter(one.step for one in history) == Counter(range(1, 11))


@pytest.mark.slow
def test_metric_that_mlflow_does_not_take_costs_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlflow").as_uri())
    tracker = trackers.MLflow()
    tracker.open(TrackedRun(run="a-run", resumed_step=0, folder=tmp_path))
    try:
        with pytest.raises(ValueError, match="takes no metric 'loss@last'"):
            tracker.log(1, {"loss@last": 1.0, "loss": 1.0})
        tracker.log(2, {"loss@last": 2.0, "loss": 2.0})
    finally:
        tracker.close()
    client = MlflowClient(tracking_uri=(tmp_path / "mlflow").as_uri())
    (run,) = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    assert [one.value for one in client.get_metric_history(run.info.run_id, "loss")] == [1.0, 2.0]


class RecordingTracker:
    """A tracker that behaves, and remembers."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.closed = False

    def open(self, tracked_run: TrackedRun) -> None:
        self.tracked_run = tracked_run

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.steps.append(step)

    def close(self) -> None:
        self.closed = True


class Absent(RecordingTracker):
    def open(self, tracked_run: TrackedRun) -> None:
        raise ModuleNotFoundError("No module named 'wandb'")


class Broken(RecordingTracker):
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        super().log(step, metrics)
        if step % 2:
            raise ConnectionError("it is down")


class Blocked(RecordingTracker):
    """Takes nothing before it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.let_go = threading.Event()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.let_go.wait()
        super().log(step, metrics)


def run_with(tracker: RecordingTracker, monkeypatch: pytest.MonkeyPatch, steps: int, **told: object) -> None:
    monkeypatch.setitem(trackers.TRACKERS, "wandb", lambda: tracker)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loop = Session(model=model, optimizer=optimizer, config=RankConfig(**told), report_to=["wandb"])
    for _ in loop.steps(steps):
        loop.commit(loss=1.0)


def test_tracker_has_every_step_when_the_loop_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = RecordingTracker()
    run_with(tracker, monkeypatch, 50, run="a-run", replica=1)
    assert tracker.steps == list(range(1, 51))
    assert tracker.closed
    assert (tracker.tracked_run.run, tracker.tracked_run.resumed_step) == ("a-run-replica1", 0)


@pytest.mark.parametrize(
    ("tracker", "told"), [(Absent(), "wandb cannot be reached"), (Broken(), "wandb did not take step 1, and perhaps")]
)
def test_tracker_that_fails_is_named_once_and_stops_no_step(
    agent, monkeypatch, capsys, tracker: RecordingTracker, told: str
) -> None:
    run_with(tracker, monkeypatch, 20, rank_socket=agent.path)
    line, steps, found = agent.accept(), list[int](), list[Finding]()
    while len(steps) < 20 or not found:
        match line.next():
            case RankStep(step=step):
                steps.append(step)
            case FindingReported(finding=finding):
                found.append(finding)
            case _:
                pass
    assert steps == list(range(1, 21))
    assert [finding.code for finding in found] == ["tracker-failed"]
    assert told in found[0].what
    assert capsys.readouterr().err.count(told) == 1


def test_tracker_that_blocks_stops_no_step_and_no_end(monkeypatch, capsys) -> None:
    monkeypatch.setattr(async_tracker, "BACKLOG_STEPS", 5)
    monkeypatch.setattr(async_tracker, "CLOSE_S", 0.01)
    tracker = Blocked()
    run_with(tracker, monkeypatch, 20)
    assert capsys.readouterr().err.count("wandb is 5 steps behind") == 1
    tracker.let_go.set()


def test_tracker_that_blocks_and_is_not_far_behind_is_named_at_the_end(monkeypatch, capsys) -> None:
    monkeypatch.setattr(async_tracker, "CLOSE_S", 0.01)
    tracker = Blocked()
    run_with(tracker, monkeypatch, 20)
    assert capsys.readouterr().err.count("wandb was not done with all metrics 0.01 s after the last step") == 1
    tracker.let_go.set()


def test_tracker_that_nobody_knows_is_an_error() -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(HoldfastError) as refused:
        Session(model=model, optimizer=torch.optim.SGD(model.parameters()), report_to=["wandbee"])
    assert refused.value.findings[0].code == "tracker-unknown"
