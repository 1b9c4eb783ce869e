"""When a soak has seen enough of its last fault."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from bench.fault_outcomes import FaultOutcomes
from bench.soak import faults, local
from bench.soak.monarch_faults import kill_beside, killed_beside

from holdfast.events import AnyEvent, FaultAction, FaultInjected, FaultRequested, FaultTarget, StepCommitted
from holdfast.events.log_writer import EventWriter
from holdfast.launch.monarch.client_process import FOLDER_NAME
from holdfast.report.goodput import Account
from holdfast.run_dir import RunDir


def step(number: int, at: float) -> StepCommitted:
    return StepCommitted(at=at, replica=0, attempt=0, step=number, started=at, ended=at)


def test_leftovers_are_no_failed_recoveries_and_faults_of_monarch_count() -> None:
    came = FaultOutcomes(
        requested={"kill rank": 3}, recovered_s={"rank-failed": [1.0, 2.0]}, unrecovered=1, problems=("a step is lost",)
    )

    account = Account(parts={}, total_s=60.0, steps=9, recomputed_steps=0)

    def outcome(stuck: str, left: list[str]) -> tuple[int, int]:
        found = local.outcome(came, account, beside={"kill monarch client": 2}, stuck=stuck, left=left)
        assert found.faults == {"kill rank": 3, "kill monarch client": 2}
        assert found.recoveries == 2
        return found.failed, found.wrong

    assert outcome("", []) == (1, 1)
    assert outcome("", ["process 1 is left", "process 2 is left"]) == (1, 3)
    assert outcome("no step for 180 s", []) == (2, 1)


def test_faults_of_monarchs_processes_are_recorded_if_there_were_any(tmp_path: Path) -> None:
    run, record = RunDir(tmp_path / f"test-{secrets.token_hex(3)}"), tmp_path / "record"
    kill_beside(run, 0, 3, record)
    assert killed_beside(record) == {}
    mark = f"{run.run_id}/{FOLDER_NAME}"
    for _ in range(2):  # as before and after an interruption
        process = subprocess.Popen(["sleep", "1000"], env={**os.environ, "HOLDFAST_NODE": mark})
        kill_beside(run, 1, 3, record)
        assert process.wait() == -signal.SIGKILL
    assert killed_beside(record) == {"kill monarch process": 2}


def test_step_that_was_told_of_with_the_fault_before_it_has_not_outlived_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the controller was stopped: agents go on, and it hears of the fault and of all those steps at once."""
    monkeypatch.setattr(local.LocalWatch, "well", property(lambda watch: not watch.undone))
    asked = FaultRequested(at=1.0, target=FaultTarget.AGENT, index=0, action=FaultAction.KILL)
    done = FaultInjected(at=1.0, node=0, requested_at=1.0, target="agent", action="kill")
    folder = RunDir(tmp_path)
    writer = EventWriter(folder.events)
    late: list[list[AnyEvent]] = [[asked, done, step(1, 9.0)], *([] for _ in range(200)), [step(2, 30.0)]]
    now = 0.0

    def sleep(for_s: float) -> None:
        nonlocal now
        now += for_s
        if late:
            writer.append(late.pop(0))

    for module in (faults, local):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    watch = local.LocalWatch(folder)
    watch.wait(lambda: watch.outlived)
    assert (late, watch.step_at) == ([], 30.0)
