"""Under more strangers than a controller may have descriptors, what it needs itself stays free."""

from __future__ import annotations

import json
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from tests.runs.conftest import Runs

from holdfast import api
from holdfast.events import (
    AttemptStarted,
    ControllerStarted,
    FaultAction,
    FaultTarget,
    NodeRequested,
    Outcome,
    StepCommitted,
)

CROWD = 250
LIMIT = 112
"""Descriptors of a controller; a job of two nodes is refused below 104."""


@contextmanager
def flooded(host: str, port: int) -> Iterator[None]:
    """Strangers that say nothing."""
    with ExitStack() as crowd:
        for _ in range(CROWD):
            crowd.enter_context(socket.create_connection((host, port)))
        yield


def test_flooded_controller_with_few_descriptors_recovers_and_obeys(runs: Runs) -> None:
    watched = runs.steps(100_000, 0.02)
    watched.wait_for(StepCommitted)
    where = json.loads(watched.folder.controller_record.read_text())
    resource.prlimit(where["supervisor_pid"], resource.RLIMIT_NOFILE, (LIMIT, LIMIT))
    watched.drill(FaultTarget.CONTROLLER, 0, FaultAction.KILL)
    watched.wait_for(ControllerStarted)
    with flooded(where["host"], where["port"]):
        watched.drill(FaultTarget.NODE, 1, FaultAction.KILL)
        watched.wait_for(AttemptStarted, lambda event: event.attempt == 1)
        watched.wait_for(StepCommitted, lambda event: event.attempt == 1)
        api.cancel(watched.folder, force=True)
        assert watched.wait_for_end().outcome is Outcome.CANCELLED
    assert len(watched.all(NodeRequested)) == 3
    assert "are cut off" in watched.folder.controller_log.read_text()
