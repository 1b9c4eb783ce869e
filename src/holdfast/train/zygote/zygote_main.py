"""Zygote process: imports a program's modules in advance, then forks a rank each time the agent requests one.

It runs inside the user's interpreter, before the program's first line (sitecustomize.py), so it uses only the standard
library of Python 3.10. It sends its agent one JSON object per line. The agent sends three descriptors: a file with the
rank's configuration, the rank's log, and a socket for the rank's process ID. The same request can ask whether a rank
with other code could start (relocate.py).

Two forks start a rank, so that the agent adopts it: to the kernel it is the agent's child, like any other rank.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.machinery
import importlib.util
import json
import os
import select
import signal
import socket
import sys
import time
from typing import Any, NoReturn

from huge_pages import use_huge_pages
from preload import NotForkable, preload
from relocate import CodeLocation

FOLDER = os.path.dirname(os.path.abspath(__file__))
OWN_MODULES = ("zygote_main", "relocate", "preload", "import_scan", "huge_pages")
"""Modules hidden from the program."""
PROCESS_NAME = b"holdfast-zygote"
"""What `ps -o comm` shows for a zygote, whose arguments are those of the rank."""
ADOPT_TIMEOUT_S = 10.0
"""Maximum wait of a rank for its adoption; the process in between only has to exit."""
_IDLE_S = 1.0
"""Seconds without a request after which it prepares for faster forks, which takes a tenth of a second."""
_NICENESS = 5
"""Niceness while importing: a quarter of a core when ranks use all cores, so that it still finishes soon."""
_CAP_SYS_NICE = 23
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
_libc = ctypes.CDLL(None)


def run(message: str) -> None:
    """Prepare as the message requests, then wait; returns only in each rank."""
    config: dict[str, Any] = json.loads(message)
    link = socket.socket(fileno=config["socket"])
    _restore_environment(config["pythonpath"])
    _send(link, here=".".join(map(str, sys.version_info[:3])))
    if config["probe"]:
        os._exit(0)
    with open("/proc/self/comm", "rb") as file:
        name = file.read().strip()
    _libc.prctl(_PR_SET_NAME, PROCESS_NAME, 0, 0, 0)
    nice = _lower_priority()
    try:
        _import_sitecustomize()
        excluded = frozenset(config["without"])
        unknown = frozenset(config["unknown"])
        kind, program = config["kind"], config["program"]
        ready, imported = preload(kind, program, excluded=excluded, unknown=unknown, min_modules=config["least"])
        location = CodeLocation(config["code"], kind, program)
        _send(link, ready=ready)
    except NotForkable as unfit:
        _send(link, unfit=unfit.module, why=unfit.why)
        os._exit(0)
    rank, log, gate = _serve_forks(link, location, imported)
    link.close()
    _libc.prctl(_PR_SET_NAME, name, 0, 0, 0)
    _become_rank(rank, log, nice, location)
    with socket.socket(fileno=gate) as door:
        door.sendall(b"%d" % os.getpid())
    for module in OWN_MODULES:
        sys.modules.pop(module, None)


def _restore_environment(pythonpath: str | None) -> None:
    """Restore the environment and path to what the program would have without this module."""
    os.environ.pop("HOLDFAST_ZYGOTE_ENVIRON_SLACK", None)
    os.environ.pop("PYTHONPATH")
    if pythonpath is not None:
        os.environ["PYTHONPATH"] = pythonpath
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != FOLDER]
    sys.path_importer_cache.pop(FOLDER, None)


def _send(link: socket.socket, **fields: object) -> None:
    link.sendall(json.dumps(fields).encode() + b"\n")


def _lower_priority() -> int | None:
    """Yield the CPU to the ranks, as far as a fork can undo it; returns the priority to restore, if any.

    A new session, like that of a fork, is a separate scheduler group on kernels with autogroups.
    """
    if os.getsid(0) == os.getpid():
        try:
            with open("/proc/self/autogroup", "w") as file:
                file.write(str(_NICENESS))
        except OSError:
            pass
    with open("/proc/self/status") as file:
        may = next(int(line.split()[1], 16) for line in file if line.startswith("CapEff:"))
    if not may >> _CAP_SYS_NICE & 1:
        return None
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    os.setpriority(os.PRIO_PROCESS, 0, _NICENESS)
    return nice


def _import_sitecustomize() -> None:
    """Import the environment's own sitecustomize, if any, as Python would have done."""
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


