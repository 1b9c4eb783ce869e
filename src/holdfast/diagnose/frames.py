"""Owns where an exception was raised: the innermost frame of the user's own code in the traceback above its line."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

LOOK_BYTES = 64 << 10
"""A traceback that begins further up is not looked for."""
LINES_BELOW = 6
"""Most lines between the last frame and the exception: its source, marks below it, what the exception says first."""

_BEGIN = b"Traceback (most recent call last)"
_FRAME = re.compile(rb'File "(?P<file>[^"\n]{1,300})", line (?P<line>\d{1,7}), in (?P<function>[\w.<>]{1,100})')
_NOT_OWN = (b"/torch/", b"/site-packages/", b"/dist-packages/", b"/lib/python3", b"<")


def raised_at(data: bytes, start: int) -> str | None:
    """`file:line in function`, for the exception whose line begins at `start`; None without a whole traceback."""
    begin = data.rfind(_BEGIN, max(0, start - LOOK_BYTES), start)
    if begin < 0:
        return None
    frames = list(_FRAME.finditer(data, begin, start))
    if not frames or data.count(b"\n", frames[-1].end(), start) > LINES_BELOW:
        return None
    own = [frame for frame in frames if not any(part in frame["file"] for part in _NOT_OWN)]
    frame = (own or frames)[-1]
    file, function = PurePosixPath(frame["file"].decode("utf-8", "replace")), frame["function"].decode()
    return f"{file.name}:{frame['line'].decode()} in {function}"
