"""Memory that runs short, by recorded trees of cgroup v2 and by a real group of v1, before anything is killed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.host.memory_usage import MemoryUsage, cgroup_usage
from holdfast.watch.memory_pressure import POLL_S, memory_symptoms, read_tightest
from holdfast.watch.monitor import Comparison

GIB = 1 << 30
MEMINFO = "MemTotal:       67108864 kB\nMemFree:         1048576 kB\nMemAvailable:   33554432 kB\nBuffers: 0 kB\n"

# memory.pressure as recorded under a kernel 6.1, in a group that thrashes.
PSI = "some avg10=61.07 avg60=21.55 avg300=5.12 total=9123456\nfull avg10=42.31 avg60=15.02 avg300=3.93 total=7123456\n"
CALM = "some avg10=0.00 avg60=0.00 avg300=0.00 total=0\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"


def machine(root: Path, group: str) -> None:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(group)
    (root / "proc/meminfo").write_text(MEMINFO)


def second(root: Path, path: str, *, used: int, limit: str, idle: int = 0, psi: str = CALM) -> Path:
    """A group of cgroup v2."""
    folder = root / "sys/fs/cgroup" / path
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.events").write_text("oom_kill 0\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.stat").write_text(f"anon {used - idle}\nfile {idle}\ninactive_file {idle}\n")
    (folder / "memory.pressure").write_text(psi)
    return folder


def test_group_s_own_limit_is_what_counts_without_what_can_be_dropped(tmp_path: Path) -> None:
    machine(tmp_path, "0::/job\n")
    folder = second(tmp_path, "job", used=8 * GIB, limit=str(10 * GIB), idle=2 * GIB)
    assert read_tightest(tmp_path) == MemoryUsage(where=str(folder), used_bytes=6 * GIB, limit_bytes=10 * GIB)


def test_tightest_of_the_parent_groups_is_reported(tmp_path: Path) -> None:
    machine(tmp_path, "0::/kubepods/pod7/c1\n")
    second(tmp_path, "kubepods/pod7/c1", used=4 * GIB, limit="max")
    pod = second(tmp_path, "kubepods/pod7", used=31 * GIB, limit=str(32 * GIB))
    assert read_tightest(tmp_path).where == str(pod)


def test_without_a_limit_the_machine_s_own_figures_count(tmp_path: Path) -> None:
    machine(tmp_path, "0::/job\n")
    second(tmp_path, "job", used=4 * GIB, limit="max")
    assert read_tightest(tmp_path) == MemoryUsage(where="this machine", used_bytes=32 * GIB, limit_bytes=64 * GIB)


def test_memory_stall_is_reported_at_any_use(tmp_path: Path) -> None:
    machine(tmp_path, "0::/job\n")
    second(tmp_path, "job", used=4 * GIB, limit=str(10 * GIB), psi=PSI)
    assert read_tightest(tmp_path).stalled == 42.31


def test_limit_of_v1_that_is_none_is_no_limit(tmp_path: Path) -> None:
    machine(tmp_path, "4:memory:/job\n0::/\n")
    folder = tmp_path / "sys/fs/cgroup/memory/job"
    folder.mkdir(parents=True)
    (folder / "memory.oom_control").write_text("oom_kill 0\n")
    (folder / "memory.usage_in_bytes").write_text(str(4 * GIB))
    (folder / "memory.limit_in_bytes").write_text("9223372036854771712")
    (folder / "memory.stat").write_text("total_inactive_file 0\n")
    assert read_tightest(tmp_path).where == "this machine"


@pytest.mark.parametrize(
    ("parts", "count"),
    [([0.5, 0.9, 0.91], 0), ([0.5, 0.95, 0.99, 0.93], 1), ([0.95, 0.9, 0.95, 0.88, 0.95], 1), ([0.95, 0.8, 0.95], 2)],
)
def test_memory_pressure_is_reported_once_until_relieved(parts: list[float], count: int) -> None:
    judge = Comparison(memory_symptoms)
    readings = [MemoryUsage(where="g", used_bytes=int(part * GIB), limit_bytes=GIB) for part in parts]
    found = [symptom for at_s, reading in enumerate(readings) for symptom in judge(reading, at_s * POLL_S)]
    assert [each.code for each in found] == ["memory-pressure"] * count


@pytest.fixture
def group() -> Iterator[Path]:
    """A real memory group of cgroup v1."""
    top = Path("/sys/fs/cgroup/memory")
    if os.geteuid() != 0 or not (top / "memory.limit_in_bytes").is_file():
        pytest.skip("needs root and a cgroup v1 memory controller")
    folder = top / f"holdfast-pressure-{os.getpid()}"
    folder.mkdir()
    try:
        yield folder
    finally:
        folder.rmdir()


def test_real_group_that_fills_up_is_read(group: Path) -> None:
    (group / "memory.limit_in_bytes").write_text(str(128 << 20))
    memory_hog = (
        "import sys; sys.stdin.readline(); hoard = bytes(range(256)) * (400 << 10); print(1, flush=True); input()"
    )
    with subprocess.Popen([sys.executable, "-c", memory_hog], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        (group / "cgroup.procs").write_text(str(process.pid))
        assert process.stdin is not None
        assert process.stdout is not None
        before = cgroup_usage(group)
        process.stdin.write(b"\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"1\n"
        after = cgroup_usage(group)
        process.kill()
    assert before is not None
    assert after is not None
    assert after.limit_bytes == 128 << 20
    assert before.used_fraction < 0.3
    assert after.used_fraction > 0.75
