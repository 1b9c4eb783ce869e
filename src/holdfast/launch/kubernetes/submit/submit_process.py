"""Owns a process that is sent to a cluster: it loads a client while here it is found out what is to be made there.

To load the client takes as long as to read the job, so it is started first and told later: where to, by which it
connects, and then what. Standard library only.
Refuses to own what is made (submit_run.py) and how (submit_worker.py, which is what runs).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

WORKER_MODULE = "holdfast.launch.kubernetes.submit.submit_worker"
DETACH = b"detach\n"
"""What it is told that is to go on; one that hears nothing more undoes what it has done."""
ROLL_BACK_TIMEOUT_S = 60.0
"""Longest that this is waited for."""

_process: SubmitProcess | None = None


class SubmitProcess:
    """The process, as whoever sent it sees it."""

    def __init__(self) -> None:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - as long as it has no run's log to write to
        self.process = subprocess.Popen(
            [sys.executable, "-m", WORKER_MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            cwd="/",
            start_new_session=True,
        )
        self.connecting = False
        """Whether it knows where to."""

    def connect(self, context: str | None, namespace: str) -> None:
        """Let it know where to; one that has ended is heard of when it is asked."""
        assert self.process.stdin is not None
        self.connecting = True
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps({"context": context, "namespace": namespace}).encode() + b"\n")
            self.process.stdin.flush()

    def request(self, submit_request: bytes) -> Mapping[str, Any] | None:
        """What became of an errand, once it is known; None where nobody lives to say it."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(submit_request + b"\n")
            self.process.stdin.flush()
            return json.loads(self.process.stdout.readline() or b"null")
        except BrokenPipeError:
            return None

    def detach(self) -> None:
        """Let it go on by itself."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(DETACH)
        self.process.stdin.close()
        self.process.stdout.close()
        self._stderr.close()

    def roll_back(self) -> tuple[str, ...]:
        """Have all of it undone, and wait until it is; its last words."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(ROLL_BACK_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self._stderr.seek(0)
        return tuple(self._stderr.read().decode(errors="replace").splitlines()[-5:])


def prestart() -> None:
    """Send one before anything is known, unless that is done; where nothing comes of it, it ends with this process."""
    global _process
    _process = _process or SubmitProcess()


def connect(context: str | None, namespace: str) -> None:
    """Let the one that was sent ahead, or one that is sent now, connect; what it cannot is said when it is asked."""
    global _process
    if _process is not None and _process.connecting:  # by a start that came to nothing
        _process.roll_back()
        _process = None
    _process = _process or SubmitProcess()
    _process.connect(context, namespace)


def take_process() -> SubmitProcess:
    """The one that knows where to."""
    global _process
    assert _process is not None
    found, _process = _process, None
    return found
