"""Finds what explains a rank's failure in the file to which only NCCL writes."""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Iterable, Iterator
from heapq import nlargest
from pathlib import Path

from holdfast.protocol.nccl_log_files import files_written

TAIL_BYTES = 256 * 1024
"""The last bytes of each file that are searched: NCCL logs a trace of a few KB after a failure."""
MAX_FILES = 16
MAX_WARNINGS = 256

MAX_AGE_S = 3600.0
"""Files that were not written for longer are about something else: torch's longest default timeout is half of that."""

CLOCK_LAG_S = 1.0
"""Files' times are those of the kernel's last tick, or of a file server."""

_TELLING = re.compile(r" NCCL WARN \S| NCCL INFO (?:Failed to open libibverbs|NET/IB : No device found)")
# n1:8:9 [0] net.cc:1092 NCCL WARN Error: network IB not found.
_NO_NETWORK = re.compile(r"NCCL WARN (?:Error: network \S+ not found|Failed to initialize any NET plugin)")


def nccl_warnings(path: str, since: float, processes: int) -> list[str]:
    """The warnings, and the lines about what is missing, of a rank's last processes, those of the last to write last.

    `path` is its private path, or empty; it has so many processes, and runs since then, in seconds of the system's
    clock. The files of others that its launcher has started again before are older.
    """
    since = max(since - CLOCK_LAG_S, time.time() - MAX_AGE_S)
    files = nlargest(min(processes, MAX_FILES), _written_since(path, since))
    lines = [line for _, file in reversed(files) for line in _tail(file) if _TELLING.search(line)]
    return lines[-MAX_WARNINGS:]


def explaining(lines: Iterable[str]) -> tuple[str, ...]:
    """The warning that explains a failure best, and what is missing if that is a whole network; empty without any.

    It is the last that names why nodes cannot connect, or else the last that neither a peer's end nor a network's
    brings about. Why NCCL uses another network explains only that it found none.
    """
    # They take 40 ms, which few failures need.
    from holdfast.diagnose.nccl_transport.causes import BY_NAME, Effect, named_by
    from holdfast.diagnose.peer_symptoms import peer_symptom
    from holdfast.diagnose.rules.nccl import NOT_FATAL_PATTERN

    known = [*lines]
    fatal = {Effect.FAILURE, *([Effect.SOCKETS] if any(map(_NO_NETWORK.search, known)) else [])}

    def weight(line: str) -> tuple[bool, bool, bool]:
        name = named_by(line.encode())
        explains = bool(name) and BY_NAME[name].effect in fatal
        harmless = not explains and (bool(name) or re.search(NOT_FATAL_PATTERN, line) is not None)
        return not explains, harmless, bool(peer_symptom(line))

    warned = min((line for line in reversed(known) if " NCCL WARN " in line), key=weight, default="")
    missing = [line for line in known if " NCCL INFO " in line][:1] if _NO_NETWORK.search(warned) else []
    return tuple(filter(None, (warned, *missing)))


def _written_since(path: str, since: float) -> Iterator[tuple[float, Path]]:
    """The files, each with when it was last written; a pipe in their place would block the reader."""
    for file in files_written(path):
        try:
            known = file.lstat()
        except OSError:
            continue
        if stat.S_ISREG(known.st_mode) and known.st_mtime >= since:
            yield known.st_mtime, file


def _tail(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            return file.read(TAIL_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return []
