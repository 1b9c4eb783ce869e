"""Who holds a GPU's memory, from what nvidia-smi prints, by way of a program that stands in for it."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from holdfast.agent.gpu_memory import GpuMemoryUse, foreign_memory_use, parse_gpus, parse_memory_use, visible_gpus

# Forms as drivers 470 to 570 print them; the line with process 40170 is that of NVIDIA/nvidia-docker issue 1483.
GPUS = """\
0, GPU-4f1c2a66-8b1e-2f0d-9d0c-5f6d3a7c1b2e, 38120, Disabled
1, GPU-9a77b1d0-3c55-7a3e-1f10-0c2a9be41d77, 4, Disabled
2, GPU-c0ffee00-1111-2222-3333-444455556666, 40536, Enabled
3, GPU-d0d0d0d0-1111-2222-3333-444455556666, [N/A], [N/A]
"""
APPS = """\
GPU-4f1c2a66-8b1e-2f0d-9d0c-5f6d3a7c1b2e, 40170, /opt/rh/rh-python38/root/usr/bin/python3, 185
GPU-4f1c2a66-8b1e-2f0d-9d0c-5f6d3a7c1b2e, 40171, /usr/bin/my, odd, name, 37000
GPU-c0ffee00-1111-2222-3333-444455556666, 512, python, 40000
GPU-d0d0d0d0-1111-2222-3333-444455556666, 77, [Not Found], [N/A]
"""


def told(visible: str | None, apps: str = APPS, ours: tuple[int, ...] = ()) -> list[str]:
    return [str(one) for one in parse_memory_use(visible_gpus(parse_gpus(GPUS), visible), apps, ours)]


def test_foreign_processes_are_listed_with_pid_command_and_memory() -> None:
    assert told("0") == [
        "GPU 0: 185 MiB held by process 40170 (/opt/rh/rh-python38/root/usr/bin/python3)",
        "GPU 0: 37,000 MiB held by process 40171 (/usr/bin/my, odd, name)",
    ]


def test_our_own_processes_are_left_out() -> None:
    assert told("0", ours=(40170, 40171)) == []


def test_memory_of_no_process_is_reported_beyond_the_drivers_own() -> None:
    assert told("0,1", apps="") == ["GPU 0: 38,120 MiB held by no process that can be seen"]


def test_unknown_figures_and_names_are_shown_as_unknown() -> None:
    assert told("3") == ["GPU 3: an unknown amount held by process 77 ([Not Found])"]


def test_divided_gpu_is_left_out() -> None:
    assert told("2") == []


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("-1", []),
        ("1,0", [0, 1]),
        ("GPU-9a77b1d0-3c55-7a3e-1f10-0c2a9be41d77", [1]),
        ("GPU-9a77", [1]),
        ("MIG-9a77b1d0-3c55-7a3e-1f10-0c2a9be41d77", []),
    ],
)
def test_gpus_are_chosen_as_cuda_names_them(visible: str | None, indices: list[int]) -> None:
    assert [gpu.index for gpu in visible_gpus(parse_gpus(GPUS), visible)] == indices


@pytest.mark.parametrize(
    "text", ["", "No devices were found\n", "NVIDIA-SMI has failed because it couldn't\n", "a, b\n"]
)
def test_answer_that_is_no_list_of_gpus_is_none(text: str) -> None:
    assert parse_gpus(text) == ()
    assert parse_memory_use(parse_gpus(GPUS), text, ())[0].pid is None


def nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Put a program of that name first on PATH."""
    program = folder / "bin" / "nvidia-smi"
    program.parent.mkdir(exist_ok=True)
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")


def answering(folder: Path, gpus: str, apps: str) -> str:
    (folder / "gpus").write_text(gpus)
    (folder / "apps").write_text(apps)
    return f'case "$1" in --query-gpu=*) cat {folder}/gpus;; --query-compute-apps=*) cat {folder}/apps;; esac'


def looked(visible: str | None = None) -> tuple[GpuMemoryUse, ...]:
    return asyncio.run(foreign_memory_use(visible))


def test_program_is_queried_and_its_output_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia_smi(tmp_path, monkeypatch, answering(tmp_path, GPUS, APPS))
    assert [one.pid for one in looked("0")] == [40170, 40171]


def test_failing_program_reports_no_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia_smi(tmp_path, monkeypatch, "echo 'NVIDIA-SMI has failed'; exit 9")
    assert looked() == ()


def test_node_without_the_program_has_no_such_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert looked() == ()
