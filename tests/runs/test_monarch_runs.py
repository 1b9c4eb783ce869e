"""Runs whose agents Monarch places, and a Monarch program that starts a run."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

from tests.runs.conftest import TORCH_FREE_TRAINER, Runs

from holdfast.events import (
    AttemptStarted,
    CheckpointCommitted,
    FindingRaised,
    NodeTerminated,
    RecoveryDecided,
    StepCommitted,
)
from holdfast.host.processes import all_pids, by_env, command_line, send_signal

CONTROLLER = Path(__file__).parents[2] / "examples/monarch/controller.py"


def test_lost_monarch_process_and_client_cost_a_restart_each(runs: Runs) -> None:
    watched = runs.steps(1_000_000, overrides=("orchestrator=monarch", "recovery.max_restarts=20"))
    marked = f"{watched.folder.run_id}/monarch"
    watched.wait_for(CheckpointCommitted)
    meshes = [pid for pid in by_env(all_pids(), HOLDFAST_NODE=marked) if "bootstrap" in command_line(pid)]
    assert len(meshes) == 2

    send_signal(meshes[0], signal.SIGKILL)
    assert watched.wait_for(NodeTerminated).reason == "its Monarch process has ended"
    assert watched.wait_for(RecoveryDecided).finding.code == "node-lost"
    attempt = watched.wait_for(AttemptStarted).attempt
    watched.wait_for(StepCommitted, lambda event: event.attempt == attempt and event.step > 5)

    (client,) = (pid for pid in by_env(all_pids(), HOLDFAST_NODE=marked) if "monarch_client" in command_line(pid))
    send_signal(client, signal.SIGKILL)
    lost = watched.wait_for(FindingRaised, lambda event: event.finding.code == "orchestrator-lost").finding
    assert lost.what.endswith("its connection has ended")
    attempt = watched.first(AttemptStarted, lambda event: event.attempt > attempt).attempt
    watched.wait_for(StepCommitted, lambda event: event.attempt == attempt)


def test_monarch_program_starts_a_run_and_sees_checkpoints_a_recovery_and_the_diagnosis(home: Path) -> None:
    program = [str(TORCH_FREE_TRAINER), "40", "0.02", "raise@1@12@0"]
    ended = subprocess.run([sys.executable, str(CONTROLLER), *program], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    seen = ended.stdout.splitlines()
    assert [line for line in seen if line.startswith("recovery")]
    assert re.fullmatch(r"checkpoint 40 step\.txt: a file", [line for line in seen if line.startswith("checkp")][-1])

    program[-1] = "raise@1@12"
    ended = subprocess.run([sys.executable, str(CONTROLLER), *program], capture_output=True, text=True, check=False)
    assert ended.returncode not in (0, None)
    assert "failed" in ended.stdout.splitlines()[-1]


def test_example_uses_holdfast_in_at_most_ten_lines() -> None:
    text = CONTROLLER.read_text()
    imports = re.findall(r"^from holdfast.*", text, re.MULTILINE)
    use = text[text.index("\nrun = ") : text.index("\nsys.exit")].split("\n")[1:]
    assert len([*imports, *use]) <= 10
