"""A machine whose device failed in a real run is listed with the evidence, avoided by the next run, and released."""

from __future__ import annotations

import pytest
from tests.runs.conftest import Runs, WatchedRun

from holdfast import api
from holdfast.events import FaultAction, FaultTarget, FindingRaised, NodeCreated, StepCommitted
from holdfast.launch.target_machines import MachineState

FREE, USED, QUARANTINED = MachineState.FREE, MachineState.USED, MachineState.QUARANTINED


def machines_of(watched: WatchedRun) -> list[tuple[int, int, str]]:
    return [(event.node, event.generation, event.machine) for event in watched.all(NodeCreated)]


@pytest.mark.slow
def test_machine_of_a_failed_gpu_is_avoided_by_its_run_and_the_next_until_it_is_released(runs: Runs) -> None:
    folder = runs.base / ".holdfast" / "targets"
    folder.mkdir(parents=True)
    (folder / "three.yaml").write_text("capacity: 3\n")
    first = runs.steps(4000, target="three")
    first.wait_for(StepCommitted)
    first.drill(FaultTarget.GPU, 1, FaultAction.FAIL)
    first.wait_for(StepCommitted, lambda event: event.attempt == 1)
    assert machines_of(first) == [(0, 0, "machine0"), (1, 0, "machine1"), (1, 1, "machine2")]
    (told,) = (event.finding for event in first.all(FindingRaised) if event.finding.code == "machine-quarantined")
    assert told.where == "machine1"
    listed = api.machines("three", base=runs.base)
    assert [(each.name, each.state) for each in listed.machines] == [
        ("machine0", USED),
        ("machine1", QUARANTINED),
        ("machine2", USED),
    ]
    row = listed.machines[1].quarantine
    assert row is not None
    assert (row.code, row.run) == ("gpu-failed", first.folder.run_id)
    assert any("GPU is lost" in line for line in row.evidence)
    api.cancel(first.folder)
    first.wait_for_end()

    warned = [finding.code for finding in api.check(api.load_job(None, command=("true",)), "three", base=runs.base)]
    assert "machines-quarantined" in warned
    second = runs.steps(4000, target="three")
    second.wait_for(StepCommitted)
    assert machines_of(second) == [(0, 0, "machine0"), (1, 0, "machine2")]
    assert api.release_machine("machine1", "three", base=runs.base) == ()
    states = [each.state for each in api.machines("three", base=runs.base).machines]
    assert states == [USED, FREE, USED]
