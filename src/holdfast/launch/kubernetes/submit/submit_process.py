"""Starts the submit worker (submit_worker.py) early and sends it the cluster address and the objects to create.

The import of the Kubernetes client takes as long as reading the job, so the worker starts first and gets its input
later: first the address, with which it connects, then the request. Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from typing import Any

WORKER_MODULE = "holdfast.launch.kubernetes.submit.submit_worker"
DETACH = b"detach\n"
"""Message that confirms the submission; a worker that does not receive it rolls back."""
ROLL_BACK_TIMEOUT_S = 60.0
"""Longest time to wait for the rollback."""


class SubmitProcess:
    """Handle of a submit worker in its parent process."""

    def __init__(self) -> None:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - until it writes to the run's log
        self.process = subprocess.Popen(
            [sys.executable, "-m", WORKER_MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            cwd="/",
            start_new_session=True,
        )
        self.connecting = False
        """Whether it has received the cluster address."""

    def connect(self, context: str | None, namespace: str) -> None:
        """Send it the cluster address; `request` reports a worker that has already died."""
        assert self.process.stdin is not None
        self.connecting = True
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps({"context": context, "namespace": namespace}).encode() + b"\n")
            self.process.stdin.flush()

    def request(self, submit_request: bytes) -> Mapping[str, Any] | None:
        """Send a request and wait for the result; None if the worker has died."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(submit_request + b"\n")
            self.process.stdin.flush()
            return json.loads(self.process.stdout.readline() or b"null")
        except BrokenPipeError:
            return None

    def detach(self) -> None:
        """Confirm the submission; the worker continues without this process."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(DETACH)
        self.process.stdin.close()
        self.process.stdout.close()
        self._stderr.close()

    def roll_back(self) -> tuple[str, ...]:
        """Make the worker roll back and wait until it has; returns the last lines of its stderr."""
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


class _Prestarted(threading.local):
    """The worker that was started and not taken yet: each thread starts its own runs."""

    process: SubmitProcess | None = None


_prestarted = _Prestarted()


def prestart() -> None:
    """Start a worker early, unless one is running; an unused worker ends with this process."""
    _prestarted.process = _prestarted.process or SubmitProcess()


def connect(context: str | None, namespace: str) -> None:
    """Make the prestarted worker, or a new one, connect; `request` reports a failure."""
    known = _prestarted.process
    if known is not None and known.connecting:  # left by a failed start
        known.roll_back()
        known = None
    _prestarted.process = known or SubmitProcess()
    _prestarted.process.connect(context, namespace)


def take_process() -> SubmitProcess:
    """The worker that has the cluster address."""
    found = _prestarted.process
    assert found is not None
    _prestarted.process = None
    return found
