"""Reports to the agent that a rank's program has ended while threads keep its process alive.

Python waits for every thread that is not a daemon before it runs exit handlers and exits.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import thread as pools
from pathlib import Path
from types import FrameType

from holdfast.protocol.rank_messages import ProgramEnded, encode

SEND_S = 2.0
SHOWN = 8


def watch(path: Path | None, rank: int) -> None:
    """Send `ProgramEnded` when the main thread ends while other threads still run."""
    # Python has no public hook before it waits for threads; concurrent.futures uses the same private one.
    register: Callable[..., None] | None = getattr(threading, "_register_atexit", None)
    if path is None or register is None:
        return
    with contextlib.suppress(RuntimeError):  # the interpreter is already shutting down
        register(_send, path, rank, os.getpid())


def _send(path: Path, rank: int, pid: int) -> None:
    threads = tuple(_threads())
    if not threads or os.getpid() != pid:  # a forked worker inherits this handler
        return
    failed = getattr(sys, "last_value", None) is not None
    message = ProgramEnded(rank=rank, failed=failed, threads=threads[:SHOWN])
    # A separate connection: the Session has closed its own.
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as link:
        link.settimeout(SEND_S)
        link.connect(str(path))
        link.sendall(encode(message) + b"\n")


def _threads() -> Iterator[str]:
    """The threads that Python waits for, each with its innermost line."""
    frames = sys._current_frames()
    for thread in threading.enumerate():
        if thread.daemon or thread is threading.main_thread():
            continue
        frame = frames.get(thread.ident or 0)
        if _is_idle(thread, frame):
            continue
        at = f" in {frame.f_code.co_name} ({frame.f_code.co_filename}:{frame.f_lineno})" if frame else ""
        yield f"{thread.name[:100]}{at[-300:]}"


def _is_idle(thread: threading.Thread, frame: FrameType | None) -> bool:
    """Whether a pool thread has no work: Python ends it next."""
    queue = getattr(pools, "_threads_queues", {}).get(thread)
    if queue is None or not queue.empty():
        return False
    while frame is not None:
        if frame.f_code.co_filename == pools.__file__ and frame.f_code.co_name == "run":
            return False
        frame = frame.f_back
    return True
