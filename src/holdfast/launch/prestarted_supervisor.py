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

from holdfast.host.processes import ARGUMENT_ROOM

MODULE = "holdfast.launch.waiting_supervisor"


class _Prestarted(threading.local):
    """The supervisor that was started and has no run yet: each thread starts its own runs."""

    process: subprocess.Popen[bytes] | None = None


_prestarted = _Prestarted()


def prestart() -> None:
    """Start a supervisor, unless one is waiting; it ends with this process if it gets no run."""
    _prestarted.process = _prestarted.process or subprocess.Popen(
        [sys.executable, "-m", MODULE, ARGUMENT_ROOM],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        start_new_session=True,
    )


def begin(words: Sequence[str], environ: Mapping[str, str], log: Path) -> subprocess.Popen[bytes] | None:
    """Have the waiting supervisor continue with these arguments, the first of which is a module; None if none waits."""
    supervisor, _prestarted.process = _prestarted.process, None
    if supervisor is None:
        return None
    assert supervisor.stdin is not None
    order = {"words": [*words], "environ": dict(environ), "log": str(log)}
    try:
        with supervisor.stdin as link:
            link.write(json.dumps(order).encode())
    except BrokenPipeError:
        supervisor.wait()
        return None
    return supervisor
