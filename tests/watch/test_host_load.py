"""Disks and processors that are slow, by the files in which the kernel counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import pytest

from holdfast.watch.host_load import (
    CpuUse,
    DiskUse,
    cpu_symptoms,
    disk_symptoms,
    open_cpu_limit,
    open_disks,
    open_thermal_throttles,
    parse_cpu,
    parse_diskstats,
    thermal_symptoms,
)
from holdfast.watch.monitor import Comparison, SourceMissing

R = TypeVar("R")

# /proc/diskstats of a kernel 6.1.
DISKSTATS = """\
 259       0 nvme0n1 81924 1234 9876543 40960 65536 4321 8765432 90112 0 61440 131072 0 0 0 0 120 30
 259       1 nvme0n1p1 81000 1234 9876543 40960 65536 4321 8765432 90112 0 61440 131072 0 0 0 0 0 0
   7       0 loop0 12 0 0 9 0 0 0 0 0 0 0 0 0 0 0 0 0
   8      16 sdb 10 0 80 5 20 0 160 15 0 20 20 0 0 0 0 0 0
"""


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def codes(readings: Sequence[R], judge: Comparison[R], period_s: float = 5.0) -> list[str]:
    return [each.code for at, reading in enumerate(readings) for each in judge(reading, at * period_s)]


def test_whole_disks_are_read() -> None:
    assert parse_diskstats(DISKSTATS) == {
        "nvme0n1": DiskUse(requests=147460, waited_ms=131072),
        "sdb": DiskUse(requests=30, waited_ms=20),
    }


def test_disk_is_slow_whose_requests_wait_for_thirty_seconds() -> None:
    def readings(each_ms: int, count: int, requests: int = 10) -> list[Mapping[str, DiskUse]]:
        return [{"sda": DiskUse(requests=requests * n, waited_ms=each_ms * requests * n)} for n in range(count)]

    assert codes(readings(800, 20), Comparison(disk_symptoms)) == ["disk-slow"]
    assert codes(readings(800, 6), Comparison(disk_symptoms)) == []
    assert codes(readings(100, 20), Comparison(disk_symptoms)) == []
    assert codes(readings(9000, 20, requests=2), Comparison(disk_symptoms)) == []


def test_cpu_limit_that_is_met_all_the_time_is_named_and_so_are_busy_neighbours() -> None:
    limited = [CpuUse(periods=50 * n, throttled=20 * n) for n in range(20)]
    assert codes(limited, Comparison(cpu_symptoms)) == ["cpu-limit-reached"]
    assert codes([CpuUse(periods=50 * n, throttled=n) for n in range(20)], Comparison(cpu_symptoms)) == []
    assert codes([CpuUse(stalled_percent=35.0)] * 20, Comparison(cpu_symptoms)) == ["cpu-contended"]
    assert codes([CpuUse(stalled_percent=35.0)] * 5 + [CpuUse()] * 5, Comparison(cpu_symptoms)) == []


def test_cpu_cgroup_is_found_in_both_versions(tmp_path: Path) -> None:
    stat = "nr_periods 1200\nnr_throttled 340\nthrottled_usec 9\n"
    full = "some avg10=90.00 avg60=1.0 avg300=0.0 total=5\nfull avg10=22.50 avg60=1.0 avg300=0.0 total=5\n"
    assert parse_cpu(stat, full) == CpuUse(periods=1200, throttled=340, stalled_percent=22.5)
    for group, folder, pressure, stalled in (
        ("0::/kubepods/pod7\n", "sys/fs/cgroup/kubepods/pod7", full, 22.5),
        ("3:cpu,cpuacct:/job\n0::/\n", "sys/fs/cgroup/cpu/job", "", 0.0),
        ("0::/not/mounted/here\n", "sys/fs/cgroup", "", 0.0),
    ):
        root = tmp_path / folder.replace("/", "-")
        write(root / "proc/self/cgroup", group)
        write(root / folder / "cpu.stat", stat)
        write(root / folder / "cpu.pressure", pressure)
        expected = CpuUse(periods=1200, throttled=340, stalled_percent=stalled)
        assert open_cpu_limit(root).read(0.0) == expected


def test_hot_processor_is_named_once_for_each_package(tmp_path: Path) -> None:
    for cpu, package in ((0, 0), (1, 0), (2, 1)):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{cpu}"
        write(folder / "topology/physical_package_id", f"{package}\n")
        write(folder / "thermal_throttle/package_throttle_count", f"{10 * package}\n")
    source = open_thermal_throttles(tmp_path)
    assert len(source.read(0.0)) == 2
    hot = [{"0": 5, "1": 100 + 3 * n} for n in range(10)]
    assert codes(hot, Comparison(thermal_symptoms), 10.0) == ["cpu-throttled"]


@pytest.mark.parametrize("opened", [open_disks, open_cpu_limit, open_thermal_throttles])
def test_node_without_these_files_has_no_such_source(tmp_path: Path, opened: object) -> None:
    assert callable(opened)
    with pytest.raises(SourceMissing):
        opened(tmp_path)


def test_this_machine_s_own_disks_are_read() -> None:
    for use in open_disks(Path("/")).read(0.0).values():
        assert use.requests > 0
