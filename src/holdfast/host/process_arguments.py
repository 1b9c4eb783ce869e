"""Shows other arguments of this process than those that it was started with."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path

ARGUMENT_ROOM = " " * 8192
"""Last argument of a process that is to show others later (`show_arguments`)."""
_ARG_START = 45
"""Field of /proc/PID/stat (proc_pid_stat(5)), counted from the one after the name; the next one is their end."""


def show_arguments(argv: Sequence[str]) -> None:
    """Show these arguments where `ps` and holdfast look for them; those that do not fit are left out.

    The arguments that it was started with end with `ARGUMENT_ROOM`.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = map(int, fields[_ARG_START : _ARG_START + 2])
    lines = [os.fsencode(word) + b"\0" for word in argv]
    while sum(map(len, lines)) > end - begin:
        lines.pop()
    shown = b"".join(lines)
    ctypes.memset(begin, 0, end - begin)
    ctypes.memmove(begin, shown, len(shown))
