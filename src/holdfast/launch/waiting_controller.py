"""A controller that starts before its run is known, and does its imports meanwhile.

Its supervisor (waiting_supervisor.py) sends it the run's folder and the descriptors that the controller inherits
otherwise (controller_supervisor.py). Standard library only.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from msgspec import Struct

from holdfast.host.process_arguments import ARGUMENT_ROOM, show_arguments

CONTROLLER = "holdfast.controller_main"
WAIT = "--wait"
"""First argument of a controller that waits for its run; then comes the descriptor of its socket."""
HOSTS_CONTROLLER = "holdfast.launch.hosts.waiting_hosts_controller"
"""The controller that connects the hosts of a target while it waits."""
MAX_BYTES = 1 << 20
LOOPBACK = "127.0.0.1"
BACKLOG = 4096
"""Agents that may connect at the same time."""


class ExpectedTarget(Struct, frozen=True, kw_only=True):
    """Where the run will probably be: a target file, and the folder that its relative paths start from."""

    target: Path
    base: Path


def listen_for_agents(address: str, port: int = 0) -> socket.socket:
    """Listen at an address; port 0 stands for any."""
    return socket.create_server((address, port), backlog=BACKLOG)


class WaitingController:
    """The supervisor's end; the controller connects the hosts of a target, if given, which reach it at `agents`."""

    def __init__(self, expected: ExpectedTarget | None = None) -> None:
        self.agents = listen_for_agents(LOOPBACK) if expected else None
        port = self.agents.getsockname()[1] if self.agents else 0
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        begins = (HOSTS_CONTROLLER, str(expected.target), str(expected.base), str(port)) if expected else (CONTROLLER,)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *begins, WAIT, str(theirs.fileno()), ARGUMENT_ROOM],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
            )

    def begin(
        self, folder: Path, descriptors: Sequence[int], more_words: Sequence[str], log: BinaryIO, lock: int
    ) -> subprocess.Popen[bytes] | None:
        """Have it continue as the controller of a run; returns its process, or None if it has ended."""
        order = {"folder": str(folder), "more_words": [*more_words], "environ": dict(os.environ)}
        try:
            with self._link:
                socket.send_fds(self._link, [json.dumps(order).encode()], [log.fileno(), lock, *descriptors])
        except OSError:
            self.end()
            return None
        return self._process

    def end(self) -> None:
        """Let it end without a run."""
        self._link.close()
        self._process.wait()


def await_run(link: int) -> list[str]:
    """The arguments that the controller would have been started with; exits if there is no run."""
    with socket.socket(fileno=link) as supervisor:
        order, descriptors, _, _ = socket.recv_fds(supervisor, MAX_BYTES, 8)
    if not order:
        sys.exit()
    wanted = json.loads(order)
    log, _lock, *handed_down = descriptors  # the lock stays open as long as this process runs
    os.environ.clear()
    os.environ.update(wanted["environ"])
    for number in (1, 2):
        os.dup2(log, number)
    os.close(log)
    words = [wanted["folder"], *map(str, handed_down), *wanted["more_words"]]
    show_arguments([sys.executable, "-m", CONTROLLER, *words])
    return words
