"""What a drill writes for a failed device is what the table of faults knows, and what torch and NCCL write."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.agent.device_drills import DEVICE_OUTPUTS
from holdfast.agent.device_evidence import device_evidence
from holdfast.agent.error_line import last_error_line
from holdfast.events import DeviceFault, FaultAction, FaultTarget
from holdfast.job.fault_catalog import FAULTS

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


def test_every_device_of_the_catalogue_has_its_output() -> None:
    assert DEVICE_OUTPUTS.keys() == EXPECTED.keys() == {drill for drill in FAULTS if drill[1].is_device}
