"""Checks of what holds, breaks or slows a GPU."""

from __future__ import annotations

import subprocess

import pytest
from tests.preflight.conftest import MakeNode, codes
from tests.preflight.gpu_nodes import A10G, A100_MIG, SMI, WORKSTATION, board, process

from holdfast.findings import Severity
from holdfast.preflight.checks.gpu import gpu_clocks, gpu_ecc, gpu_idle, gpu_persistence, gpu_throttle
from holdfast.preflight.node_view import NotLookedAt
from holdfast.preflight.run_checks import Check

ALL = (gpu_idle, gpu_ecc, gpu_throttle, gpu_persistence, gpu_clocks)
ERROR, WARNING, INFO = Severity


@pytest.mark.parametrize("check", ALL)
@pytest.mark.parametrize("text", [A100_MIG, A10G, board()], ids=["mig", "aws", "board"])
def test_healthy_gpus_yield_nothing_but_a_hint(node: MakeNode, check: Check, text: str) -> None:
    found = [*check(node(commands={SMI: text}, gpus=1))]
    assert [each for each in found if each.severity is not INFO] == []


@pytest.mark.parametrize("check", ALL)
def test_without_an_answer_nothing_has_passed(node: MakeNode, check: Check) -> None:
    assert codes([*check(node())]) == []
    with pytest.raises(NotLookedAt, match="no program `nvidia-smi`"):
        [*check(node(gpus=1))]
    with pytest.raises(NotLookedAt, match="lists no GPU: see gpu-driver"):
        [*check(node(commands={SMI: "No devices were found\n"}, gpus=1))]


@pytest.mark.parametrize(
    ("check", "field", "value", "code", "severity"),
    [
        (gpu_ecc, "dram_uncorrectable", "4", "gpu-ecc-uncorrectable", ERROR),
        (gpu_ecc, "sram_uncorrectable_parity", "1", "gpu-ecc-uncorrectable", ERROR),
        (gpu_ecc, "remapped_row_failure", "Yes", "gpu-memory-repair-failed", ERROR),
        (gpu_ecc, "unrepairable_memory", "Yes", "gpu-memory-repair-failed", ERROR),
        (gpu_ecc, "remapped_row_pending", "Yes", "gpu-memory-repair-pending", WARNING),
        (gpu_ecc, "pending_retirement", "Yes", "gpu-memory-repair-pending", WARNING),
        (gpu_ecc, "channel_repair_pending", "Yes", "gpu-memory-repair-pending", WARNING),
        (gpu_ecc, "sram_threshold_exceeded", "Yes", "gpu-sram-errors", WARNING),
        (gpu_ecc, "current_ecc", "Disabled", "gpu-ecc-off", WARNING),
        (gpu_throttle, "clocks_event_reason_hw_thermal_slowdown", "Active", "gpu-slowed-by-hardware", ERROR),
        (gpu_throttle, "clocks_event_reason_hw_power_brake_slowdown", "Active", "gpu-slowed-by-hardware", ERROR),
        (gpu_throttle, "clocks_event_reason_hw_slowdown", "Active", "gpu-slowdown", WARNING),
        (gpu_throttle, "clocks_event_reason_sw_thermal_slowdown", "Active", "gpu-slowdown", WARNING),
        (gpu_persistence, "persistence_mode", "Disabled", "gpu-persistence-off", INFO),
        (gpu_clocks, "sm_clock", "1410 MHz", "gpu-limited-below-siblings", WARNING),
        (gpu_clocks, "current_power_limit", "350.00 W", "gpu-limited-below-siblings", WARNING),
    ],
)
def test_fault_of_one_gpu_is_located(
    node: MakeNode, check: Check, field: str, value: str, code: str, severity: Severity
) -> None:
    view = node(commands={SMI: board({5: {field: value}})}, gpus=8)
    found = [finding for each in ALL for finding in each(view)]
    assert [(each.code, each.severity, each.where) for each in found] == [(code, severity, "GPU 5")]
    assert found == [*check(view)]


