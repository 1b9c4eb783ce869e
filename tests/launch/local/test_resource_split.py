"""A machine divided among the nodes of a job: no GPU belongs to two of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.job.spec import Job
from holdfast.launch.local.resource_split import split_machine, visible_devices


def devices_of(devices: tuple[str, ...], **fields: Any) -> list[tuple[str, ...] | None]:
    job = Job.model_validate({"command": "true", **fields})
    return [share.devices for share in split_machine(job, cpus=8, devices=devices)]


def test_cores_divided_evenly() -> None:
    job = Job.model_validate({"command": "true", "nodes": 4})
    assert [share.cpus for share in split_machine(job, cpus=6, devices=())] == [1.5] * 4


def test_every_node_gets_gpus_of_its_own() -> None:
    assert devices_of(("0", "1"), nodes=2, gpus_per_node=1) == [("0",), ("1",)]
    assert devices_of(("4", "GPU-a", "6", "7"), nodes=2, gpus_per_node=2) == [("4", "GPU-a"), ("6", "7")]


def test_gpus_not_asked_for_hidden() -> None:
    assert devices_of(("0", "1"), nodes=2) == [(), ()]


def test_machine_without_gpus_leaves_the_choice_alone() -> None:
    assert devices_of((), nodes=2) == [None, None]


@pytest.mark.parametrize(
    ("visible", "expected"),
    [(None, ("0", "1")), ("1", ("1",)), ("GPU-a, 0", ("GPU-a", "0")), ("", ()), ("-1", ()), ("1,-1,0", ("1",))],
)
def test_visible_devices_are_the_device_files_unless_the_environment_names_them(
    tmp_path: Path, visible: str | None, expected: tuple[str, ...]
) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert visible_devices(environ, tmp_path) == expected
