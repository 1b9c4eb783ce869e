"""Monitors of a real run: their sources are listed, and drills reach the log and restart nothing."""

from __future__ import annotations

from tests.runs.conftest import Runs

from holdfast import api
from holdfast.cli.monitor_text import monitor_lines
from holdfast.events import FaultAction, FaultTarget, FindingRaised, MonitorsStarted, RecoveryDecided, StepCommitted


def test_drills_of_devices_that_still_work_are_reported_and_restart_nothing(runs: Runs) -> None:
    watched = runs.steps(100_000)
    watched.wait_for(StepCommitted)
    watched.drill(FaultTarget.GPU, 1, FaultAction.THROTTLE)
    watched.drill(FaultTarget.NIC, 0, FaultAction.LINK_ERRORS, for_s=60.0)
    places = {
        code: watched.first(FindingRaised, lambda event, code=code: event.finding.code == code).finding.where
        for code in ("gpu-throttled", "fabric-link-errors")
    }
    assert places == {"gpu-throttled": "node1, GPU of rank 1", "fabric-link-errors": "node0, NIC of rank 0"}
    assert {event.node for event in watched.all(MonitorsStarted)} == {0, 1}
    status = api.status(watched.folder)
    lines = [*monitor_lines(status.nodes.values())]
    assert lines[0].startswith("monitors  nodes 0-1: ")
    assert "memory" in lines[0]
    assert any(line.startswith("          not read: RDMA ports (") for line in lines)
    api.cancel(watched.folder)
    watched.wait_for_end()
    assert watched.all(RecoveryDecided) == []
