"""OOM kills, detected from recorded cgroup trees and recorded kernel lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.agent import oom
from holdfast.agent.oom import OomSnapshot, oom_evidence, oom_snapshot

V2_EVENTS = "low 0\nhigh 0\nmax 31\noom {kills}\noom_kill {kills}\noom_group_kill 0\n"
V1_CONTROL = "oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n"

# /proc/self/cgroup as recorded in: a systemd host; a container with its own cgroup namespace; a container of cgroup v1,
# which sees its host's path; a host with both.
TREES = {
    "v2": ("0::/user.slice/session-1.scope\n", "user.slice/session-1.scope/memory.events", V2_EVENTS),
    "v2-container": ("0::/\n", "memory.events", V2_EVENTS),
    "v2-container-with-the-hosts-path": ("0::/kubepods/pod7/c1\n", "memory.events", V2_EVENTS),
    "v1": ("9:name=systemd:/x\n4:memory:/jobs/a:b\n1:cpu:/\n0::/\n", "memory/jobs/a:b/memory.oom_control", V1_CONTROL),
    "v1-container-with-the-hosts-path": ("4:memory:/docker/abc\n", "memory/memory.oom_control", V1_CONTROL),
    "v1-joint": ("4:cpu,memory:/x\n", "memory/x/memory.oom_control", V1_CONTROL),
}


def grow(root: Path, tree: str, kills: int) -> Path:
    groups, counter, text = TREES[tree]
    path = root / "sys/fs/cgroup" / counter
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text.format(kills=kills))
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    (root / "proc/self/cgroup").write_text(groups)
    return path


@pytest.fixture(autouse=True)
def kernel_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oom, "_kernel_line", lambda pid, since_us: "")


@pytest.mark.parametrize("tree", TREES)
def test_kill_counted_by_the_cgroup_since_the_start_is_evidence(tmp_path: Path, tree: str) -> None:
    counter = grow(tmp_path, tree, 2)
    witness = oom_snapshot(tmp_path)
    assert oom_evidence(witness, 42) == ""
    grow(tmp_path, tree, 3)
    assert oom_evidence(witness, 42) == f"{counter}: oom_kill rose from 2 to 3"


def test_tree_without_a_counter_gives_no_evidence(tmp_path: Path) -> None:
    assert oom_evidence(oom_snapshot(tmp_path), 42) == ""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/gone\n")
    assert oom_evidence(oom_snapshot(tmp_path), 42) == ""


def test_counter_that_vanishes_gives_no_evidence(tmp_path: Path) -> None:
    counter = grow(tmp_path, "v2", 2)
    witness = oom_snapshot(tmp_path)
    counter.unlink()
    assert oom_evidence(witness, 42) == ""


def test_this_machines_own_cgroup_is_read_without_failing() -> None:
    assert isinstance(oom_snapshot(), OomSnapshot)


GROUP = "Memory cgroup out of memory: Killed process 4242 (python) total-vm:9kB, anon-rss:8kB"
MACHINE = "Out of memory: Killed process 4242 (python) total-vm:9kB, anon-rss:8kB"


@pytest.mark.parametrize(
    "line", [GROUP, MACHINE, "Out of memory: Kill process 4242 (python) score 9 or sacrifice child"]
)
def test_kernels_word_about_the_process_is_evidence(line: str) -> None:
    assert oom._kill_line(f"[12.5] {line}", 4242) == line


@pytest.mark.parametrize(
    "text",
    [GROUP.replace("4242", "42421"), "python[4242]: segfault at 0", ""],
    ids=["another process", "another end", "nothing"],
)
def test_kernels_word_about_anything_else_is_none(text: str) -> None:
    assert oom._kill_line(text, 4242) == ""
