"""GPUs by NVML: a fake that behaves for their faults, and the real bindings where there is no driver."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pynvml
import pytest
from tests.watch.fake_nvml import FIELDS, THERMAL, FakeNvml

from holdfast.agent.device_evidence import fault_of_line
from holdfast.events import DeviceFault
from holdfast.watch import nvml
from holdfast.watch.gpu_readings import GpuReading, GpuState, gpu_symptoms
from holdfast.watch.kernel_faults import kernel_symptoms
from holdfast.watch.monitor import Comparison, SourceMissing, Symptom
from holdfast.watch.nvml import NvmlGpus, NvmlXids

FIRST, SECOND = "GPU 0000:1b:00", "GPU 0000:1c:00"
PERIOD_S = 5.0


class Watched:
    """Two GPUs, their source and its judge."""

    def __init__(self) -> None:
        self.nvml = FakeNvml()
        self.gpu = self.nvml.gpus[1]
        self.source = NvmlGpus(self.nvml)
        self.judge = Comparison[GpuReading](partial(gpu_symptoms, classify=fault_of_line))
        self.at_s = 0.0
        assert self.poll(2) == []

    def poll(self, times: int = 1) -> list[Symptom]:
        found: list[Symptom] = []
        for _ in range(times):
            self.at_s += PERIOD_S
            found += self.judge(self.source.read(self.at_s), self.at_s)
        return found


def test_state_of_a_healthy_gpu_is_read() -> None:
    fake = FakeNvml()
    source = NvmlGpus(fake)
    reading = source.read(7.0)
    healthy = GpuState(
        utilisation=97,
        power_w=612.345,
        temperature_c=71,
        uncorrectable=0,
        nvlink_recoveries=0,
        nvlink_retries=0,
        pcie_replays=0,
    )
    assert (reading.at_s, reading.gpus) == (7.0, {FIRST: healthy, SECOND: healthy})
    source.close()
    assert fake.users == 0


def test_each_fault_is_a_symptom_of_its_gpu_once() -> None:
    def set_field(name: str, value: int) -> Callable[[Watched], None]:
        return lambda node: node.gpu.fields.update({name: value})

    def set_lost(node: Watched) -> None:
        node.gpu.lost = pynvml.NVML_ERROR_GPU_IS_LOST

    def set_reset(node: Watched) -> None:
        node.gpu.lost = pynvml.NVML_ERROR_RESET_REQUIRED

    def add_ecc_error(node: Watched) -> None:
        node.gpu.uncorrectable = 1

    for change, code, fault in (
        (set_lost, "gpu-failed", DeviceFault.GPU),
        (set_reset, "gpu-needs-reset", DeviceFault.RESET),
        (set_field("remap_failed", 1), "gpu-failed", DeviceFault.GPU),
        (add_ecc_error, "gpu-memory-error-contained", DeviceFault.CONTAINED),
        (set_field("remap_pending", 1), "gpu-repair-pending", None),
        (set_field("retirement_pending", 1), "gpu-repair-pending", None),
        (set_field("recovery", 1), "nvlink-errors", None),
        (set_field("replay", 600), "nvlink-errors", None),
    ):
        node = Watched()
        change(node)
        (found,) = node.poll()
        assert (found.code, found.fault, found.device) == (code, fault, SECOND)
        assert node.poll(20) == [], code


def test_few_errors_that_links_correct_are_no_symptom() -> None:
    node = Watched()
    for errors in range(20):
        node.gpu.fields |= {"replay": 400 * errors, "pcie_replays": errors}
        assert node.poll() == []


def test_pcie_packets_that_are_repeated_again_and_again_are_one_symptom() -> None:
    node = Watched()
    found: list[Symptom] = []
    for errors in range(10):
        node.gpu.fields["pcie_replays"] = 8 * errors
        found += node.poll()
    assert [each.code for each in found] == ["gpu-pcie-errors"]


def test_gpu_that_is_slowed_for_three_readings_is_a_symptom_with_its_load() -> None:
    node = Watched()
    node.gpu.slowdowns = THERMAL
    assert node.poll(2) == []
    node.gpu.slowdowns = 0x4  # the limit of power: every busy GPU has it
    assert node.poll(5) == []
    node.gpu.slowdowns = THERMAL
    (found,) = node.poll(10)
    assert found.code == "gpu-throttled"
    assert found.what == f"{SECOND} lowers its clocks: thermal slowdown by the hardware (97% busy, 612 W, 71 °C)"
    node.gpu.slowdowns = 0
    assert node.poll(11) == []  # not yet clear for a minute
    node.gpu.slowdowns = THERMAL
    assert node.poll(3) == []
    node.gpu.slowdowns = 0
    assert node.poll(13) == []
    node.gpu.slowdowns = THERMAL
    assert [each.code for each in node.poll(10)] == ["gpu-throttled"]


def test_values_that_a_driver_does_not_have_are_left_out() -> None:
    fake = FakeNvml(1)
    fake.gpus[0].slowdowns = fake.gpus[0].uncorrectable = None
    fake.gpus[0].fields = {}
    (state,) = NvmlGpus(fake).read(0.0).gpus.values()
    assert state == GpuState(utilisation=97, power_w=612.345, temperature_c=71)
    assert len(FIELDS) == 8


def test_gpus_that_the_run_may_not_use_are_not_read() -> None:
    source = NvmlGpus(FakeNvml(4), lambda index, uuid: (index, uuid) == (2, "GPU-2"))
    assert [*source.read(0.0).gpus] == ["GPU 0000:1d:00"]
    fake = FakeNvml()
    with pytest.raises(SourceMissing, match="no GPU"):
        NvmlGpus(fake, lambda _index, _uuid: False)
    assert fake.users == 0


def test_xid_is_reported_by_an_event_also_after_its_gpu_is_lost() -> None:
    fake = FakeNvml()
    source = NvmlXids(fake)
    assert source.read(0.0) == ()
    fake.events += [(2, 79), (1, 31)]
    fake.gpus[1].lost = pynvml.NVML_ERROR_GPU_IS_LOST
    (found,) = kernel_symptoms(source.read(1.0), fault_of_line)  # Xid 31 is the program's
    assert (found.fault, found.device) == (DeviceFault.GPU, SECOND)
    source.close()
    assert (fake.users, fake.watched) == (0, set())


def test_driver_without_events_has_no_such_source() -> None:
    fake = FakeNvml(events=False)
    with pytest.raises(SourceMissing, match="NVML has no events here: Not Supported"):
        NvmlXids(fake)
    assert fake.users == 0


def test_node_without_the_driver_is_told_by_the_real_bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "LIBRARY", "libno-such-driver.so.1")
    with pytest.raises(SourceMissing, match="not found"):
        nvml.load()
    monkeypatch.setattr(
        pynvml, "_LoadNvmlLibrary", lambda: pynvml._nvmlCheckReturn(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    )
    with pytest.raises(SourceMissing, match="NVML: NVML Shared Library Not Found"):
        NvmlGpus(pynvml)


def test_real_bindings_have_what_the_fake_has() -> None:
    names = [name for name in vars(FakeNvml) if name.startswith("nvml")]
    assert len(names) > 10
    assert [name for name in names if not hasattr(pynvml, name)] == []
