"""Starts pytest-xdist's workers as forks of one process that has imported all test modules.

Each worker collects the tests. Most of the CPU time of that goes into the imports of the test modules and of what they
use, which a fork has already. `run_server` is the process that is forked. xdist starts `run_client` for each worker, in
place of an interpreter: it hands its standard streams to the fork, and stays until that ends.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, cast

STREAMS = (0, 1, 2)
BACKLOG = 64


class ForkedWorkers:
    """The process that is forked, for as long as xdist may start workers."""

    def __init__(self, paths: Sequence[str]) -> None:
        """Start it; like each worker, it collects the tests of these paths."""
        self._folder = tempfile.TemporaryDirectory(prefix="hfworkers-")
        self._address = Path(self._folder.name) / "socket"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(self._address))
            listener.listen(BACKLOG)
            self._process = subprocess.Popen(
                [sys.executable, __file__, "serve", str(listener.fileno()), *paths],
                stdin=subprocess.DEVNULL,
                pass_fds=(listener.fileno(),),
            )

    @property
    def python(self) -> str:
        """The command that xdist is to start for a worker, in place of Python's."""
        return f"{sys.executable} -S {__file__} work {self._address}"

    def close(self) -> None:
        """End the process; a worker ends when xdist closes its streams."""
        self._process.terminate()
        self._process.wait()
        self._folder.cleanup()


def run_server(listener: socket.socket, paths: Sequence[str]) -> None:
    """Import the tests, then fork for each client; returns at the end of a worker."""
    import pytest

    with _silent():  # what fails here fails in each worker too, which reports it
        pytest.main(["--collect-only", "-qq", "-p", "no:cacheprovider", "-p", "no:xdist", *paths])
        from holdfast.train.zygote.huge_pages import use_huge_pages

        use_huge_pages()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a worker but its client
    while True:
        client, _ = listener.accept()
        if os.fork() == 0:
            break
        client.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    listener.close()
    with client:  # closed by the end of this process, which tells the client
        _, descriptors, _, _ = socket.recv_fds(client, 1, len(STREAMS))
        for number, descriptor in zip(STREAMS, descriptors, strict=True):
            os.dup2(descriptor, number)
            os.close(descriptor)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 - it is a descriptor, and stays open
        main = sys.modules["__main__"] = ModuleType("__main__")
        try:
            exec(eval(sys.stdin.readline()), vars(main))  # what xdist has Python do by `-c`
        except Exception:
            traceback.print_exc()
            _exit(1)
        except SystemExit as left:
            _exit(left.code if isinstance(left.code, int) else int(left.code is not None))
        _exit(0)


def _exit(code: int) -> NoReturn:
    """End as Python does, but leave all objects to the kernel: to collect a million takes 3 s of CPU time."""
    try:
        cast("Any", threading)._shutdown()
        cast("Any", atexit)._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
    finally:
        os._exit(code)


def run_client(address: str) -> None:
    """Give the standard streams to a worker, and wait until it ends."""
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        socket.send_fds(server, [b"0"], STREAMS)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for number in STREAMS[:2]:  # xdist sees the end of a worker by these
            os.dup2(nowhere, number)
        server.recv(1)


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Drop what is written to the standard output meanwhile."""
    kept = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        run_server(socket.socket(fileno=int(sys.argv[2])), sys.argv[3:])
    else:
        run_client(sys.argv[2])
