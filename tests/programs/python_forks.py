"""Starts Python programs as forks of one process that has imported torch: `python_forks.py SOCKET SLACK`.

A program that such a fork starts is a fork of it in turn, so that parents, process groups, signals and exit codes are
those of real starts: only `execve` is replaced. What starts a program in other namespaces (`nsenter`, `unshare`, a
script of `sh` that mounts) ends with the `exec` of it: a fork makes the same system calls. A fork has its own
`__main__`, environment and arguments (also where the kernel shows them), default signal handlers, and no open files
of its parent. The modules of holdfast that this process has imported are as they were then: to import them anew took
most of the CPU time of a run. The folders of PYTHONPATH and a sitecustomize in them are obeyed. What cannot be done
so (another executable, other PYTHON* variables, most options of Python) is started as usual.

tests/runs/forked_starts.py sends one JSON object per start, with the descriptors that the program gets, and receives
its pid; or the names of more modules that this process is to import.
"""

from __future__ import annotations

import _socket
import array
import atexit
import builtins
import contextlib
import copy
import ctypes
import dis
import faulthandler
import fcntl
import functools
import gc
import importlib
import importlib.machinery
import importlib.util
import json
import logging
import os
import runpy
import signal
import site
import socket
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import dropwhile, takewhile
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NoReturn, cast

import holdfast
from holdfast.launch.local.netns import namespace
from holdfast.train.zygote.huge_pages import use_huge_pages

IMPORTED = (
    "numpy",
    "torch",
    "torch.distributed.fsdp",
    "torch._dynamo",
    "torchdata.stateful_dataloader",
    "holdfast.agent.__main__",
    "holdfast.controller_main",
    "holdfast.launch.local.local_supervisor",
    "holdfast.lighthouse.__main__",
    "holdfast.train.session.session",
)
RESTORED = "holdfast"
"""Package whose modules each program has as they were imported."""
FRESH = ("__main__", "__mp_main__", "lab", "sitecustomize", "tests")
"""Packages that each program imports anew."""
UNFORKABLE = "crash_points"
"""A program with this module is not forked: a child would keep what it has changed."""
CLOCK = "holdfast_step_clock"
HOOKED = "torch.optim"
"""What a finder of sitecustomize may wait for, which has been imported here."""
CONTAINERS = (dict, set, weakref.WeakSet)
LOCK = type(threading.Lock())
CACHE = type(functools.cache(abs))
RENEWED = (LOCK, CACHE, threading.local)
SAME_VARIABLES = ("PYTHON", "LD_")
"""Prefixes of variables that only a new process can obey."""
OBEYED = ("PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONFAULTHANDLER", "PYTHONDONTWRITEBYTECODE")
UNBUFFERED, ISOLATED = "-u", "-I"
OPTIONS = (UNBUFFERED, ISOLATED, "-S")
"""Options of Python that a fork obeys; it has imported `site` already."""
FIRST_FREE = 400
"""Descriptors from here on are free to move others through."""
NAMESPACES = {"--net": namespace.NEW_NET, "--uts": namespace.NEW_UTS}
RECURSIVE, PRIVATE, SLAVE = 1 << 14, 1 << 18, 1 << 19
PROPAGATION = {"private": RECURSIVE | PRIVATE, "slave": RECURSIVE | SLAVE, "unchanged": 0}
"""Flags of linux/mount.h; by none a mount changes nothing."""

_libc = ctypes.CDLL(None, use_errno=True)

_exec_program: Callable[..., int] = cast("Any", subprocess)._fork_exec
_own_folders = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
_path = sys.path[1 + len(_own_folders) :]
_finders = [*sys.meta_path]
_holdfast = os.path.dirname(os.path.realpath(holdfast.__file__))
_variables = {name: value for name, value in os.environ.items() if name.startswith(SAME_VARIABLES)}
_state: list[tuple[dict[str, object], str, object, object]] = []
"""Variables of modules of holdfast that may change: their module's, name, value after the import, copy of its content.

To read the others would copy thousands of pages of memory in each fork, because that counts references.
"""
_last_module, _last_logger = "", ""
"""What comes after these in sys.modules, and among the loggers, is a program's."""
_loggers: list[str] = []
_kept: list[object] = []
"""Whatever must not be freed: its destructor might close a descriptor that the fork has opened anew."""


