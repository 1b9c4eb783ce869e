"""What a silent rank's process does: work keeps it from counting as hung."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager

from tests.waiting import until

from holdfast.agent.process_use import ProcessUse, Silence, classify_silence, is_busy, process_use, waits_for_peers
from holdfast.events import GroupCollectives

IDLE = ProcessUse(at=10.0, cpu_s=5.0, io_bytes=1000)


def test_cpu_data_or_a_disk_make_a_process_busy() -> None:
    cases = {
        "nothing": (ProcessUse(at=11.0, cpu_s=5.0, io_bytes=1000), False),
        "watchdog threads": (ProcessUse(at=11.0, cpu_s=5.02, io_bytes=1000), False),
        "heartbeats": (ProcessUse(at=11.0, cpu_s=5.0, io_bytes=1500), False),
        "computes": (ProcessUse(at=11.0, cpu_s=5.3, io_bytes=1000), True),
        "uploads": (ProcessUse(at=11.0, cpu_s=5.0, io_bytes=1_000_000), True),
        "child with CPU time has ended": (ProcessUse(at=11.0, cpu_s=1.0, io_bytes=1000), True),
        "disk": (ProcessUse(at=11.0, cpu_s=5.0, io_bytes=1000, waits_for_disk=True), True),
    }
    assert {name: is_busy(IDLE, after) for name, (after, _) in cases.items()} == {
        name: busy for name, (_, busy) in cases.items()
    }


def test_silence_is_told_by_state_recorder_work_and_frame() -> None:
    waiting = "all_reduce (torch/distributed/distributed_c10d.py:3007)"
    pending = (GroupCollectives(group="0", pending=3),)
    assert classify_silence(state="T", busy=False, top_frame=waiting) is Silence.STOPPED
    assert classify_silence(state="R", busy=True, top_frame="item (train.py:3)") is Silence.BUSY
    assert classify_silence(state="R", busy=True, top_frame="", collectives=pending) is Silence.WAITING_FOR_PEERS
    assert classify_silence(state="S", busy=False, top_frame=waiting) is Silence.WAITING_FOR_PEERS
    assert classify_silence(state="S", busy=False, top_frame="read (ssl.py:1166)") is Silence.IDLE
    assert classify_silence(state="S", busy=False, top_frame="") is Silence.IDLE


def test_frames_of_locks_and_pipes_are_no_wait_for_peers() -> None:
    assert waits_for_peers("_engine_run_backward (torch/autograd/graph.py:865)")
    for frame in ("wait (threading.py:327)", "wait (multiprocessing/connection.py:948)", "all_reduce (mine.py:3)"):
        assert not waits_for_peers(frame)


@contextmanager
def program(text: str) -> Generator[int]:
    with subprocess.Popen(
        [sys.executable, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdout is not None
        try:
            process.stdout.readline()
            yield process.pid
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def test_work_of_a_child_counts_for_its_parent() -> None:
    child = "import sys; print(flush=True)\nwhile True: sys.stdin"
    with program(f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])") as pid:
        before = process_use(pid)
        until(lambda: is_busy(before, process_use(pid)))


def test_process_that_sleeps_uses_nothing() -> None:
    with program("import signal; print(flush=True); signal.pause()") as pid:
        before, after = process_use(pid), process_use(pid)
        assert after.io_bytes == before.io_bytes
        assert not is_busy(before, after)