def _serve_forks(link: socket.socket, location: CodeLocation, imported: list[str]) -> tuple[dict[str, Any], int, int]:
    """Fork on every request; returns only in forks that become ranks."""
    if not _is_requested(link, _IDLE_S):
        use_huge_pages(lambda: _is_requested(link, 0))
    while True:
        request, descriptors, _, _ = socket.recv_fds(link, 1, 3)
        if not request:
            os._exit(0)
        between = os.fork()
        if between == 0:
            given, log, gate = descriptors
            with open(given) as file:
                file.seek(0)
                rank: dict[str, Any] = json.load(file)
            if request == b"?":
                _answer_probe(gate, location, rank, imported)
            if os.fork():
                os._exit(0)
            return rank, log, gate
        for descriptor in descriptors:
            os.close(descriptor)
        os.waitpid(between, 0)


def _is_requested(link: socket.socket, within_s: float) -> bool:
    return bool(select.select([link], [], [], within_s)[0])


def _answer_probe(gate: int, location: CodeLocation, rank: dict[str, Any], imported: list[str]) -> NoReturn:
    """Report whether such a rank could start, and whether it would import more; never returns."""
    with socket.socket(fileno=gate) as door:
        try:
            _send(door, stuck="", more=location.check(rank, imported))
        except Exception as error:
            _send(door, stuck=str(error))
    os._exit(0)


def _become_rank(rank: dict[str, Any], log: int, nice: int | None, location: CodeLocation) -> None:
    """Set up the process as the agent does for a rank that it starts itself; see agent/rank_process.py."""
    os.setsid()
    if nice is not None:
        os.setpriority(os.PRIO_PROCESS, 0, nice)
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write(str(rank["oom_score_adj"]))
    _enter_cgroup(rank["group"])
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    location.switch_to(rank)
    _take_environment(rank["environ"])
    _wait_for_adoption(rank["agent"])
    _reset_after_fork()


def _enter_cgroup(group: str) -> None:
    """Enter a cgroup, if there is one; without it the agent finds this process's children by other means."""
    if group:
        with contextlib.suppress(OSError), open(f"{group}/cgroup.procs", "w") as file:
            file.write("0")


def _take_environment(environ: dict[str, str]) -> None:
    """Replace the environment, also where the kernel shows it (/proc/PID/environ): the agent identifies ranks by it.

    After every variable is set anew, nothing uses the memory in which the kernel put the original ones.
    """
    os.environ.clear()
    os.environ.update(environ)
    with open("/proc/self/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    begin, end = int(fields[47]), int(fields[48])
    lines = [os.fsencode(f"{name}={value}") + b"\0" for name, value in environ.items()]
    while sum(map(len, lines)) > end - begin:
        lines.pop()
    ctypes.memset(begin, 0, end - begin)
    ctypes.memmove(begin, b"".join(lines), sum(map(len, lines)))


def _wait_for_adoption(agent: int) -> None:
    """Set the parent-death signal once the agent is the parent."""
    deadline = time.monotonic() + ADOPT_TIMEOUT_S
    while os.getppid() != agent:
        if time.monotonic() > deadline:
            os._exit(70)
        time.sleep(0.0005)
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != agent:
        os._exit(70)


def _reset_after_fork() -> None:
    """Reseed random values drawn during imports, and refresh caches of the file system."""
    importlib.invalidate_caches()
    if (numpy := sys.modules.get("numpy.random")) is not None:
        numpy.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()
    if (process := sys.modules.get("multiprocessing.process")) is not None:
        process.current_process().authkey = os.urandom(32)