def python_command(argv: list[str], executables: Iterable[bytes]) -> list[str]:
    """The command with which a program starts Python as it runs here, also as a script's interpreter; or nothing."""
    for path in map(os.fsdecode, executables):
        if path == sys.executable:
            return argv
        try:
            with open(path, "rb") as file:
                first = file.read(256).partition(b"\n")[0]
        except OSError:
            continue
        interpreter = os.fsdecode(first.removeprefix(b"#!"))
        folder, name = os.path.split(interpreter)
        is_ours = folder == os.path.dirname(sys.executable) and name.startswith("python") and first.startswith(b"#!/")
        return [interpreter, path, *argv[1:]] if is_ours else []
    return []


def can_fork(argv: list[str], folder: str, environ: dict[str, str]) -> bool:
    """Whether a command of Python is a script or a module, and nothing that only a new process can obey."""
    program = _program_of(argv)
    is_script = bool(program) and not program[0].startswith("-") and os.path.isfile(os.path.join(folder, program[0]))
    theirs = {name: value for name, value in environ.items() if name.startswith(SAME_VARIABLES)}
    return (
        (is_script or program[:1] == ["-m"])
        and UNFORKABLE not in sys.modules
        and all(theirs.get(name) == _variables.get(name) for name in theirs | _variables if name not in OBEYED)
        and not any(map(_has_another_holdfast, environ.get("PYTHONPATH", "").split(os.pathsep)))
    )


def _has_another_holdfast(folder: str) -> bool:
    """Whether a folder of PYTHONPATH has another version of what this process has imported."""
    found = os.path.join(folder, RESTORED)
    return bool(folder) and os.path.isdir(found) and os.path.realpath(found) != _holdfast


def _program_of(argv: list[str]) -> list[str]:
    """A command of Python without the interpreter, and without the options that a fork obeys."""
    return [*dropwhile(OPTIONS.__contains__, argv[1:])]


def fork_exec(*given: Any) -> int:
    """In place of `_posixsubprocess.fork_exec`."""
    args, executables, close_fds, pass_fds, cwd, env_list = given[:6]
    streams, error_write, new_session = given[6:12], given[13], given[15]
    preexec: Callable[[], object] | None = given[21]
    steps, words = steps_of([os.fsdecode(word) for word in args])
    argv = python_command(words, [os.fsencode(words[0])] if steps else executables)
    environ = _environ_of(env_list)
    folder = os.fsdecode(cwd) if cwd else os.getcwd()
    if not (close_fds and can_fork(argv, folder, environ)):
        return _exec_program(*given)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if (pid := os.fork()) == 0:
        before = [preexec, *steps] if preexec else steps
        _become_child(argv, environ, cwd, pass_fds, streams, error_write, new_session, before)
    return pid


def steps_of(argv: list[str]) -> tuple[list[Callable[[], object]], list[str]]:
    """What the commands before a program do, and the program; no steps where one of them is not known here."""
    steps: list[Callable[[], object]] = []
    rest = argv
    while rest and rest[0] in ("nsenter", "unshare") and "--" in rest:
        end = rest.index("--")
        for option in rest[1:end]:
            name, _, value = option.partition("=")
            if rest[0] == "nsenter" and name in NAMESPACES and value:
                steps.append(partial(namespace.join, Path(value), NAMESPACES[name]))
            elif option == "--mount" and rest[0] == "unshare":
                steps.append(partial(namespace.unshare, namespace.NEW_MOUNT))
            elif name == "--propagation" and value in PROPAGATION:
                steps.append(partial(_propagate, PROPAGATION[value]))
            else:
                return [], argv
        rest = rest[end + 1 :]
    if steps and rest[:2] == ["sh", "-c"]:
        steps.append(partial(subprocess.run, [*rest[:4], "true"], check=True))
        rest = rest[4:]
    return steps, rest


