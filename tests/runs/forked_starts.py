"""Starts runs as forks of one process that has imported torch (tests/programs/python_forks.py)."""

from __future__ import annotations

import array
import contextlib
import ctypes
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from holdfast.host.processes import HELPER, die_with_parent

FORKS = Path(__file__).parents[1] / "programs" / "python_forks.py"
SLACK = "-" * 48 * 1024
"""Room for the arguments, and for the environment, of what is forked."""
FORKABLE = ("recovery.prewarm=false", "watch.step_clock=false")
"""A job's settings so that its ranks are forked: a zygote imports torch anew, and the clock changes PYTHONPATH."""
CGROUPS = Path("/proc/self/cgroup")
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None)


class ForkedStarts:
    """The process that is forked, and what this process starts through it: modules of holdfast, in a new session."""

    def __init__(self) -> None:
        self._exec: Any = cast("Any", subprocess)._fork_exec
        self._cgroups = CGROUPS.read_bytes()
        self._lock = threading.Lock()
        self._preloaded = set[str]()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(FORKS), str(theirs.fileno()), SLACK],
                # A test that acts as a supervisor kills its children, but no helper. Forks have their own environment.
                env=os.environ | {"OMP_NUM_THREADS": "1", "HOLDFAST_TEST_SLACK": SLACK, HELPER: "tests"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                preexec_fn=die_with_parent,  # noqa: PLW1509 - no other thread holds a lock meanwhile
                start_new_session=True,
            )
        self._link = ours

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Start what can be forked in this way meanwhile."""
        before = cast("Any", subprocess)._fork_exec
        cast("Any", subprocess)._fork_exec = self._start
        try:
            yield
        finally:
            cast("Any", subprocess)._fork_exec = before

    def preload(self, *modules: str, environ: Mapping[str, str] | None = None) -> None:
        """Import more modules, with these variables, before what is started from now on."""
        if self._preloaded.issuperset(modules):
            return
        self._preloaded.update(modules)
        self._link.send(json.dumps({"modules": modules, "environ": environ or {}}).encode())
        assert self._link.recv(64)

    def close(self) -> None:
        """End the process; what it has started is not affected."""
        self._link.close()
        self._process.wait()

    def _start(self, *given: Any) -> int:
        """In place of `_posixsubprocess.fork_exec`."""
        argv = [os.fsdecode(word) for word in given[0]]
        new_session, preexec = given[15], given[21]
        if argv[0] != sys.executable or argv[1] != "-m" or not argv[2].startswith("holdfast.") or not new_session:
            return self._exec(*given)
        if CGROUPS.read_bytes() != self._cgroups:  # of a test that limits the memory of what it starts
            return self._exec(*given)
        assert preexec is None
        environ = os.environ if given[5] is None else dict(os.fsdecode(each).split("=", 1) for each in given[5])
        cwd = os.fsdecode(given[4]) if given[4] else os.getcwd()
        streams = {0: given[6], 1: given[9], 2: given[11]} | {fd: fd for fd in given[3] if fd != given[13]}
        streams = {number: number if fd == -1 else fd for number, fd in streams.items()}
        request = {"argv": argv, "environ": dict(environ), "cwd": cwd, "numbers": [*streams]}
        descriptors = array.array("i", streams.values()).tobytes()
        with self._lock:
            _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                self._link.sendmsg(
                    [json.dumps(request).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)]
                )
                return int(self._link.recv(64))
            finally:
                _libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
