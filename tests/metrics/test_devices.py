from __future__ import annotations

import pytest

from holdfast.metrics.devices import DEVICES, Device, find_device


@pytest.mark.parametrize(
    ("called", "name", "peak_tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100", 312),
        ("NVIDIA A100 80GB PCIe", "A100", 312),
        ("NVIDIA H100 80GB HBM3", "H100 SXM", 989.5),
        ("NVIDIA H100 PCIe", "H100 PCIe", 756.5),
        ("NVIDIA H100 NVL", "H100 NVL", 835.5),
        ("NVIDIA H200", "H200", 989.5),
        ("NVIDIA H200 NVL", "H200 NVL", 835.5),
        ("NVIDIA GH200 480GB", "H200", 989.5),
        ("NVIDIA B200", "B200", 2250),
        ("NVIDIA GB200", "GB200", 2500),
        ("NVIDIA L40S", "L40S", 362),
        ("NVIDIA L4", "L4", 121),
        ("NVIDIA A10G", "A10G", 70),
        ("NVIDIA A10", "A10", 125),
        ("Tesla V100-SXM2-16GB", "V100", 125),
        ("Tesla T4", "T4", 65),
        ("AMD Instinct MI300X", "MI300X", 1307.4),
    ],
)
def test_device_is_known_by_what_its_driver_calls_it(called: str, name: str, peak_tflops: float):
    device = find_device(called)
    assert device is not None
    assert (device.name, device.peak_tflops) == (name, peak_tflops)


@pytest.mark.parametrize("called", ["", "cpu", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA GeForce GTX 1080", "L40"])
def test_nothing_is_claimed_of_a_device_that_is_not_in_the_table(called: str):
    assert find_device(called) is None


def test_every_row_has_a_peak_and_a_source():
    assert all(device.peak_tflops and device.stated for device in DEVICES)
    assert all(device.source.startswith("https://") or "data sheet" in device.source for device in DEVICES)


@pytest.mark.parametrize("device", [row for row in DEVICES if row.arithmetic], ids=lambda row: row.name)
def test_peak_of_a_sheet_that_was_not_at_hand_is_what_its_units_do_at_their_clock(device: Device):
    assert device.arithmetic is not None
    units, flop, clock_ghz = device.arithmetic
    assert units * flop * clock_ghz / 1e3 == pytest.approx(device.peak_tflops, rel=0.005)
