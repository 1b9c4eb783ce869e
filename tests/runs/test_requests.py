"""What is asked of a controller that does not answer: who asked is told so, and it is not done behind their back."""

from __future__ import annotations

import os
import signal

import pytest
from tests.runs.conftest import Runs

from holdfast import api, asking
from holdfast.errors import HoldfastError
from holdfast.events import CancelRequested, CheckpointCommitted, ControllerStarted, Outcome, StepCommitted


@pytest.mark.parametrize("after", [signal.SIGCONT, signal.SIGKILL], ids=["wakes", "is replaced"])
def test_cancel_that_a_stopped_controller_did_not_answer_is_not_obeyed_when_it(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, after: signal.Signals
) -> None:
    watched = runs.steps(100_000, 0.02)
    watched.until(CheckpointCommitted)
    controller = watched.all(ControllerStarted)[-1].pid
    os.kill(controller, signal.SIGSTOP)
    with monkeypatch.context() as impatient:
        impatient.setattr(asking, "ASK_S", 0.3)
        impatient.setattr(asking, "ANSWER_S", 0.3)
        with pytest.raises(HoldfastError) as refused:
            api.cancel(watched.folder)
    assert refused.value.findings[0].code == "controller-silent"
    os.kill(controller, after)
    step = watched.until(StepCommitted, lambda event: event.step > watched.steps()[-2]).step
    watched.until(StepCommitted, lambda event: event.step > step + 100)
    assert watched.all(CancelRequested) == []
    api.cancel(watched.folder)
    assert watched.end().outcome is Outcome.CANCELLED
