"""Parsing py-spy's output for the position of a rank's main thread."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.agent import stack_dump
from holdfast.agent.stack_dump import MAX_DUMP_BYTES, StackDump, commit_line, dump_native_stacks, dump_stacks
from holdfast.protocol.wait_frames import FOR_REPLICAS

AT_ITS_END = """Process 811: python train.py 100
Python v3.11.7 (/usr/bin/python3.11)

Thread 811 (idle): "MainThread"
    _all_reduce_alone (/opt/venv/lib/python3.11/site-packages/holdfast/train/ft/rank_faults.py:41)
    inject (/opt/venv/lib/python3.11/site-packages/holdfast/train/ft/rank_faults.py:24)
    next_action (/opt/venv/lib/python3.11/site-packages/holdfast/train/session/rank_coordinator.py:166)
    commit (/opt/venv/lib/python3.11/site-packages/holdfast/train/session/session.py:232)
    <module> (/home/ada/train.py:27)
Thread 812 (idle): "Thread-1 (run)"
    end_step (/opt/venv/lib/python3.11/site-packages/holdfast/train/ft/replica_strategy.py:120)
"""
BEFORE_ITS_REPORT = AT_ITS_END.replace(
    "next_action (/opt/venv/lib/python3.11/site-packages/holdfast/train/session/rank_coordinator.py:166)",
    "end_step (/opt/venv/lib/python3.11/site-packages/holdfast/train/ft/replica_strategy.py:230)",
)
IN_THE_LOOP = AT_ITS_END.replace("commit (", "forward (")
OF_ANOTHER = """Thread 811 (idle): "MainThread"
    step (/home/ada/train.py:9)
Thread 812 (idle): "Thread-1"
    commit (/opt/venv/lib/python3.11/site-packages/holdfast/train/session/session.py:232)
"""


@pytest.mark.parametrize(
    ("dump", "line"),
    [(AT_ITS_END, 232), (BEFORE_ITS_REPORT, 0), (IN_THE_LOOP, 0), (OF_ANOTHER, 0), ("", 0)],
    ids=["past its report", "before it", "in the loop", "another thread", "nothing"],
)
def test_line_of_commit_is_that_of_the_main_thread_past_its_report(dump: str, line: int) -> None:
    assert commit_line(dump) == line


def replace_py_spy(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Have a shell script stand for py-spy."""
    (program := folder / "py-spy").write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))


def taken(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> StackDump:
    """What is taken with a py-spy that is this shell script."""
    replace_py_spy(folder, monkeypatch, script)
    return asyncio.run(dump_stacks(1, folder / "stacks.txt", stopped=False))


WAITS = """
import sys, threading  # the latter names the main thread
from holdfast.protocol.wait_frames import FOR_REPLICAS, marked
class Group:
    @marked(FOR_REPLICAS)
    def renamed(self):
        print("here", flush=True)
        sys.stdin.read()
Group().renamed()
"""


def test_mark_of_a_frame_is_in_a_real_dump(tmp_path: Path) -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", WAITS], stdin=pipe, stdout=pipe) as rank:
        assert rank.stdout is not None
        rank.stdout.readline()
        told = asyncio.run(dump_stacks(rank.pid, tmp_path / "stacks.txt"))
        rank.communicate()
    assert told.top_frame.startswith(f"Group.renamed{FOR_REPLICAS} (")


def test_dump_without_end_is_cut_and_its_beginning_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack_dump, "DUMP_TIMEOUT_S", 200.0)
    (tmp_path / "dump").write_text(AT_ITS_END)
    told = taken(tmp_path, monkeypatch, f"cat {tmp_path}/dump; exec yes")
    assert told.commit_line == 232
    assert (tmp_path / "stacks.txt").stat().st_size == MAX_DUMP_BYTES


def test_dump_that_fails_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert taken(tmp_path, monkeypatch, "echo half; exit 1") == StackDump()


SLEEPS_IN_C = """
import ctypes, threading
def work():
    print("here", flush=True)
    ctypes.CDLL(None).sleep(600)
work()
"""


def test_call_of_c_in_which_a_real_process_hangs_is_in_its_native_frames(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", SLEEPS_IN_C], stdout=subprocess.PIPE) as rank:
        assert rank.stdout is not None
        rank.stdout.readline()
        try:
            native = asyncio.run(dump_native_stacks(rank.pid, tmp_path / "native.txt"))
            plain = asyncio.run(dump_stacks(rank.pid, tmp_path / "plain.txt"))
            os.kill(rank.pid, signal.SIGSTOP)
            stopped = asyncio.run(dump_native_stacks(rank.pid, tmp_path / "stopped.txt", stopped=True))
        finally:
            rank.kill()
    assert native.native is not None, native.native_missing
    assert any(frame.startswith("sleep (libc") for frame in native.native), native.native
    assert "sleep (" in (tmp_path / "native.txt").read_text()
    assert (native.frames, native.top_frame) == (plain.frames, plain.top_frame)
    assert (plain.native, plain.native_missing) == (None, "")
    assert (stopped.frames, stopped.native) == (plain.frames, None)
    assert "stopped process" in stopped.native_missing


@pytest.mark.parametrize(
    ("refusal", "reason"),
    [
        ("Permission Denied: Try running again with elevated permissions by going 'sudo'", "capability SYS_PTRACE"),
        ("error: unexpected argument '--native' found", "this build of py-spy reads Python frames only"),
        ("Error: Failed to get stack traces", "py-spy failed: Error: Failed to get stack traces"),
    ],
)
def test_native_frames_that_are_refused_leave_the_python_stack_and_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: str, reason: str
) -> None:
    (tmp_path / "dump").write_text(AT_ITS_END)
    script = f'case "$*" in *--native*) echo "{refusal}" >&2; exit 1;; esac; cat {tmp_path}/dump'
    replace_py_spy(tmp_path, monkeypatch, script)
    told = asyncio.run(dump_native_stacks(1, tmp_path / "stacks.txt"))
    assert (told.commit_line, told.native) == (232, None)
    assert reason in told.native_missing
