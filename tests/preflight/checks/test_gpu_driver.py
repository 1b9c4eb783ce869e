"""Checks of the NVIDIA driver's answer and of the number of GPUs."""

from __future__ import annotations

import pytest
from tests.preflight.conftest import MakeNode, codes
from tests.preflight.gpu_nodes import A10G, A100_MIG, SMI, WORKSTATION, board

from holdfast.findings import Owner, Severity
from holdfast.preflight.checks.gpu_driver import gpu_count, gpu_driver
from holdfast.preflight.node_view import NotLookedAt

DEVICES = {f"dev/nvidia{index}": "" for index in range(8)} | {"dev/nvidiactl": "", "dev/nvidia-uvm": ""}


@pytest.mark.parametrize("text", [WORKSTATION, A100_MIG, A10G, board()], ids=["v13", "mig", "aws", "board"])
def test_driver_that_lists_gpus_is_fine(node: MakeNode, text: str) -> None:
    assert codes([*gpu_driver(node(commands={SMI: text}, gpus=1))]) == []


def test_job_without_gpus_needs_no_driver(node: MakeNode) -> None:
    assert codes([*gpu_driver(node()), *gpu_count(node())]) == []


# Sources: NVIDIA/nvidia-docker issues, tinygrad/open-gpu-kernel-modules issue 47, AlexeyAB/darknet issue 86
@pytest.mark.parametrize(
    ("answer", "remedy"),
    [
        (
            "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest "
            "NVIDIA driver is installed and running.\n",
            "modprobe nvidia",
        ),
        ("Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 570.124\n", "restart"),
        ("Failed to initialize NVML: Unknown Error\n", "recreate"),
        ("No devices were found\n", "request GPUs"),
        (
            "Unable to determine the device handle for GPU 0000:03:00.0: GPU is lost.  Reboot the system to recover "
            "this GPU\n",
            "replaced",
        ),
        ("", "dmesg"),
    ],
)
def test_answer_without_gpus_is_quoted_with_its_remedy(node: MakeNode, answer: str, remedy: str) -> None:
    (finding,) = gpu_driver(node(commands={SMI: answer}, gpus=8))
    assert finding.code == "gpu-driver-fails"
    assert remedy in finding.remedy
    assert finding.evidence == tuple(answer.splitlines() or ["nvidia-smi -q -x printed nothing"])
    with pytest.raises(NotLookedAt, match="see gpu-driver"):
        [*gpu_count(node(commands={SMI: answer}, gpus=8))]


def test_gpu_that_is_lost_next_to_others_fails(node: MakeNode) -> None:
    line = "Unable to determine the device handle for GPU0000:07:00.0: Unknown Error\n"
    (finding,) = gpu_driver(node(commands={SMI: line + board(gpus=7)}, gpus=7))
    assert (finding.code, finding.evidence) == ("gpu-driver-fails", (line.strip(),))


@pytest.mark.parametrize(
    ("field", "value", "code", "severity"),
    [
        ("gpu_recovery_action", "Reset", "gpu-recovery-required", Severity.ERROR),
        ("vbios_version", "GPU is lost", "gpu-not-answering", Severity.ERROR),
        ("fan_speed", "[GPU requires reset]", "gpu-not-answering", Severity.ERROR),
        ("fan_speed", "ERR!", "gpu-values-unreadable", Severity.WARNING),
    ],
)
def test_gpu_that_the_driver_gives_up_is_named(
    node: MakeNode, field: str, value: str, code: str, severity: Severity
) -> None:
    (finding,) = gpu_driver(node(commands={SMI: board({3: {field: value}})}, gpus=8))
    assert (finding.code, finding.severity, finding.where) == (code, severity, "GPU 3")
    assert "00000000:1C:00.0" in finding.evidence[0]


def test_corrupted_inforom_is_a_warning(node: MakeNode) -> None:
    text = board() + "WARNING: infoROM is corrupted at gpu 0000:3B:00.0\n"
    (finding,) = gpu_driver(node(commands={SMI: text}, gpus=8))
    assert (finding.code, finding.severity) == ("gpu-inforom-corrupted", Severity.WARNING)


