"""Finds what explains a rank's failure in the file to which only NCCL writes."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from holdfast.protocol.nccl_log_files import files_written

TAIL_BYTES = 256 * 1024
"""The last bytes of each file that are searched: NCCL logs a trace of a few KB after a failure."""
MAX_FILES = 16
MAX_WARNINGS = 256

MAX_AGE_S = 3600.0
"""Files that were not written for longer are about something else: torch's longest default timeout is half of that."""

_TELLING = re.compile(r" NCCL WARN \S| NCCL INFO (?:Failed to open libibverbs|NET/IB : No device found)")
# n1:8:9 [0] net.cc:1092 NCCL WARN Error: network IB not found.
_NO_NETWORK = re.compile(r"NCCL WARN (?:Error: network \S+ not found|Failed to initialize any NET plugin)")


def nccl_warnings(environ: Mapping[str, str]) -> list[str]:
    """The warnings, and the lines about what is missing, of the processes that have this environment."""
    files = files_written(environ)[:MAX_FILES]
    return [line for path in files for line in _tail(path) if _TELLING.search(line)][-MAX_WARNINGS:]


def explaining(lines: Iterable[str]) -> tuple[str, ...]:
    """The warning that explains a failure best, and what is missing if that is a whole network; empty without any.

    It is the first that names a cause, or else the first that a peer's end or a network's does not bring about.
    """
    from holdfast.diagnose.nccl_transport.causes import named_by  # takes 40 ms, which few failures need
    from holdfast.diagnose.peer_symptoms import peer_symptom
    from holdfast.diagnose.rules.nccl import NOT_FATAL_PATTERN

    def weight(line: str) -> tuple[bool, bool, bool]:
        return not named_by(line.encode()), re.search(NOT_FATAL_PATTERN, line) is not None, bool(peer_symptom(line))

    known = [*lines]
    warned = min((line for line in known if " NCCL WARN " in line), key=weight, default="")
    missing = [line for line in known if " NCCL INFO " in line][:1] if _NO_NETWORK.search(warned) else []
    return tuple(filter(None, (warned, *missing)))


def _tail(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            if time.time() - os.fstat(file.fileno()).st_mtime > MAX_AGE_S:
                return []
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            return file.read(TAIL_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return []
