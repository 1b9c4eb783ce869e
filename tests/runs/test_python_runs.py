"""Runs started from Python: the handle, and repeated starts by one name."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from holdfast import api, runs
from holdfast.errors import ExitCode, HoldfastError
from holdfast.events import RunCreated
from holdfast.report.run_status import RunPhase

FAST = ("recovery.prewarm=false", "watch.step_clock=false", "recovery.max_restarts=0")


def start(base: Path, program: str, **given: object) -> runs.Run:
    command = (sys.executable, "-c", program)
    return runs.start(command=command, base=base, name="night", overrides=FAST, **given)  # pyright: ignore[reportArgumentType]


def test_handle_waits_for_the_end_and_has_output_status_and_events(home: Path, tmp_path: Path) -> None:
    # Only one ends: a rank that is stopped because another has failed may not have printed anything yet.
    program = "import os, time; r = os.environ['RANK']; print(r, flush=True); exit(3) if r == '1' else time.sleep(600)"
    run = start(tmp_path, program, nodes=2)
    assert run.id.startswith("night-")
    assert run.wait() == 3
    assert (run.logs(rank=1)[:2], run.status().phase) == ("1\n", RunPhase.FAILED)
    assert isinstance(next(run.events()), RunCreated)
    assert runs.find("night") == run


def test_wait_that_is_too_short_raises_and_the_run_can_be_cancelled(home: Path, tmp_path: Path) -> None:
    run = start(tmp_path, "import time; time.sleep(600)")
    with pytest.raises(TimeoutError, match=run.id):
        run.wait(timeout_s=0.1)
    run.cancel(force=True)
    assert run.wait() == ExitCode.CANCELLED


def test_callers_that_repeat_a_start_share_one_run(home: Path, tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(start, tmp_path, "pass", if_exists="attach") for _ in range(4)]
        found = {call.result().id for call in calls}
    assert len(found) == len(api.runs()) == 1
    assert runs.find().wait() == 0
    assert start(tmp_path, "pass", if_exists="attach").id in found  # it has succeeded
    with pytest.raises(HoldfastError, match="has not failed") as refused:
        start(tmp_path, "pass", if_exists="refuse")
    assert refused.value.findings[0].code == "run-exists"


@pytest.mark.slow
def test_run_that_failed_is_started_again(home: Path, tmp_path: Path) -> None:
    first = start(tmp_path, "raise SystemExit(1)", if_exists="attach")
    assert first.wait() == 1
    second = start(tmp_path, "pass", if_exists="attach")
    assert second.id != first.id
    assert second.wait() == 0