def _propagate(flags: int) -> None:
    if flags and _libc.mount(b"none", b"/", None, ctypes.c_ulong(flags), None) != 0:
        raise OSError(ctypes.get_errno(), "mount")


def _become_child(
    argv: list[str],
    environ: dict[str, str],
    cwd: bytes | None,
    pass_fds: tuple[int, ...],
    streams: tuple[int, ...],
    error_write: int,
    new_session: bool,
    before: Iterable[Callable[[], object]],
) -> NoReturn:
    try:
        stdin, stdout, stderr = streams[0], streams[3], streams[5]
        wanted = {number: fd for number, fd in enumerate((stdin, stdout, stderr)) if fd != -1}
        wanted |= {fd: fd for fd in pass_fds if fd != error_write}
        error_write = _arrange(wanted, error_write)
        if cwd:
            os.chdir(cwd)
        if new_session:
            os.setsid()
        for step in before:
            step()
    except OSError as error:
        os.write(error_write, f"OSError:{error.errno or 0:x}:".encode())
        os._exit(255)
    except BaseException:
        os.write(error_write, b"SubprocessError:0:Exception occurred in preexec_fn.")
        os._exit(255)
    os.close(error_write)
    become(argv, environ)


def _environ_of(env_list: list[bytes] | None) -> dict[str, str]:
    if env_list is None:
        return dict(os.environ)
    pairs = (os.fsdecode(each).partition("=") for each in env_list)
    return {name: value for name, _, value in pairs}


def _arrange(wanted: dict[int, int], keep: int = -1) -> int:
    """Give descriptors their numbers and close all others; returns the new number of `keep`."""
    keep = fcntl.fcntl(keep, fcntl.F_DUPFD_CLOEXEC, FIRST_FREE) if keep != -1 else -1
    moved = {number: fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, FIRST_FREE) for number, fd in wanted.items()}
    for number, fd in moved.items():
        os.dup2(fd, number)
    stay = {0, 1, 2, keep, *moved}
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd not in stay:
            with contextlib.suppress(OSError):
                os.close(fd)
    return keep


def become(argv: list[str], environ: dict[str, str]) -> NoReturn:
    """Run a program as if by execve; never returns."""
    gc.freeze()
    _reset_signals()
    _reset_modules()
    _show(argv, environ)
    code = 1
    try:
        code = _run(argv, environ)
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
        cast("Any", atexit)._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
    finally:
        os._exit(code)


def _run(argv: list[str], environ: dict[str, str]) -> int:
    """Run the program's `__main__`; returns its exit code."""
    program = _program_of(argv)
    options = argv[1 : len(argv) - len(program)]
    if environ.get("PYTHONUNBUFFERED") or UNBUFFERED in options:
        cast("Any", sys.stdout).reconfigure(write_through=True)
    if environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    main = sys.modules["__main__"] = ModuleType("__main__")
    cast("Any", main).__builtins__ = builtins
    sys.orig_argv = argv
    sys.argv = [*program]
    try:
        _obey_path("" if ISOLATED in options else environ.get("PYTHONPATH", ""))
        if program[0] == "-m":
            sys.argv = program[1:]
            sys.path.insert(0, os.getcwd())
            cast("Any", runpy)._run_module_as_main(program[1])
        else:
            path = program[0]
            sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
            main.__file__ = path
            main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
            with open(path, "rb") as file:
                code = compile(file.read(), path, "exec")
            exec(code, vars(main))
    except SystemExit as left:
        return _exit_code(left)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        traceback.print_exc()
        os.kill(os.getpid(), signal.SIGINT)
        return 130
    except BaseException as error:
        trace = error.__traceback__.tb_next if error.__traceback__ else None
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
        sys.excepthook(type(error), error, trace)
        return 1
    return 0


