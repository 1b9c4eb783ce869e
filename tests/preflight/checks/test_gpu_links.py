"""Checks of NVLink, the NVSwitch fabric and PCIe."""

from __future__ import annotations

import pytest
from tests.preflight.conftest import MakeNode, codes
from tests.preflight.gpu_nodes import A10G, A100_MIG, BRIDGED, NVLINK, SMI, board, links

from holdfast.findings import Severity
from holdfast.preflight.checks.gpu_driver import gpu_driver
from holdfast.preflight.checks.gpu_links import gpu_fabric_manager, gpu_nvlink, gpu_pcie
from holdfast.preflight.node_view import NotLookedAt
from holdfast.preflight.run_checks import Check

ALL = (gpu_nvlink, gpu_fabric_manager, gpu_pcie)
ERROR, WARNING, INFO = Severity

CARD = {"product_name": "NVIDIA H100 PCIe", "state": "N/A", "status": "N/A", "summary": "N/A"}
CARDS = {
    0: {**CARD, "uuid": "GPU-6968dfc2-d444-d92c-c36b-6abe53445cb9"},
    1: {**CARD, "uuid": "GPU-9b1446e2-8a89-4cf6-b68c-a98d99e958d3"},
}


@pytest.mark.parametrize("check", ALL)
@pytest.mark.parametrize(
    ("text", "nvlink"),
    [(A100_MIG, ""), (A10G, ""), (board(), links()), (board(CARDS, gpus=2), BRIDGED), (board(), "")],
    ids=["mig", "aws", "board", "bridged cards", "no NVLink"],
)
def test_healthy_links_yield_nothing(node: MakeNode, check: Check, text: str, nvlink: str) -> None:
    assert codes([*check(node(commands={SMI: text, NVLINK: nvlink}, gpus=1))]) == []


@pytest.mark.parametrize("check", ALL)
def test_without_an_answer_nothing_has_passed(node: MakeNode, check: Check) -> None:
    assert codes([*check(node())]) == []
    with pytest.raises(NotLookedAt, match="no program `nvidia-smi`"):
        [*check(node(gpus=8))]


@pytest.mark.parametrize("error", [NotLookedAt("there is no program `nvidia-smi`"), TimeoutError("has not answered")])
def test_links_that_are_not_listed_are_not_looked_at(node: MakeNode, error: Exception) -> None:
    with pytest.raises(NotLookedAt, match=str(error)):
        [*gpu_nvlink(node(commands={SMI: board(), NVLINK: error}, gpus=8))]


def test_inactive_link_of_a_board_is_located(node: MakeNode) -> None:
    (finding,) = gpu_nvlink(node(commands={SMI: board(), NVLINK: links({3: frozenset({5, 11})})}, gpus=8))
    assert (finding.code, finding.severity, finding.where) == ("gpu-nvlink-inactive", ERROR, "GPU 3")
    assert finding.evidence == ("00000000:1C:00.0 NVIDIA H100 80GB HBM3: 16 of 18 links, without 5, 11",)


def test_divided_gpu_has_no_links_and_no_fabric(node: MakeNode) -> None:
    commands = {
        SMI: board({0: {"current_mig": "Enabled", "state": "Not Started"}}),
        NVLINK: links({0: frozenset(range(18))}),
    }
    view = node(commands=commands, gpus=7)
    assert codes([*gpu_nvlink(view), *gpu_fabric_manager(view)]) == []


def test_gpu_without_any_link_among_others_is_located(node: MakeNode) -> None:
    inactive = "NVML: Unable to retrieve NVLink information as all links are inActive\n"
    lines = links(gpus=2) + f"GPU 2: NVIDIA H100 80GB HBM3 (UUID: GPU-00000000-0000-4000-8000-000000000002)\n{inactive}"
    (finding,) = gpu_nvlink(node(commands={SMI: board(gpus=3), NVLINK: lines}, gpus=3))
    assert (finding.severity, finding.where) == (ERROR, "GPU 2")


def test_cards_that_no_bridge_joins_are_a_warning(node: MakeNode) -> None:
    """The second pair of cards may have been built without a bridge."""
    cards = dict.fromkeys(range(4), CARD)
    text = links({2: frozenset(range(18)), 3: frozenset(range(18))}, gpus=4)
    (finding,) = gpu_nvlink(node(commands={SMI: board(cards, gpus=4), NVLINK: text}, gpus=4))
    assert (finding.severity, finding.where) == (WARNING, "GPU 2, GPU 3")


@pytest.mark.parametrize(
    ("field", "value", "code", "severity"),
    [
        ("state", "In Progress", "gpu-fabric-not-ready", ERROR),
        ("state", "Not Started", "gpu-fabric-not-ready", ERROR),
        ("status", "Insufficient Resources", "gpu-fabric-not-ready", ERROR),  # Azure/azhpc-images pull request 506
        ("status", "Unknown Error", "gpu-fabric-not-ready", ERROR),  # NVIDIA/NVSentinel issue 883
        ("route_unhealthy", "True", "gpu-fabric-unhealthy", ERROR),
        ("summary", "Unhealthy", "gpu-fabric-unhealthy", ERROR),
        ("summary", "Limited Capacity", "gpu-fabric-unhealthy", WARNING),
        ("bandwidth", "Degraded", "gpu-fabric-unhealthy", WARNING),
    ],
)
def test_fabric_that_is_not_ready_or_unhealthy_is_located(
    node: MakeNode, field: str, value: str, code: str, severity: Severity
) -> None:
    view = node(commands={SMI: board({2: {field: value}})}, gpus=8)
    (finding,) = [*gpu_fabric_manager(view), *gpu_driver(view)]
    assert (finding.code, finding.severity, finding.where) == (code, severity, "GPU 2")
    assert f"{field} {value}" in finding.what


@pytest.mark.parametrize("state", ["N/A", "Not Supported"])
def test_gpus_without_a_switch_have_no_fabric(node: MakeNode, state: str) -> None:
    without = {index: {**CARD, "state": state} for index in range(8)}
    assert codes([*gpu_fabric_manager(node(commands={SMI: board(without)}, gpus=8))]) == []


def test_one_gpu_of_a_board_needs_the_fabric(node: MakeNode) -> None:
    commands = {SMI: board({0: {"state": "In Progress"}})}
    (finding,) = gpu_fabric_manager(node(commands=commands, gpus=1, environ={"CUDA_VISIBLE_DEVICES": "0"}))
    assert finding.severity == ERROR


def test_single_gpu_may_work_without_the_fabric(node: MakeNode) -> None:
    text = board({0: {"state": "In Progress", "status": "N/A"}}, gpus=1)
    (finding,) = gpu_fabric_manager(node(commands={SMI: text}, gpus=1))
    assert (finding.code, finding.severity) == ("gpu-fabric-not-ready", WARNING)


def test_gpu_with_fewer_lanes_than_its_siblings_is_located(node: MakeNode) -> None:
    (finding,) = gpu_pcie(node(commands={SMI: board({4: {"current_link_width": "4x"}})}, gpus=8))
    assert (finding.code, finding.severity, finding.where) == ("gpu-pcie-narrow", WARNING, "GPU 4")
    assert "4 of 16 lanes" in finding.what
