"""What the parser of nvidia-smi reads from three generations of its XML, and what it refuses."""

from __future__ import annotations

import pytest
from tests.preflight.gpu_nodes import A10G, A100_MIG, BRIDGED, WORKSTATION, board

from holdfast.preflight.node_view import NotLookedAt
from holdfast.preflight.nvidia_smi import parse_links, parse_report


def test_newest_form_is_read() -> None:
    report = parse_report(WORKSTATION)
    (gpu,) = report.gpus
    (process,) = gpu.processes
    assert (report.driver, report.cuda, report.notes) == ("590.44.01", "13.1", ())
    assert (gpu.model, gpu.bus_id, gpu.minor) == (
        "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
        "00000000:61:00.0",
        0,
    )
    assert gpu.limits == {"max SM clock, MHz": 3090, "max memory clock, MHz": 14001, "power limit, W": 300}
    assert (gpu.ecc, gpu.persistence, gpu.mig_mode, gpu.recovery) == ("Disabled", "Enabled", "", "")
    assert (gpu.pcie_lanes, gpu.used_mib, gpu.fabric, gpu.slowdowns) == (16, 65720, {}, frozenset())
    assert (process.pid, process.kind, process.used_mib) == (116860, "C", 65710)


def test_instances_of_a_divided_gpu_are_counted() -> None:
    (gpu,) = parse_report(A100_MIG).gpus
    assert (gpu.mig_mode, gpu.mig_devices, gpu.minor) == ("Enabled", 4, 1)
    assert gpu.limits["application graphics clock, MHz"] == 1275


def test_names_of_older_drivers_are_read() -> None:
    (gpu,) = parse_report(A10G.replace("slowdown>Not Active", "slowdown>Active")).gpus
    hardware = {"hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown"}
    assert gpu.slowdowns == {*hardware, "sw_thermal_slowdown", "gpu_idle"}
    assert gpu.limits["power limit, W"] == 300
    (gpu,) = parse_report(A10G.replace("</volatile>", "<double_bit><total>2</total></double_bit></volatile>")).gpus
    assert gpu.uncorrectable == {"double_bit": 2}


@pytest.mark.parametrize(
    ("flag", "expected"),
    [("reset_required", "Reset"), ("drain_and_reset_recommended", "Drain and Reset")],
)
def test_older_flags_of_recovery_are_read_as_actions(flag: str, expected: str) -> None:
    (gpu,) = parse_report(A100_MIG.replace(f"<{flag}>No", f"<{flag}>Yes")).gpus
    assert gpu.recovery == expected


def test_lines_around_the_xml_are_notes() -> None:
    report = parse_report(f"one\n{A10G}WARNING: infoROM is corrupted at gpu 0000:3B:00.0\n")
    assert report.notes == ("one", "WARNING: infoROM is corrupted at gpu 0000:3B:00.0")
    assert parse_report("No devices were found\n").notes == ("No devices were found",)
    assert parse_report("").notes == ()


def test_value_that_the_driver_cannot_read_is_no_value() -> None:
    gpu = parse_report(board({3: {"fan_speed": "Unknown Error", "used": "[GPU is lost]"}})).gpus[3]
    assert gpu.used_mib is None
    assert gpu.unreadable == ("fan_speed: Unknown Error", "used: GPU is lost")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (A10G.replace('v11.dtd">', 'v11.dtd" [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;">]>'), "declares entities"),
        (A10G.replace("</fb_memory_usage>", ""), "is broken: mismatched tag"),
        (A10G.replace("NVIDIA A10G", "&undeclared;"), "is broken: undefined entity"),
    ],
)
def test_broken_or_dangerous_xml_is_refused(text: str, reason: str) -> None:
    with pytest.raises(NotLookedAt, match=reason):
        parse_report(text)


def test_links_of_bridged_cards_are_read() -> None:
    links = parse_links(BRIDGED)
    first = links["GPU-6968dfc2-d444-d92c-c36b-6abe53445cb9"]
    assert len(links) == 2
    assert first.active == {0, 1, 2, 3, 6, 7, 8, 9, 12, 13, 14, 15}
    assert first.inactive == {4, 5, 10, 11, 16, 17}


# leptonai/gpud issue 1085
ALL_INACTIVE = """\
GPU 2: NVIDIA B200 (UUID: GPU-c5533cd4-5a60-059e-348d-b6d7466932e4)
NVML: Unable to retrieve NVLink information as all links are inActive
"""


def test_message_in_place_of_links_means_none() -> None:
    assert parse_links(ALL_INACTIVE)["GPU-c5533cd4-5a60-059e-348d-b6d7466932e4"].active == frozenset()
