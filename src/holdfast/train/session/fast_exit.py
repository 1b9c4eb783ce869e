"""Owns the end of a process whose place another takes: its program ends as any does, Python is not taken apart.

Python clears module after module and frees object after object before a process ends, with torch for the better part
of a second, in which whoever comes next waits. The kernel does the same at once. Refuses to own when to end, and every
end after which nobody waits: those take their time.
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
    """Have the process end as `CHECKPOINTED_AND_EXITED` once the program, its threads and what it gave to atexit have run.

    What only an object's `__del__` does as the interpreter goes is not done; open files are flushed.
    """
    atexit.register(_end)


def _end() -> None:
    """The last that was registered is the first to run, so the others are run from here."""
    atexit.unregister(_end)
    with contextlib.suppress(Exception):  # printed already
        atexit._run_exitfuncs()
    if not hasattr(sys, "last_value"):  # a program that failed on its way out has its own exit code
        flush_open_files()
        os._exit(ExitCode.CHECKPOINTED_AND_EXITED)


def flush_open_files() -> None:
    """Have every open file write what it holds back."""
    for each in gc.get_objects():
        if _is_file(cast(type[object], type(each))):
            with contextlib.suppress(Exception):
                each.flush()


@functools.cache
def _is_file(kind: type[object]) -> bool:
    return issubclass(kind, io.IOBase)
