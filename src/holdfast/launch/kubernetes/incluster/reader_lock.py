"""A lock that all readers of a run share, so that the last one to leave knows that it is the last."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Generator

from holdfast.host.files import regular_opener
from holdfast.run_dir import RunDir

POLL_S = 0.1
"""Seconds between two tries for the lock."""
OTHER_READERS_S = 10.0
"""Longest time that a reader with the whole log waits for the others: what it does next may end the pod."""


@contextlib.contextmanager
def reading(folder: RunDir) -> Generator[int | None]:
    """Hold a lock that all readers of the run share; None if the file system has no locks."""
    try:
        descriptor = regular_opener(str(folder.readers), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    except OSError:
        yield None
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    except OSError:
        os.close(descriptor)
        yield None
        return
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def await_other_readers(lock: int | None) -> None:
    """Wait until no other reader holds the lock, at most OTHER_READERS_S."""
    if lock is None:
        return
    fcntl.flock(lock, fcntl.LOCK_UN)
    deadline = time.monotonic() + OTHER_READERS_S
    while time.monotonic() < deadline:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(POLL_S)
        else:
            break
