"""What a drill writes for a failed device, and what it lets monitors read, is what the tables of faults know."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.agent.device_drills import DEVICE_OUTPUTS, OVERLAYS
from holdfast.agent.device_evidence import device_evidence
from holdfast.agent.error_line import last_error_line
from holdfast.events import DeviceFault, FaultAction, FaultTarget
from holdfast.job.fault_catalog import FAULTS
from holdfast.watch.monitor_table import NodePlace, monitors

EXPECTED = {
    (FaultAction.FAIL, FaultTarget.GPU): DeviceFault.GPU,
    (FaultAction.ECC_ERROR, FaultTarget.GPU): DeviceFault.MEMORY,
    (FaultAction.FAIL, FaultTarget.NVLINK): DeviceFault.NVLINK,
    (FaultAction.FAIL, FaultTarget.NIC): DeviceFault.NIC_LINK_DOWN,
}


@pytest.mark.parametrize("drill", DEVICE_OUTPUTS, ids="-".join)
def test_output_of_a_drill_is_the_evidence_of_its_fault(tmp_path: Path, drill: tuple[FaultAction, FaultTarget]) -> None:
    log = tmp_path / "rank-3.log"
    log.write_text(f"step 1\n{DEVICE_OUTPUTS[drill].format(rank=3)}")
    error, _ = last_error_line(log)
    assert error
    found = device_evidence(error, log, since_us=0, by_signal=True, kernel_log=tmp_path / "none")
    assert found is not None
    assert found.fault is EXPECTED[drill]
    assert "{" not in log.read_text()


def test_every_device_of_the_catalogue_has_its_output_or_its_readings() -> None:
    assert DEVICE_OUTPUTS.keys() == EXPECTED.keys()
    assert DEVICE_OUTPUTS.keys() | OVERLAYS.keys() == {drill for drill in FAULTS if drill[1].is_device}


def test_readings_of_a_drill_are_reported_by_the_row_they_belong_to(tmp_path: Path) -> None:
    place = NodePlace(address="", classify=lambda _: None, is_visible=lambda _index, _uuid: True, root=tmp_path)
    rows = {row.source: row for row in monitors(place)}
    for drill, code, periods in (
        ((FaultAction.THROTTLE, FaultTarget.GPU), "gpu-throttled", 3),
        ((FaultAction.LINK_ERRORS, FaultTarget.NIC), "fabric-link-errors", 2),
    ):
        source, overlay = OVERLAYS[drill]
        row, reading = rows[source], overlay(3)
        judge = row.judge(None)
        found = [[*judge(reading(None, at_s), at_s)] for at_s in (row.period_s * each for each in range(8))]
        assert [each.code for each in found[periods - 1]] == [code]
        assert sum(map(len, found)) == 1
        assert "rank 3" in found[periods - 1][0].device
