"""Reduces a py-spy dump of a rank to the frames by which ranks are compared.

Two ranks that wait in the same call must compare equal, whatever a library does inside the call at that moment. So the
frames within a call of torch.distributed are left out, and so are lines within libraries and frames of native code.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from holdfast.diagnose.frames import is_user_code

Stack = tuple[str, ...]
"""Frames, innermost first: `function (file)` in a library, `function (file:line)` in the user's code."""

MAX_FRAMES = 12
"""Innermost frames kept; twelve reach from a collective in a layer's backward pass to the program's training step."""
MAX_FRAME_CHARS = 100

# Thread 4242 (idle): "MainThread"
_THREAD = re.compile(r"^Thread .*?(?:\((?P<state>[^()]*)\))?(?:: \"(?P<name>.*)\")?$")
#     all_reduce (/opt/venv/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py:2841)
#     pthread_cond_wait (libc.so.6)
_FRAME = re.compile(r"^ {4}(?P<function>\S.*?) \((?P<file>[^()]*?)(?::(?P<line>\d+))?\)$")
_COMMUNICATION = re.compile(
    r"(?:^|/)torch/distributed/(?:distributed_c10d|_functional_collectives\w*|c10d_logger|nn/functional)\.py$"
)
_WRAPPERS = frozenset({"wrapper", "inner", "decorate_context", "_fn"})
"""Functions of decorators, which name no call."""
_IDLE = re.compile(r"^(?:wait|join|_wait_for_tstate_lock|get|accept|select|poll|_worker|_recv|recv_bytes) \(")
_IN_AUTOGRAD = "_engine_run_backward"
"""The main thread's frame while autograd's own threads run the backward functions of devices."""


@dataclass(frozen=True)
class _Frame:
    function: str
    file: str
    line: str

    @property
    def is_python(self) -> bool:
        return self.file.endswith((".py", ">"))

    @property
    def communicates(self) -> bool:
        return bool(_COMMUNICATION.search(self.file))

    def __str__(self) -> str:
        name = PurePosixPath(self.file).name
        place = f"{name}:{self.line}" if self.line and is_user_code(self.file.encode()) else name
        return f"{self.function} ({place})"[:MAX_FRAME_CHARS]


def training_stack(dump: str) -> Stack:
    """The frames of the thread that trains, without what differs between ranks that do the same; empty if none."""
    threads = _threads(dump)
    if not threads:
        return ()
    main = next((frames for name, frames in threads if name == "MainThread"), threads[0][1])
    others = [frames for _, frames in threads if frames is not main]
    frames = main
    if any(frame.function == _IN_AUTOGRAD for frame in main):
        inside = next((frames for frames in others if _trains(frames)), list[_Frame]())
        frames = [*inside, *main]
    elif _IDLE.match(str(main[0])) and not _trains(main):
        frames = next((frames for frames in others if _trains(frames)), main)
    return tuple(str(frame) for frame in _outside_of_calls(frames))[:MAX_FRAMES]


def _threads(dump: str) -> list[tuple[str, list[_Frame]]]:
    """Each thread's name and Python frames, innermost first."""
    threads: list[tuple[str, list[_Frame]]] = []
    for line in dump.splitlines():
        if (thread := _THREAD.match(line)) is not None:
            threads.append((thread["name"] or "", []))
        elif threads and (found := _FRAME.match(line)) is not None:
            frame = _Frame(found["function"], found["file"], found["line"] or "")
            if frame.is_python:
                threads[-1][1].append(frame)
    return [(name, frames) for name, frames in threads if frames]


def _trains(frames: Sequence[_Frame]) -> bool:
    """Whether a thread is in a collective."""
    return any(frame.communicates for frame in frames)


def _outside_of_calls(frames: Sequence[_Frame]) -> list[_Frame]:
    """The frames from the outermost function of torch.distributed outwards."""
    named = [number for number, frame in enumerate(frames) if frame.communicates and frame.function not in _WRAPPERS]
    own = next((number for number, frame in enumerate(frames) if not _is_library(frame)), len(frames))
    inner = [number for number in named if number < own] or named
    kept = frames[max(inner) :] if inner else list(frames)
    return [frame for frame in kept if frame.function not in _WRAPPERS]


def _is_library(frame: _Frame) -> bool:
    return not is_user_code(frame.file.encode())