def _obey_path(pythonpath: str) -> None:
    """Find modules in these folders first, and import their sitecustomize, as Python does before a program."""
    folders = [os.path.abspath(each) for each in pythonpath.split(os.pathsep) if each]
    sys.path[:] = [*folders, *_path]
    if folders == _own_folders:
        return
    sys.modules.pop("sitecustomize", None)  # this process may have another
    site.execsitecustomize()
    for finder in [each for each in sys.meta_path if each not in _finders]:
        spec = finder.find_spec(HOOKED, sys.modules["torch"].__path__)
        if spec is not None and spec.loader is not None:
            again = importlib.util.module_from_spec(spec)
            parts = {name: part for name, part in sys.modules.items() if name.startswith(f"{HOOKED}.")}
            vars(again).update({name.rpartition(".")[2]: part for name, part in parts.items()})  # some are deleted
            spec.loader.exec_module(again)


def _exit_code(left: SystemExit) -> int:
    if left.code is None or isinstance(left.code, int):
        return (left.code or 0) & 0xFF
    sys.stderr.write(f"{left.code}\n")
    return 1


def _reset_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        with contextlib.suppress(OSError, ValueError):
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)


def _reset_modules() -> None:
    """Forget the parent's state in modules of holdfast, its finders, exit handlers, temporary folder, loop and logs."""
    sys.meta_path[:] = _finders
    if (clock := sys.modules.pop(CLOCK, None)) is not None:
        cast("Any", clock).clock.stop()
    for name in _after(_last_module, sys.modules):
        if name.partition(".")[0] in (*FRESH, RESTORED):
            _kept.append(sys.modules.pop(name))
            parent, _, child = name.rpartition(".")
            if parent in sys.modules:
                _kept.append(vars(sys.modules[parent]).pop(child, None))
    for variables, name, value, content in _state:
        _restore(variables, name, value, content)
    cast("Any", atexit)._clear()
    finalize = cast("Any", weakref.finalize)
    _kept.append(dict(finalize._registry))
    finalize._registry.clear()
    finalize._registered_with_atexit = False
    atexit.register(logging.shutdown)
    if (multiprocessing := sys.modules.get("multiprocessing.util")) is not None:
        atexit.register(cast("Any", multiprocessing)._exit_function)
    if (tempfile := sys.modules.get("tempfile")) is not None:
        cast("Any", tempfile).tempdir = None  # that of another test, which may have deleted it
    if (asyncio := sys.modules.get("asyncio")) is not None:
        cast("Any", asyncio)._set_running_loop(None)
        cast("Any", asyncio).set_event_loop_policy(None)
    root = logging.getLogger()
    _kept.append([*root.handlers])
    root.handlers.clear()
    root.setLevel(logging.WARNING)
    for name in (*_loggers, *_after(_last_logger, logging.root.manager.loggerDict)):
        if name.partition(".")[0] in (*FRESH, RESTORED):
            logger = logging.getLogger(name)
            logger.handlers.clear()
            logger.setLevel(logging.NOTSET)
    if (torch := sys.modules.get("torch")) is not None:
        cast("Any", torch).default_generator.seed()
    if (numpy := sys.modules.get("numpy")) is not None:
        cast("Any", numpy).random.seed()


def _import(modules: Iterable[str]) -> None:
    """Import modules, and keep what those of holdfast are like now."""
    global _last_module, _last_logger
    gc.disable()
    for name in modules:
        importlib.import_module(name)
    gc.enable()
    _finders[:] = sys.meta_path
    _last_module = next(reversed(sys.modules))
    _last_logger = next(reversed(logging.root.manager.loggerDict))
    _state.clear()
    _loggers[:] = [name for name in logging.root.manager.loggerDict if name.partition(".")[0] == RESTORED]
    for name, module in sys.modules.items():
        if name.partition(".")[0] == RESTORED:
            _state.extend(_changeable(module))
    _reset_modules()
    sys.modules["__main__"] = _kept_main
    gc.collect()
    gc.freeze()
    use_huge_pages()


def _after(last: str, names: dict[str, Any]) -> list[str]:
    """The names that were added after this one."""
    return [*takewhile(lambda name: name != last, reversed(names))]