def test_gpus_with_one_fault_share_a_finding(node: MakeNode) -> None:
    broken = {"dram_uncorrectable": "2", "sram_uncorrectable_secded": "1"}
    (finding,) = gpu_ecc(node(commands={SMI: board({1: broken, 6: {"dram_uncorrectable": "9"}})}, gpus=8))
    assert finding.what.endswith(
        "GPU 1 (sram_uncorrectable_secded 1, dram_uncorrectable 2), GPU 6 (dram_uncorrectable 9)"
    )
    assert finding.evidence[1] == "00000000:1F:00.0 NVIDIA H100 80GB HBM3: dram_uncorrectable 9"


def test_fault_of_a_gpu_that_the_job_does_not_use_is_left_out(node: MakeNode) -> None:
    commands = {SMI: board({5: {"dram_uncorrectable": "4"}})}
    view = node(commands=commands, gpus=4, environ={"CUDA_VISIBLE_DEVICES": "0,1,2,3"})
    assert codes([*gpu_ecc(view)]) == []


def test_ecc_that_is_off_everywhere_is_a_choice(node: MakeNode) -> None:
    off = {index: {"current_ecc": "Disabled"} for index in range(8)}
    assert codes([*gpu_ecc(node(commands={SMI: board(off)}, gpus=8))]) == []


def test_laptop_that_slows_down_is_no_fault(node: MakeNode) -> None:
    laptop = {
        "product_name": "NVIDIA GeForce RTX 4070 Laptop GPU",
        "clocks_event_reason_hw_power_brake_slowdown": "Active",
    }
    (finding,) = gpu_throttle(node(commands={SMI: board({0: laptop}, gpus=1)}, gpus=1))
    assert (finding.code, finding.severity) == ("gpu-slowdown", WARNING)


def test_clocks_of_different_models_are_not_compared(node: MakeNode) -> None:
    other = {"product_name": "NVIDIA A100-SXM4-80GB", "sm_clock": "1410 MHz"}
    assert codes([*gpu_clocks(node(commands={SMI: board({7: other})}, gpus=8))]) == []


def test_process_that_holds_memory_is_named(node: MakeNode) -> None:
    (finding,) = gpu_idle(node(commands={SMI: WORKSTATION}, gpus=1))
    assert (finding.code, finding.severity) == ("gpu-in-use", WARNING)
    assert finding.evidence == (
        "GPU 0: 65,710 MiB held by process 116860 (/root/src/llama.cpp/build/bin/llama-server)",
    )


def test_process_of_this_agent_is_no_other(node: MakeNode) -> None:
    with subprocess.Popen(["sleep", "60"]) as rank:
        text = board(process=process("C", "900 MiB").replace("4121", str(rank.pid)))
        assert codes([*gpu_idle(node(commands={SMI: text}, gpus=8))]) == []
        rank.kill()


@pytest.mark.parametrize(
    ("one", "used", "expected"),
    [
        (process("C", "N/A"), "500 MiB", ["GPU 0: an unknown amount held by process 4121 (python)"]),
        (process("G", "175 MiB", "/usr/bin/gnome-shell"), "200 MiB", []),
        (process("C+G", "20 MiB", "/usr/bin/Xwayland"), "200 MiB", []),
        (process("G", "5000 MiB", "blender"), "5004 MiB", ["GPU 0: 5,000 MiB held by process 4121 (blender)"]),
        (process("C", "30 MiB", "nvidia-cuda-mps-server"), "34 MiB", []),
        ("", "38120 MiB", ["GPU 0: 38,120 MiB held by no process that can be seen"]),
        ("", "1023 MiB", []),
    ],
)
def test_use_that_leaves_too_little_for_a_job_is_reported(
    node: MakeNode, one: str, used: str, expected: list[str]
) -> None:
    text = board({0: {"used": used}}, process=one)
    found = [line for finding in gpu_idle(node(commands={SMI: text}, gpus=8)) for line in finding.evidence]
    assert found == expected
