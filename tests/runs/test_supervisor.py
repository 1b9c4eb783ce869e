"""Controllers that stop, or cannot start for a while: the supervisor restarts one, and no rank notices."""

from __future__ import annotations

import os
import signal

import pytest
from tests.runs.conftest import Runs
from tests.waiting import until

from holdfast.events import AttemptStarted, ControllerStarted, Outcome, RanksStarted, StepCommitted

pytestmark = pytest.mark.slow


def test_stopped_controller_is_replaced_without_a_rank_restarting(runs: Runs) -> None:
    watched = runs.steps(50, 0.5)
    watched.wait_for(RanksStarted)
    watched.wait_for(RanksStarted)
    os.kill(watched.all(ControllerStarted)[-1].pid, signal.SIGSTOP)
    watched.wait_for(ControllerStarted)
    assert watched.wait_for_end().outcome is Outcome.SUCCEEDED
    assert len(watched.all(AttemptStarted)) == 1
    assert [event.step for event in watched.all(StepCommitted)] == list(range(1, 51))
    assert "sent no heartbeat for 15 s" in watched.folder.controller_log.read_text()


def test_controllers_that_fail_for_a_while_cost_no_rank_its_work(runs: Runs) -> None:
    watched = runs.steps(300, 0.05)
    watched.wait_for(RanksStarted)
    watched.wait_for(RanksStarted)
    good = watched.folder.secrets.rename(watched.folder.path / "put-aside")
    watched.folder.secrets.write_text("not JSON")
    os.kill(watched.all(ControllerStarted)[-1].pid, signal.SIGKILL)
    until(lambda: watched.folder.read_controller_record().get("failed", 0) >= 4)
    good.rename(watched.folder.secrets)
    assert watched.wait_for_end().outcome is Outcome.SUCCEEDED
    assert len(watched.all(ControllerStarted)) == 2
    assert len(watched.all(AttemptStarted)) == 1
    assert [event.step for event in watched.all(StepCommitted)] == list(range(1, 301))
