"""Process trees ended whole, daemons included, and processes that cannot be mistaken for one another."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.waiting import until

from holdfast.host.processes import (
    ProcessId,
    adopt_orphans,
    by_env,
    descendants,
    identify,
    kill_all,
    machine_id,
    send_signal,
    started_at,
    state_letter,
    stop_processes,
    undo_later,
)

# Says the pid of a daemon: a grandchild in a session of its own, whose parent has gone by the time it is said.
DAEMONISER = """
import subprocess, sys, time
middle = "import subprocess as s; print(s.Popen(['sleep', '600'], start_new_session=True, stdout=2).pid)"
print(subprocess.run([sys.executable, "-c", middle], stdout=subprocess.PIPE, text=True).stdout, flush=True)
time.sleep(600)
"""


@pytest.fixture
def mark() -> Iterator[str]:
    adopt_orphans()
    name = f"test-{os.getpid()}-{os.urandom(4).hex()}"
    yield name
    kill_all(lambda: by_env(descendants(os.getpid()), HOLDFAST_TEST=name), within_s=200)


def start(mark: str, *argv: str) -> subprocess.Popen[str]:
    return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=os.environ | {"HOLDFAST_TEST": mark})


def test_daemon_is_found_by_its_mark_and_ended_with_the_rest(mark: str) -> None:
    root = start(mark, sys.executable, "-c", DAEMONISER)
    assert root.stdout is not None
    daemon = int(root.stdout.readline())
    found = by_env(descendants(os.getpid()), HOLDFAST_TEST=mark)
    assert {root.pid, daemon} <= set(found)
    assert daemon not in descendants(root.pid)
    left = kill_all(lambda: by_env(descendants(os.getpid()), HOLDFAST_TEST=mark), within_s=200)
    assert left == []
    assert identify(daemon) is None
    assert state_letter(daemon) == "", "an adopted orphan is left as a zombie"
    root.wait()
    root.stdout.close()


def test_tree_that_grows_while_it_is_ended_is_ended_whole(mark: str) -> None:
    root = start(mark, "sh", "-c", "echo; while :; do setsid sleep 600 & done")
    assert root.stdout is not None
    root.stdout.readline()
    assert kill_all(lambda: by_env(descendants(os.getpid()), HOLDFAST_TEST=mark), within_s=200) == []
    assert by_env(descendants(os.getpid()), HOLDFAST_TEST=mark) == []
    root.wait()
    root.stdout.close()


def test_stopped_process_is_ended(mark: str) -> None:
    process = start(mark, "sleep", "600")
    os.kill(process.pid, signal.SIGSTOP)
    assert kill_all(lambda: by_env(descendants(os.getpid()), HOLDFAST_TEST=mark), within_s=200) == []
    assert process.stdout is not None
    process.stdout.close()


def test_marks_must_all_be_there_and_whole(mark: str) -> None:
    process = start(mark, "sh", "-c", "echo; exec sleep 600")
    assert process.stdout is not None
    process.stdout.readline()
    assert by_env([process.pid], HOLDFAST_TEST=mark) == [process.pid]
    assert by_env([process.pid], HOLDFAST_TEST=mark[:-1]) == []
    assert by_env([process.pid], HOLDFAST_TEST=mark, HOLDFAST_OTHER="1") == []
    process.kill()
    process.wait()
    process.stdout.close()


def test_zombie_counts_as_gone(mark: str) -> None:
    process = start(mark, "true")
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert state_letter(process.pid) == "Z"
    assert identify(process.pid) is None
    assert process.pid not in descendants(os.getpid())
    process.wait()


def test_later_process_of_the_same_number_is_another() -> None:
    here = identify(os.getpid())
    assert here is not None
    assert here.alive
    assert not ProcessId(here.pid, here.started - 1).alive


def test_process_that_is_gone_takes_no_signal(mark: str) -> None:
    process = start(mark, "true")
    process.wait()
    assert not send_signal(process.pid, signal.SIGKILL)
    assert started_at(process.pid) is None


def test_pause_ends_although_who_asked_for_it_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.kill

    def late(pid: int, number: int) -> None:
        time.sleep(3)
        real(pid, number)

    monkeypatch.setattr("holdfast.host.processes.os.kill", late)
    process = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    try:
        # A process that gets no CPU time during the pause is not stopped by it: the kernel drops the signal.
        stop_processes([process.pid], for_s=0.6)
        assert os.WIFCONTINUED(os.waitpid(process.pid, os.WCONTINUED)[1])  # which only one that was stopped is
    finally:
        real(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.parametrize(("end", "code"), [("", 0), ("os.kill(os.getpid(), signal.SIGKILL)", -9), ("sys.exit(5)", 5)])
def test_what_a_drill_changes_is_undone_however_its_process_ends(tmp_path: Path, end: str, code: int) -> None:
    changed = tmp_path / "changed"
    program = f"""
import os, pathlib, signal, sys
from holdfast.host.processes import undo_later
with undo_later(0.05, "rm", {str(changed)!r}):
    pathlib.Path({str(changed)!r}).touch()
    {end}
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == code
    assert until(lambda: not changed.exists())


def test_nothing_is_undone_before_the_change_is_complete(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    with undo_later(0, "touch", str(first)):
        with undo_later(0, "touch", str(second)):
            pass
        until(second.exists)
        assert not first.exists()
    assert until(first.exists)


def test_machine_is_named_by_its_boot_too() -> None:
    assert len(machine_id()["boot"]) == len("08fa787f-9c46-40fb-9f0a-3e7152f32723")
