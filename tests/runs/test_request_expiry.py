"""Requests to a controller that does not answer: the user gets an error, and the request does not run later."""

from __future__ import annotations

import os
import signal

import pytest
from tests.runs.conftest import Runs

from holdfast import api, controller_client
from holdfast.errors import HoldfastError
from holdfast.events import CancelRequested, CheckpointCommitted, ControllerStarted, Outcome, StepCommitted


@pytest.mark.parametrize("after", [signal.SIGCONT, signal.SIGKILL], ids=["wakes", "is replaced"])
def test_cancel_that_a_stopped_controller_did_not_answer_is_not_obeyed_when_it(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, after: signal.Signals
) -> None:
    watched = runs.steps(100_000, 0.02)
    watched.wait_for(CheckpointCommitted)
    controller = watched.all(ControllerStarted)[-1].pid
    os.kill(controller, signal.SIGSTOP)
    with monkeypatch.context() as impatient:
        impatient.setattr(controller_client, "REQUEST_TIMEOUT_S", 0.3)
        impatient.setattr(controller_client, "ANSWER_MARGIN_S", 0.3)
        with pytest.raises(HoldfastError) as refused:
            api.cancel(watched.folder)
    assert refused.value.findings[0].code == "controller-timeout"
    os.kill(controller, after)
    step = watched.wait_for(StepCommitted, lambda event: event.step > watched.steps()[-2]).step
    watched.wait_for(StepCommitted, lambda event: event.step > step + 100)
    assert watched.all(CancelRequested) == []
    api.cancel(watched.folder)
    assert watched.wait_for_end().outcome is Outcome.CANCELLED