def _changeable(module: ModuleType) -> Iterator[tuple[dict[str, object], str, object, object]]:
    """Variables that functions of a module bind anew, and those whose content can change."""
    loader = cast("Any", module.__loader__)
    bound = _bound_globally(loader.get_code(module.__name__))
    for name, value in vars(module).items():
        if isinstance(value, CONTAINERS) and not name.startswith("__"):
            yield vars(module), name, value, copy.copy(cast("Any", value))
        elif isinstance(value, RENEWED) or name in bound:
            yield vars(module), name, value, None


def _bound_globally(code: CodeType) -> set[str]:
    """Names that functions in this code declare as `global`."""
    found = {each.argval for each in dis.get_instructions(code) if each.opname == "STORE_GLOBAL"}
    return found.union(*(_bound_globally(each) for each in code.co_consts if isinstance(each, CodeType)))


def _restore(variables: dict[str, object], name: str, value: object, content: object) -> None:
    """Give a variable, and its content, what it had after the import of its module."""
    if content is not None and value != content:
        container = cast("Any", value)
        _kept.append(copy.copy(container))
        container.clear()
        container.update(content)
    elif isinstance(value, CACHE):
        cast("Any", value).cache_clear()
    elif isinstance(value, LOCK):
        value = threading.Lock()
    elif isinstance(value, threading.local):
        value = type(value)()
    variables[name] = value


def _show(argv: list[str], environ: dict[str, str]) -> None:
    """Take this environment, and show it and the arguments where the kernel does."""
    os.environ.clear()
    os.environ.update(environ)
    with open("/proc/self/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    _write(int(fields[45]), int(fields[46]), argv)
    _write(int(fields[47]), int(fields[48]), [f"{name}={value}" for name, value in environ.items()])


def _write(begin: int, end: int, words: list[str]) -> None:
    lines = [os.fsencode(word) + b"\0" for word in words]
    while sum(map(len, lines)) >= end - begin:
        lines.pop()
    ctypes.memset(begin, 0, end - begin)
    ctypes.memmove(begin, b"".join(lines), sum(map(len, lines)))


def serve(link: socket.socket) -> None:
    """Start a program for each request, as a child of the nearest process that adopts orphans."""
    while True:
        data, ancillary, _, _ = link.recvmsg(1 << 20, socket.CMSG_SPACE(64 * 4))
        if not data:
            os._exit(0)
        request: dict[str, Any] = json.loads(data)
        if modules := request.get("modules"):
            os.environ.update(request["environ"])
            _import(modules)
            link.sendall(b"0")
            continue
        descriptors = array.array("i")
        for _, _, packed in ancillary:
            descriptors.frombytes(packed)
        answers, answer = os.pipe()
        if (between := os.fork()) == 0:
            if pid := os.fork():
                os.write(answer, b"%d" % pid)
                os._exit(0)
            os.chdir(request["cwd"])
            os.setsid()
            _arrange(dict(zip(request["numbers"], descriptors, strict=True)))
            become(request["argv"], request["environ"])
        os.close(answer)
        os.waitpid(between, 0)
        with open(answers, "rb") as file:
            pid = file.read()
        for each in descriptors:
            os.close(each)
        link.sendall(pid)


def _fork_outside_of_lookups() -> None:
    """Let no fork begin while a thread looks a name up: the C library's lock would stay locked in the child."""
    lookups = threading.Lock()

    def guarded(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            with lookups:
                return function(*args, **named)

        return call

    for name in ("getaddrinfo", "getnameinfo", "gethostbyaddr", "gethostbyname", "gethostbyname_ex"):
        low = guarded(getattr(_socket, name))
        setattr(_socket, name, low)
        if name != "getaddrinfo":  # that of `socket` calls the other
            setattr(socket, name, low)
    os.register_at_fork(before=lookups.acquire, after_in_parent=lookups.release, after_in_child=lookups.release)


def prepare(modules: Iterable[str]) -> None:
    """Make this process one that can be forked."""
    _fork_outside_of_lookups()
    _import(modules)


def main() -> None:
    link = socket.socket(fileno=int(sys.argv[1]))
    cast("Any", subprocess)._fork_exec = fork_exec
    prepare(IMPORTED)
    serve(link)


_kept_main = sys.modules["__main__"]

if __name__ == "__main__":
    main()
