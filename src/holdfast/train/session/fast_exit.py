"""Exits a process quickly when a successor waits for its resources, skipping Python's teardown.

Python clears every module and frees every object before a process ends; with torch that takes most of a second. The
kernel frees the memory immediately. Exits that no process waits for take the normal path.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import io
import os
import sys
from typing import cast

from holdfast.errors import ExitCode


def enable() -> None:
    """Exit with `CHECKPOINTED_AND_EXITED` after the program, its threads and its atexit handlers have run.

    Open files are flushed; `__del__` methods that would run at interpreter shutdown are skipped.
    """
    atexit.register(_end)


def _end() -> None:
    """The handler registered last runs first, so it runs the other handlers itself."""
    atexit.unregister(_end)
    with contextlib.suppress(Exception):  # already printed
        atexit._run_exitfuncs()
    if not hasattr(sys, "last_value"):  # a program that failed while exiting keeps its exit code
        flush_open_files()
        os._exit(ExitCode.CHECKPOINTED_AND_EXITED)


def flush_open_files() -> None:
    """Flush every open file."""
    for each in gc.get_objects():
        if _is_file(cast(type[object], type(each))):
            with contextlib.suppress(Exception):
                each.flush()


@functools.cache
def _is_file(kind: type[object]) -> bool:
    return issubclass(kind, io.IOBase)
