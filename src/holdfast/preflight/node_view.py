"""A node as checks see it: a file tree, commands, limits, and what the job needs."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock, Thread
from typing import TypeVar, cast

from holdfast.protocol.node_requirements import NodeRequirements

T = TypeVar("T")

READING_TIMEOUT_S = 10.0
"""Longest that a check waits for what another one reads; a program that a driver blocks cannot even be killed."""


class NotLookedAt(Exception):
    """A check cannot look: a file, a command or a permission is missing. It is no pass, and no failure."""


RunCommand = Callable[[Sequence[str], float], str]
"""Runs a program, at most so many seconds, and returns its output; raises NotLookedAt, or TimeoutError."""


@dataclass(frozen=True, kw_only=True)
class NodeView:
    """Everything that a check reads comes from here, so that it also runs on a recorded tree.

    Each run of checks has a new one: what `once` has read stays.
    """

    wanted: NodeRequirements
    root: Path = Path("/")
    """Where /proc, /sys, /dev and /etc are."""
    run: RunCommand = field(default_factory=lambda: run_command)
    environ: Mapping[str, str] = field(default_factory=dict[str, str])
    """The agent's environment, which ranks inherit."""
    address: str = ""
    """Address at which the other nodes reach this one; empty if it is not known."""
    _readings: dict[Callable[[NodeView], object], Future[object]] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )
    _lock: Lock = field(init=False, repr=False, compare=False, default_factory=Lock)

    def read(self, path: str) -> str:
        """The text of a file such as `proc/meminfo`, stripped; raises NotLookedAt if it cannot be read."""
        try:
            return (self.root / path).read_text(errors="replace").strip()
        except OSError as error:
            raise NotLookedAt(f"/{path}: {error.strerror}") from error

    def list(self, path: str) -> tuple[str, ...]:
        """The sorted names in a folder; empty if there is none. Raises NotLookedAt if it may not be read."""
        try:
            return tuple(sorted(each.name for each in (self.root / path).iterdir()))
        except (FileNotFoundError, NotADirectoryError):
            return ()
        except OSError as error:
            raise NotLookedAt(f"/{path}: {error.strerror}") from error

    def once(self, read: Callable[[NodeView], T]) -> T:
        """What `read` returns or raises, such as a report of nvidia-smi: read once for all checks and their threads."""
        with self._lock:
            reading, first = self._readings.get(read), False
            if reading is None:
                reading, first = self._readings.setdefault(read, Future()), True
        if first:
            try:
                reading.set_result(read(self))
            except Exception as error:  # every check that needs this reading gets it
                reading.set_exception(error)
        try:
            return cast(T, reading.result(READING_TIMEOUT_S))
        except TimeoutError as error:
            if reading.done():
                raise
            raise TimeoutError(f"another check has read the same for more than {READING_TIMEOUT_S:g} s") from error


def run_command(argv: Sequence[str], timeout_s: float) -> str:
    """The output of a program of this machine, whatever its exit code."""
    if (program := shutil.which(argv[0])) is None:
        raise NotLookedAt(f"there is no program `{argv[0]}`")
    try:
        process = subprocess.Popen(
            [program, *argv[1:]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            errors="replace",
        )
    except OSError as error:
        raise NotLookedAt(f"`{argv[0]}`: {error.strerror}") from error
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        process.kill()
        Thread(target=process.communicate, daemon=True).start()  # it ends when the driver lets it, perhaps never
        raise TimeoutError(f"`{' '.join(argv)}` has not answered within {timeout_s:g} s") from error
    return output
