"""The command line, called as a user does: in this process for its output, in a separate terminal otherwise."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import shlex
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from holdfast import api
from holdfast.cli import main
from holdfast.errors import HoldfastError

TORCH_FREE_TRAINER = Path(__file__).parents[1] / "programs" / "torch_free_trainer.py"
DEADLINE_S = 200.0


@dataclass(frozen=True)
class Answer:
    """The result of one command line."""

    code: int
    out: str
    err: str

    @property
    def data(self) -> Any:
        return json.loads(self.out)


class Cli:
    """Calls `holdfast` in this process."""

    def __init__(self, capture: pytest.CaptureFixture[str]) -> None:
        self._capture = capture

    def __call__(self, *words: str) -> Answer:
        code = main(words)
        out, err = self._capture.readouterr()
        return Answer(code, out, err)

    def transcript(self, *lines: list[str]) -> str:
        """What these command lines show, and their exit codes; the current folder is /here."""
        answers = [(words, self(*words)) for words in lines]
        text = "\n".join(
            f"$ holdfast {shlex.join(words)}\n{answer.out}{answer.err}exit code {answer.code}\n"
            for words, answer in answers
        )
        return text.replace(os.getcwd(), "/here")


@pytest.fixture
def cli(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """`holdfast` in an empty directory, with no runs yet."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return Cli(capsys)


class Terminal:
    """`holdfast` in a separate terminal, 120 columns wide."""

    def __init__(self, *words: str, **environ: str) -> None:
        self._master, slave = pty.openpty()
        os.set_blocking(self._master, False)
        clean = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", "import sys; from holdfast.cli import main; sys.exit(main())", *words],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**clean, "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40", **environ},
            preexec_fn=_own_terminal,  # noqa: PLW1509 - before any thread of ours
        )
        os.close(slave)
        self.raw = ""

    @property
    def text(self) -> str:
        """Everything it has shown, without colours and cursor movements."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.raw)

    def until(self, words: str) -> None:
        """Read until this text has been shown."""
        deadline = time.monotonic() + DEADLINE_S
        while words not in self.text:
            assert self._read(), f"it ended without {words!r}: {self.text[-2000:]}"
            assert time.monotonic() < deadline, f"no {words!r}: {self.text[-2000:]}"

    def press_ctrl_c(self) -> None:
        os.write(self._master, b"\x03")

    def end(self) -> int:
        """Read to the end; returns the exit code."""
        while self._read():
            pass
        return self.process.wait(DEADLINE_S)

    def close(self) -> int:
        """Close the terminal window; return how the process in it ended."""
        os.close(self._master)
        return self.process.wait(DEADLINE_S)

    def _read(self) -> bool:
        ready, _, _ = select.select([self._master], [], [], DEADLINE_S)
        assert ready, f"nothing was shown for {DEADLINE_S:g} s: {self.text[-2000:]}"
        try:
            data = os.read(self._master, 65536)
        except OSError:
            return False
        self.raw += data.decode("utf-8", "replace")
        return bool(data)


def _own_terminal() -> None:
    """Lead a session whose terminal is standard input, so that Ctrl-C and the terminal's closing reach this process."""
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture
def terminal(home: Path) -> Callable[..., Terminal]:
    """Opens a terminal with `holdfast` and these arguments in it."""
    return Terminal


@pytest.fixture
def stepper() -> list[str]:
    """The command of a job whose ranks step together: append the number of steps and seconds for each."""
    return [sys.executable, str(TORCH_FREE_TRAINER)]


@pytest.fixture
def no_run_left(home: Path) -> Iterator[None]:
    """End all runs that a test has left."""
    yield
    for run in api.runs():
        try:
            api.cancel(run, force=True)
        except HoldfastError:
            continue
        for _ in api.follow(run):
            pass
