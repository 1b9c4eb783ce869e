"""Owns a process that is sent to a cluster: it loads a client while here it is found out what is to be made there.

To load the client takes as long as to read the job, so it is started first and told later: where to, by which it
connects, and then what. Standard library only.
Refuses to own what is made (sending.py) and how (starting.py, which is what runs).
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

MODULE = "holdfast.launch.kubernetes.starting"
KEPT = b"kept\n"
"""What it is told that is to go on; one that hears nothing more undoes what it has done."""
UNDONE_S = 60.0
"""Longest that this is waited for."""

_sent: Envoy | None = None


class Envoy:
    """The process, as whoever sent it sees it."""

    def __init__(self) -> None:
        self._words = tempfile.TemporaryFile()  # noqa: SIM115 - as long as it has no run's log to write to
        self.process = subprocess.Popen(
            [sys.executable, "-m", MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._words,
            cwd="/",
            start_new_session=True,
        )
        self.headed = False
        """Whether it knows where to."""

    def head(self, context: str | None, namespace: str) -> None:
        """Let it know where to; one that has ended is heard of when it is asked."""
        assert self.process.stdin is not None
        self.headed = True
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps({"context": context, "namespace": namespace}).encode() + b"\n")
            self.process.stdin.flush()

    def ask(self, errand: bytes) -> Mapping[str, Any] | None:
        """What became of an errand, once it is known; None where nobody lives to say it."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(errand + b"\n")
            self.process.stdin.flush()
            return json.loads(self.process.stdout.readline() or b"null")
        except BrokenPipeError:
            return None

    def keep(self) -> None:
        """Let it go on by itself."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(KEPT)
        self.process.stdin.close()
        self.process.stdout.close()
        self._words.close()

    def recall(self) -> tuple[str, ...]:
        """Have all of it undone, and wait until it is; its last words."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(UNDONE_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self._words.seek(0)
        return tuple(self._words.read().decode(errors="replace").splitlines()[-5:])


def send_ahead() -> None:
    """Send one before anything is known, unless that is done; where nothing comes of it, it ends with this process."""
    global _sent
    _sent = _sent or Envoy()


def head(context: str | None, namespace: str) -> None:
    """Let the one that was sent ahead, or one that is sent now, connect; what it cannot is said when it is asked."""
    global _sent
    if _sent is not None and _sent.headed:  # by a start that came to nothing
        _sent.recall()
        _sent = None
    _sent = _sent or Envoy()
    _sent.head(context, namespace)


def sent() -> Envoy:
    """The one that knows where to."""
    global _sent
    assert _sent is not None
    found, _sent = _sent, None
    return found
