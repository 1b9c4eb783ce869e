"""Where a process can be limited to its own memory: recorded trees of cgroup v2, a real group of v1."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.host import cgroups
from holdfast.host.cgroups import (
    CgroupParent,
    all_members,
    cgroup_parent,
    confine,
    enter,
    kill,
    members,
    memory_group,
    remove,
    tracking_group,
)
from holdfast.host.memory_usage import memory_usages


def tree(root: Path, own: str, *, divided: str = "cpu memory pids") -> Path:
    """A machine of cgroup v2, as recorded under systemd 252, whose process is in a group; the group above it."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(f"0::/{own}\n")
    folder = root / "sys/fs/cgroup" / own
    folder.mkdir(parents=True)
    (folder / "memory.events").write_text("oom_kill 0\n")
    (folder.parent / "cgroup.procs").touch()
    (folder.parent / "cgroup.subtree_control").write_text(f"{divided}\n")
    return folder.parent


APP = "user.slice/user-1000.slice/user@1000.service/app.slice"


def test_groups_of_v2_are_made_beside_the_own_one(tmp_path: Path) -> None:
    above = tree(tmp_path, f"{APP}/run-7.scope")
    where = cgroup_parent(tmp_path)
    assert where == CgroupParent(path=above, is_v2=True)
    group = where.group("run-1")
    confine(42, group, 1 << 30, is_v2=True)
    written = {path.name: path.read_text() for path in group.iterdir()}
    assert written == {"memory.max": str(1 << 30), "memory.swap.max": "0", "cgroup.procs": "42"}


def test_process_in_a_group_without_memory_of_its_own_is_held_to_the_limit_above(tmp_path: Path) -> None:
    node = tree(tmp_path, f"{APP}/holdfast-run-0.0") / "holdfast-run-0.0"
    (node / "holdfast-run-0-0-0-42").mkdir()
    (tmp_path / "proc/self/cgroup").write_text(f"0::/{APP}/holdfast-run-0.0/holdfast-run-0-0-0-42\n")
    assert memory_group(tmp_path) == node
    (tmp_path / "proc/meminfo").write_text("MemTotal: 4096 kB\nMemAvailable: 4096 kB\n")
    for name, text in {"current": "1", "max": "1048576", "stat": "inactive_file 0"}.items():
        (node / f"memory.{name}").write_text(f"{text}\n")
    assert [reading.limit_bytes for reading in memory_usages(tmp_path)] == [4096 * 1024, 1 << 20]


def test_group_of_v2_without_memory_to_divide_is_said(tmp_path: Path) -> None:
    tree(tmp_path, f"{APP}/run-7.scope", divided="pids")
    assert "does not divide memory" in str(cgroup_parent(tmp_path))


def test_container_of_v2_that_sees_only_its_own_group_is_said(tmp_path: Path) -> None:
    tree(tmp_path, "")
    assert "has processes" in str(cgroup_parent(tmp_path))


def test_group_that_may_not_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    above = tree(tmp_path, f"{APP}/run-7.scope")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert cgroup_parent(tmp_path) == f"{above} may not be written"


def test_machine_without_groups_is_said(tmp_path: Path) -> None:
    assert "no memory group" in str(cgroup_parent(tmp_path))


@pytest.mark.root
@pytest.mark.skipif(not Path("/sys/fs/cgroup/memory").is_dir(), reason="needs a cgroup v1 memory controller")
def test_process_in_a_real_group_is_ended_at_its_limit_with_its_children() -> None:
    where = cgroup_parent()
    assert isinstance(where, CgroupParent)
    group = where.group(f"test-{os.getpid()}")
    memory_hog = "import sys, os; sys.stdin.readline(); os.fork(); hoard = b'x' * (256 << 20)"
    with subprocess.Popen([sys.executable, "-c", memory_hog], stdin=subprocess.PIPE) as process:
        confine(process.pid, group, 64 << 20, is_v2=where.is_v2)
        assert members(group) == [process.pid]
        process.communicate(b"\n")
    assert process.returncode == -9
    remove(group)
    assert not group.exists()
    assert members(group) == []
    remove(group)


def test_group_that_stays_full_is_left_and_nothing_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroups, "_REMOVE_TIMEOUT_S", 0.0)
    (tmp_path / "cgroup.procs").touch()
    remove(tmp_path)
    assert tmp_path.exists()


def test_group_that_tracks_processes_is_made_below_the_own_one_of_v2(tmp_path: Path) -> None:
    own = tree(tmp_path, f"{APP}/run-7.scope") / "run-7.scope"
    (tmp_path / "proc/self/mountinfo").write_text(
        "31 23 0:28 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
    )
    (own / "cgroup.procs").write_text(f"7\n{os.getpid()}\n")
    assert tracking_group("run-1", tmp_path) == own / "holdfast-run-1"
    (own / "cgroup.subtree_control").write_text("memory\n")
    assert tracking_group("run-1", tmp_path) is None  # no process may be beside groups that have controllers


def test_process_that_forks_without_end_is_killed_with_its_group(tmp_path: Path) -> None:
    group = tracking_group(f"test-{os.getpid()}")
    if group is None:
        pytest.skip("needs a cgroup v2 below which groups can be made")
    group.mkdir()
    ready, begun = os.pipe()
    code = "import os, sys\nos.write(int(sys.argv[1]), b'!')\nwhile True: os.fork() and os._exit(0)"
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(begun)],
            preexec_fn=lambda: enter(group),  # noqa: PLW1509 - no other threads
            pass_fds=(begun,),
        )
        process.wait()
        assert os.read(ready, 1) == b"!"
        assert all_members(group)
    finally:
        kill(group)
        remove(group)
    assert not group.exists()
