"""Owns the search for the last error line in a rank's log, and where it stands."""

from __future__ import annotations

import re
from pathlib import Path

TAIL_BYTES = 256 * 1024
COUNT_BYTES = 64 * 1024 * 1024
"""Logs up to this size have their lines counted, so that the error's line number can be named."""
ERROR_CHARACTERS = 500

# ValueError: bad shape
# torch.distributed.DistNetworkError: The client socket has timed out ...
# [rank1]: RuntimeError: [..] Connection closed by peer [127.0.0.1]:4242
# terminate called after throwing an instance of 'std::runtime_error'
# python: can't open file '/x/train.py': [Errno 2] No such file or directory
#
# Traceback (most recent call last):
#   File "/x/train.py", line 3, in <module>
# subprocess.TimeoutExpired: Command 'x' timed out after 3 seconds
_ERROR = re.compile(
    rb"^(?:\[rank\d+\]:\s*)?"
    rb"(?:Traceback \(most recent call last\):\r?\n"
    rb"(?:(?:\[rank\d+\]: )?[ \t].*\n)*(?:\[rank\d+\]: )?(?P<raised>[^\s\[].*)"
    rb"|(?P<line>(?:[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Timeout|Iteration)\b.*)"
    rb"|(?:terminate called .*)|(?:Fatal Python error: .*)|(?:\S*python[\w.]*: can't open file .*)))$",
    re.MULTILINE,
)


def last_error(log: Path) -> tuple[str, str]:
    """The last error line of a log and its place as `file:line`; two empty strings when there is none."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, 2)
            start = max(0, size - TAIL_BYTES)
            file.seek(start)
            tail = file.read(TAIL_BYTES)
            matches = list(_ERROR.finditer(tail))
            if not matches:
                return "", ""
            match = matches[-1]
            group = "raised" if match["raised"] is not None else "line"
            where = str(log)
            if size <= COUNT_BYTES:
                file.seek(0)
                before = file.read(start).count(b"\n") if start else 0
                line = before + tail.count(b"\n", 0, match.start(group)) + 1
                where = f"{log}:{line}"
    except OSError:
        return "", ""
    return match[group].decode(errors="replace").rstrip()[:ERROR_CHARACTERS], where
