"""The system call in which a real process sleeps, and what it is called on."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.host.system_calls import MAX_TARGET, system_call

Start = Callable[..., int]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts Python code that sleeps in a call; its pid, once it is there."""
    started: list[subprocess.Popen[bytes]] = []

    def begin(code: str, *argv: str, until: str) -> int:
        process = subprocess.Popen([sys.executable, "-I", "-S", "-c", code, *argv], stdin=subprocess.DEVNULL)
        started.append(process)
        deadline = time.monotonic() + 200
        while not system_call(process.pid).startswith(until):
            assert time.monotonic() < deadline, system_call(process.pid)
            time.sleep(0.01)
        return process.pid

    yield begin
    for process in started:
        process.kill()
        process.wait()


def test_read_of_a_file_that_never_answers_has_its_path(tmp_path: Path, start: Start) -> None:
    os.mkfifo(pipe := tmp_path / "shard-7")
    keep_open = os.open(pipe, os.O_RDWR)
    pid = start("import sys; open(sys.argv[1], 'rb', 0).read(1)", str(pipe), until="read")
    assert system_call(pid) == f"read of {pipe}"
    os.close(keep_open)


def test_long_path_keeps_its_end(tmp_path: Path, start: Start) -> None:
    folder = tmp_path / ("a" * 200) / ("b" * 200)
    folder.mkdir(parents=True)
    os.mkfifo(pipe := folder / "shard")
    keep_open = os.open(pipe, os.O_RDWR)
    pid = start("import sys; open(sys.argv[1], 'rb', 0).read(1)", str(pipe), until="read")
    assert system_call(pid) == f"read of …{str(pipe)[-MAX_TARGET:]}"
    os.close(keep_open)


def test_connection_has_its_other_end(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = "import socket, sys; socket.create_connection(('127.0.0.1', int(sys.argv[1]))).recv(1)"
        pid = start(code, str(port), until="recvfrom of a connection")
        assert system_call(pid) == f"recvfrom of a connection to 127.0.0.1:{port}"


def test_lock_of_another_process_and_waits_for_children_and_threads(tmp_path: Path, start: Start) -> None:
    lock = tmp_path / "lock"
    take = "import fcntl, os, sys, time; file = open(sys.argv[1], 'w'); fcntl.flock(file, fcntl.LOCK_EX); "
    start(take + "time.sleep(600)", str(lock), until="clock_nanosleep (a sleep)")
    pid = start(take, str(lock), until="flock")
    assert system_call(pid) == f"flock of {lock}"
    start("import threading; threading.Lock().acquire() and threading.Semaphore(0).acquire()", until="futex (a lock")
    # Killed with the parent that waits for it: its pipe ends.
    start("import os; r, w = os.pipe(); os.fork() or (os.close(w), os.read(r, 1)); os.wait()", until="wait4 (a child")


def test_process_that_computes_or_is_gone_sleeps_in_no_call(start: Start) -> None:
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", "print(flush=True)\nwhile True: pass"], stdout=-1) as busy:
        assert busy.stdout is not None
        busy.stdout.readline()
        assert system_call(busy.pid) == ""
        busy.kill()
    assert system_call(busy.pid) == ""
