"""Where a thread of a stack dump stands, and whether it waits for others there."""

from __future__ import annotations

import pytest

from holdfast.diagnose.frames import crashed_at, thread_position

SLEEPS = b"""    dream (/home/ada/train.py:20)
    main (/home/ada/train.py:35)
    <module> (/home/ada/train.py:41)
"""
SUMS = b"""    all_reduce (/opt/venv/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py:3211)
    wrapper (/opt/venv/lib/python3.12/site-packages/torch/distributed/c10d_logger.py:83)
    step (/home/ada/train.py:12)
"""
SHORT = b"""    all_reduce (torch/distributed/distributed_c10d.py:3211)
        Arguments:
            tensor: <Tensor at 0x7f>
    step (train.py:12)
"""
LOADS = b"""    wait (threading.py:359)
    get (queue.py:180)
    _try_get_data (torch/utils/data/dataloader.py:1284)
    next_batch (train.py:30)
"""
FAULT = b"""  File "/opt/venv/lib/python3.12/site-packages/torch/autograd/graph.py", line 829 in _engine_run_backward
  File "/home/ada/train.py", line 14 in step

Thread 0x00007f (most recent call first):
  File "/home/ada/other.py", line 1 in other
"""


@pytest.mark.parametrize(
    ("frames", "place", "call"),
    [
        (SLEEPS, "train.py:20 in dream", None),
        (SUMS, "train.py:12 in step", "all_reduce"),
        (SHORT, "train.py:12 in step", "all_reduce"),
        (LOADS, "train.py:30 in next_batch", None),
        (FAULT, "train.py:14 in step", "_engine_run_backward"),
        (b"    wait (threading.py:359)\n", "threading.py:359 in wait", None),
    ],
    ids=["own code", "collective", "folders left out", "waits for data", "faulthandler", "nothing of the user's"],
)
def test_thread_stands_at_the_innermost_frame_of_the_users_code(frames: bytes, place: str, call: str | None) -> None:
    head = b'Thread 811 (idle): "MainThread"\n'
    found = thread_position(head + frames, 0, len(head))
    assert (found["stack_location"], found.get("op")) == (place, call)


def test_no_frames_say_nothing() -> None:
    assert thread_position(b"Thread 1:\nstep 3 loss 2.1\n", 0, 10) == {}


def test_process_that_dies_says_where() -> None:
    head = b"Fatal Python error: Segmentation fault\n"
    said = head + b"\nCurrent thread 0x00007f (most recent call first):\n" + FAULT
    assert crashed_at(said, 0, len(head)) == "train.py:14 in step"
    assert crashed_at(head + b"step 3\n", 0, len(head)) is None


def test_frames_of_a_process_that_dies_are_no_waiting() -> None:
    head = b"Fatal Python error: Aborted\n\nCurrent thread 0x00007f (most recent call first):\n"
    assert thread_position(head + FAULT, head.index(b"Current"), len(head)) == {}
