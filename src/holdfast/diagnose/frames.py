"""Parses Python stack frames: where an exception was raised, and where a thread of a stack dump waits.

The innermost frame of the user's own code counts.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePosixPath

LOOKBACK_BYTES = 64 << 10
"""Limit of the search for a traceback above a line, and for frames below it."""
LINES_BELOW = 6
"""Most lines between the last frame and the exception: its source, marks below it, the exception's first lines."""

_TRACEBACK_HEADER = b"Traceback (most recent call last)"
_FATAL_ERROR, _FATAL_ERROR_BYTES = b"Fatal Python error: ", 200
_THREAD_HEADER, _THREAD_HEADER_BYTES = (
    re.compile(rb"(?:Current t|T)hread 0x[^\n]{1,120}most recent call first\):\n"),
    400,
)
#   File "/home/ada/train.py", line 42, in step                          traceback
#   File "/home/ada/train.py", line 42 in step                           faulthandler
_FRAME = re.compile(rb'File "(?P<file>[^"\n]{1,300})", line (?P<line>\d{1,7}),? in (?P<function>[\w.<>]{1,100})')
#     all_reduce (torch/distributed/distributed_c10d.py:2841)            py-spy
_PY_SPY_FRAME = re.compile(rb"\s+(?P<function>[\w.<>]{1,100}) \((?P<file>[^()\n:]{1,300}):(?P<line>\d{1,7})\)\s*$")
# failed (exitcode: -9) local_rank: 1 (pid: 92)      traceback : Signal 9 (SIGKILL) received by PID 92
_EXIT_STATUS = re.compile(rb"exit ?code\b|Signal \d{1,3} \(SIG|return code = -?\d", re.IGNORECASE)
#   File "/home/ada/train.py", line 7                                    what Python could not parse
_SYNTAX_ERROR = re.compile(rb"\b(?:SyntaxError|IndentationError|TabError)\b")
_SYNTAX_ERROR_FILE = re.compile(rb'[^"\n]{0,200}File "(?P<file>[^"\n]{1,300})", line (?P<line>\d{1,7})\s*$')
_CLIENTS = re.compile(
    rb"/(?P<name>urllib3?|requests|http|httpx|httpcore|aiohttp|huggingface_hub|datasets|fsspec|s3fs|gcsfs|botocore|boto3"
    rb"|google/cloud|wandb|mlflow|comet_ml|neptune|webdataset|streaming)/"
)
_LIBRARY_PATHS = (
    b"/torch/",
    b"/site-packages/",
    b"/dist-packages/",
    b"/lib/python3",
    b"/holdfast/train/",
    b"/bin/torchrun",
    b"/bin/accelerate",
    b"/bin/deepspeed",
    b"<",
)
_COMPILED = (b".pyx", b".pxi", b".c", b".cc", b".cpp", b".cxx", b".cu", b".h", b".hpp", b".rs")
"""Sources of frames that `py-spy dump --native` adds where a library has debugging information."""
_LIBRARY_NAMES = frozenset(name.encode() for name in (*sys.stdlib_module_names, "torch", "holdfast", "deepspeed"))
_COLLECTIVE_PATHS = (b"torch/distributed/", b"torch/autograd/", b"torch/cuda/", b"deepspeed/comm/", b"mpi4py/")
"""Where a thread waits for other ranks, or may."""


def raised_at(data: bytes, start: int, end: int) -> str | None:
    """`file:line in function`, for the exception on this line; None without a whole traceback.

    What a launcher logs about a process's end appears below the traceback of the rank that wrote last, and is not part
    of it.
    """
    if _EXIT_STATUS.search(data, start, end):
        return None
    if _SYNTAX_ERROR.search(data, start, end):
        return _syntax_error_at(data, start)
    begin = data.rfind(_TRACEBACK_HEADER, max(0, start - LOOKBACK_BYTES), start)
    if begin < 0:
        return None
    frames = list(_FRAME.finditer(data, begin, start))
    if not frames or data.count(b"\n", frames[-1].end(), start) > LINES_BELOW:
        return None
    return _location(next((frame for frame in reversed(frames) if is_user_code(frame["file"])), frames[-1]))


def _syntax_error_at(data: bytes, start: int) -> str | None:
    """`file:line`, for a file that Python could not parse: it appears above its source and a mark, in no frame."""
    above = data[max(0, start - _THREAD_HEADER_BYTES) : start].splitlines()[-4:]
    found = next((found for line in reversed(above) if (found := _SYNTAX_ERROR_FILE.match(line))), None)
    return f"{PurePosixPath(found['file'].decode('utf-8', 'replace')).name}:{found['line'].decode()}" if found else None


def service_client(data: bytes, start: int) -> str | None:
    """The internet-service library in whose frames the exception was raised; None for a rendezvous between ranks."""
    begin = data.rfind(_TRACEBACK_HEADER, max(0, start - LOOKBACK_BYTES), start)
    frames = list(_FRAME.finditer(data, begin, start)) if begin >= 0 else []
    if any(part in frame["file"] for frame in frames for part in _COLLECTIVE_PATHS):
        return None
    found = (client for frame in reversed(frames) if (client := _CLIENTS.search(frame["file"])))
    return next((client["name"].decode() for client in found), None)


def crashed_at(data: bytes, start: int, end: int) -> str | None:
    """`file:line in function`, where this line begins the faulthandler output of a dying process."""
    if _FATAL_ERROR not in data[start:end]:
        return None
    head = _THREAD_HEADER.search(data, end, end + _THREAD_HEADER_BYTES)
    frames = list(_frames_below(data, head.end())) if head else []
    return _location(next((frame for frame in frames if is_user_code(frame["file"])), frames[0])) if frames else None


def thread_position(data: bytes, start: int, end: int) -> Mapping[str, str]:
    """The location of the thread whose frames follow its line, and the call in which it waits for others.

    Empty where no frame follows, and for the frames that a process writes as it dies: it waits for no other rank any
    more.
    """
    if _FATAL_ERROR in data[max(0, start - _FATAL_ERROR_BYTES) : start]:
        return {}
    frames = list(_frames_below(data, end))
    own = next((number for number, frame in enumerate(frames) if is_user_code(frame["file"])), None)
    if not frames:
        return {}
    inner = frames[: len(frames) if own is None else own]
    call = next((frame["function"] for frame in inner if any(part in frame["file"] for part in _COLLECTIVE_PATHS)), b"")
    return {"stack_location": _location(frames[own or 0])} | ({"op": call.decode()} if call else {})


def _frames_below(data: bytes, end: int) -> Iterator[re.Match[bytes]]:
    """The frames on the following lines, up to the first other line; variables that py-spy can show are skipped."""
    for line in _lines(data, end):
        frame = _FRAME.search(line) or _PY_SPY_FRAME.search(line)
        if frame is not None:
            yield frame
        elif not line.startswith(b"    "):
            return


def _lines(data: bytes, begin: int) -> Iterable[bytes]:
    return data[begin : begin + LOOKBACK_BYTES].splitlines()


def is_user_code(file: bytes) -> bool:
    """Whether the frame is the user's; py-spy omits the folder of a package or a Python module."""
    first = file.partition(b"/")[0].removesuffix(b".py")
    compiled = file.endswith(_COMPILED)
    return not compiled and first not in _LIBRARY_NAMES and not any(part in file for part in _LIBRARY_PATHS)


def _location(frame: re.Match[bytes]) -> str:
    file, function = PurePosixPath(frame["file"].decode("utf-8", "replace")), frame["function"].decode()
    return f"{file.name}:{frame['line'].decode()} in {function}"