@pytest.mark.parametrize(
    ("files", "severity"), [({"run/nvidia-persistenced/socket": ""}, Severity.ERROR), ({}, Severity.WARNING)]
)
def test_driver_that_hangs_fails_unless_it_may_only_be_slow(
    node: MakeNode, files: dict[str, str], severity: Severity
) -> None:
    view = node(files, {SMI: TimeoutError("`nvidia-smi -q -x` has not answered within 6 s")}, gpus=8)
    (finding,) = gpu_driver(view)
    assert (finding.code, finding.severity) == ("gpu-driver-hangs", severity)
    with pytest.raises(NotLookedAt, match="not answered within 6 s: see gpu-driver"):
        [*gpu_count(view)]


def test_node_without_driver_fails(node: MakeNode) -> None:
    assert codes([*gpu_driver(node({"dev/null": ""}, gpus=8))]) == ["gpu-driver-missing"]


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        (DEVICES, "there is no program `nvidia-smi`; a container gets nvidia-smi with NVIDIA_DRIVER_CAPABILITIES"),
        ({"proc/driver/nvidia/version": ""}, "NVIDIA_DRIVER_CAPABILITIES"),
        ({"dev/kfd": ""}, "not NVIDIA's"),
        ({"dev/dxg": ""}, "WSL"),
    ],
)
def test_gpus_that_nvidia_smi_cannot_show_are_not_looked_at(node: MakeNode, files: dict[str, str], reason: str) -> None:
    with pytest.raises(NotLookedAt, match=reason):
        [*gpu_driver(node(files, gpus=8))]


def test_broken_answer_is_no_missing_driver(node: MakeNode) -> None:
    view = node(commands={SMI: A10G.replace("</gpu>", "")}, gpus=1)
    with pytest.raises(NotLookedAt, match=r"^the XML of nvidia-smi is broken: mismatched tag"):
        [*gpu_driver(view)]


@pytest.mark.parametrize(
    ("text", "gpus", "environ"),
    [
        (board(), 8, {}),
        (board(), 4, {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}),
        (A100_MIG, 4, {"CUDA_VISIBLE_DEVICES": "MIG-1c8b3f5e-7d2a-5a0e-9b42-3f0c7e1d2a90"}),
    ],
)
def test_enough_gpus_are_fine(node: MakeNode, text: str, gpus: int, environ: dict[str, str]) -> None:
    assert codes([*gpu_count(node(commands={SMI: text}, gpus=gpus, environ=environ))]) == []


def test_lost_gpu_is_missing_and_its_device_file_named(node: MakeNode) -> None:
    (finding,) = gpu_count(node(DEVICES, {SMI: board(gpus=7)}, gpus=8))
    assert (finding.code, finding.severity, finding.owner) == ("gpus-missing", Severity.ERROR, Owner.CLUSTER)
    assert finding.what == "the job needs 8 GPUs on each node, and this node has 7"
    assert finding.evidence[0] == "/dev/nvidia7 is not listed by nvidia-smi"


def test_gpus_hidden_by_the_environment_are_the_users(node: MakeNode) -> None:
    view = node(commands={SMI: board()}, gpus=8, environ={"CUDA_VISIBLE_DEVICES": "0,1"})
    (finding,) = gpu_count(view)
    assert (finding.code, finding.owner) == ("gpus-missing", Owner.USER)
    assert finding.evidence[0] == "CUDA_VISIBLE_DEVICES=0,1"


def test_device_file_that_the_job_does_not_need_is_a_warning(node: MakeNode) -> None:
    commands = {SMI: board(gpus=7)}
    (finding,) = gpu_count(node(DEVICES, commands, gpus=4))
    assert (finding.code, finding.severity, finding.where) == ("gpu-not-listed", Severity.WARNING, "/dev/nvidia7")
    assert codes([*gpu_count(node(DEVICES, commands, gpus=4, environ={"SLURM_JOB_ID": "77"}))]) == []
