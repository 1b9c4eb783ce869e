"""Reads how long a thread has waited for a CPU although it could have run: the load of its node, not its own work."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

SCHEDSTAT = Path("/proc/thread-self/schedstat")


class CpuWait:
    """The thread that creates it; 0.8 µs per reading. Kernels without scheduler statistics count nothing."""

    def __init__(self, path: Path = SCHEDSTAT) -> None:
        self._file: int | None = None
        with suppress(OSError):
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __call__(self) -> float:
        """Seconds since the thread began; never less than before."""
        if self._file is None:
            return 0.0
        # nanoseconds on a CPU, nanoseconds of waiting for one, times it got one: 58729696 215199642 22
        try:
            return int(os.pread(self._file, 64, 0).split()[1]) / 1e9
        except (OSError, ValueError, IndexError):
            return 0.0

    def close(self) -> None:
        """Close the file; from now on nothing is counted."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
