"""Reduces a py-spy dump of a rank to the frames by which ranks are compared, and to the native frames within them.

Two ranks that wait in the same call must compare equal, whatever a library does inside the call at that moment. So the
frames within a call of torch.distributed are left out, and so are lines within libraries and frames of native code.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import PurePosixPath

from msgspec import Struct, field
from msgspec.structs import replace

from holdfast.diagnose.frames import is_user_code

Stack = tuple[str, ...]
"""Frames, innermost first: `function (file)` in a library, `function (file:line)` in the user's code."""

MAX_FRAMES = 12
"""Innermost frames kept; twelve reach from a collective in a layer's backward pass to the program's training step."""
MAX_FRAME_CHARS = 100
MAX_NATIVE_FRAMES = 6
"""Innermost named native frames kept; six reach from a wait of libc through Gloo, NCCL or CUDA to torch."""

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


# Between a Python frame and the function that it calls: the interpreter, ctypes and pybind11 (CPython 3.11, libffi 3.4)
_CALL_OF_NATIVE = re.compile(
    r"^(?:_?PyEval_|_?PyObject_|_?PyFunction_|_?PyCFunction|PyCFuncPtr_|PyVectorcall_|method_vectorcall|cfunction_"
    r"|_ctypes_|_call_function_pointer|ffi_|pybind11::|nanobind::|function_code_fastcall)"
)
_ADDRESS = "0x"
"""Begins the name of a native function for which its library has no symbol."""


class _Frame(Struct, frozen=True):
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


class _Thread(Struct, frozen=True):
    name: str
    frames: list[_Frame] = field(default_factory=list["_Frame"])
    """Its Python frames, innermost first."""
    native: list[_Frame] = field(default_factory=list["_Frame"])
    """Native frames within the innermost Python frame, innermost first."""


def training_stack(dump: str) -> Stack:
    """The frames of the thread that trains, without what differs between ranks that do the same; empty if none."""
    frames = [frame for thread in _training_threads(dump) for frame in thread.frames]
    return tuple(str(frame) for frame in _outside_of_calls(frames))[:MAX_FRAMES]


def native_stack(dump: str) -> Stack:
    """What the thread that trains does within its innermost Python frame: `function (library)`, innermost first.

    Functions without a name are `?`. Empty if it executes Python, or the dump has no native frames.
    """
    native = [frame for thread in _training_threads(dump)[:1] for frame in thread.native]
    shown: list[str] = []
    for frame, outer in zip_longest(native, native[1:]):
        if frame.function.startswith(_ADDRESS):
            if outer is None or outer.file != frame.file:  # otherwise the named caller stands for it
                shown.append(f"? ({PurePosixPath(frame.file).name})")
        elif not _CALL_OF_NATIVE.match(frame.function):
            shown.append(f"{_plain_name(frame.function)} ({PurePosixPath(frame.file).name})"[:MAX_FRAME_CHARS])
    return tuple(shown[:MAX_NATIVE_FRAMES])


def without_native(dump: str) -> str:
    """The dump without its native frames, as py-spy writes it by default."""
    return "".join(line for line in dump.splitlines(keepends=True) if not _is_native(line))


def _is_native(line: str) -> bool:
    frame = _frame(line.rstrip("\n"))
    return frame is not None and not frame.is_python


def _plain_name(function: str) -> str:
    """A C++ function without the arguments of its templates and its parameters."""
    depth, kept = 0, list[str]()
    for char in function.replace("(anonymous namespace)::", ""):
        depth += char in "<("
        if not depth:
            kept.append(char)
        depth = max(0, depth - (char in ">)"))
    return "".join(kept).removesuffix(" const")


def _training_threads(dump: str) -> list[_Thread]:
    """The threads whose frames are those of training, innermost first; empty if the dump has none."""
    threads = _threads(dump)
    if not threads:
        return []
    main = next((thread for thread in threads if thread.name == "MainThread"), threads[0])
    other = next((thread for thread in threads if thread is not main and _trains(thread.frames)), None)
    if other is None:
        return [main]
    if any(frame.function == _IN_AUTOGRAD for frame in main.frames):
        return [other, main]
    return [other] if _IDLE.match(str(main.frames[0])) and not _trains(main.frames) else [main]


def _threads(dump: str) -> list[_Thread]:
    """Each thread that has Python frames."""
    threads: list[_Thread] = []
    for line in dump.splitlines():
        if (thread := _THREAD.match(line)) is not None:
            threads.append(_Thread(thread["name"] or ""))
        elif threads and (frame := _frame(line)) is not None:
            if frame.is_python:
                threads[-1].frames.append(frame)
            elif not threads[-1].frames:
                threads[-1].native.append(frame)
    return [thread for thread in threads if thread.frames]


def _frame(line: str) -> _Frame | None:
    found = _FRAME.match(line)
    if found is None:
        return None
    frame = _Frame(found["function"], found["file"], found["line"] or "")
    # From Python 3.11 on, py-spy prints qualified names: `_exception_logger.<locals>.wrapper`, `Condition.wait`
    return replace(frame, function=frame.function.rpartition(".")[2]) if frame.is_python else frame


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
