"""Starts a supervisor and its controller before their run is known: both import while the job is being read.

The command's end: waiting_supervisor.py is the process. Standard library only.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from holdfast.host.process_arguments import ARGUMENT_ROOM
from holdfast.launch.waiting_controller import ExpectedTarget

WAITING = "holdfast.launch.waiting_supervisor"
SUPERVISOR = "holdfast.launch.local.local_supervisor"
"""What the waiting one becomes."""


class _Prestarted(threading.local):
    """The supervisor that was started and has no run yet: each thread starts its own runs."""

    process: subprocess.Popen[bytes] | None = None
    connects_hosts = False
    """Whether its controller connects the hosts of a target."""


_prestarted = _Prestarted()


def prestart(hosts: ExpectedTarget | None = None, *, own_session: bool = True) -> None:
    """Start a supervisor, unless one is waiting; it ends with this process if it gets no run.

    Its controller begins to connect the `hosts` of a target.
    """
    words = (str(hosts.target), str(hosts.base)) if hosts else ()
    if _prestarted.process is None or _prestarted.process.poll() is not None:
        _prestarted.connects_hosts = hosts is not None
        _prestarted.process = subprocess.Popen(
            [sys.executable, "-m", WAITING, *words, ARGUMENT_ROOM],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=own_session,
        )


def begin(
    words: Sequence[str],
    environ: Mapping[str, str],
    log: Path,
    *,
    own_session: bool = True,
    on_hosts: bool = False,
) -> subprocess.Popen[bytes]:
    """Start a supervisor with these arguments, the first of which is its module; it may have been prestarted.

    One that connects hosts ends if the run is not on any.
    """
    supervisor = _take(on_hosts=on_hosts) if words[0] == SUPERVISOR else None
    if supervisor is not None:
        assert supervisor.stdin is not None
        order = {"words": [*words], "environ": dict(environ), "log": str(log)}
        try:
            with supervisor.stdin as link:
                link.write(json.dumps(order).encode())
            return supervisor
        except BrokenPipeError:
            supervisor.wait()
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", *words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=dict(environ),
            cwd="/",
            start_new_session=own_session,
        )


def _take(*, on_hosts: bool) -> subprocess.Popen[bytes] | None:
    """The prestarted supervisor; one that connects hosts for a run that is on none is left to end."""
    supervisor, _prestarted.process = _prestarted.process, None
    if supervisor is None or on_hosts or not _prestarted.connects_hosts:
        return supervisor
    assert supervisor.stdin is not None
    supervisor.stdin.close()
    return None
