"""Reads the kernel's log, where this process may: what it holds, or what is added from now on."""

from __future__ import annotations

import os
import stat
from pathlib import Path

KERNEL_LOG = Path("/dev/kmsg")

_RECORD_BYTES = 8192
"""More than the kernel's longest record; a read of less fails."""


MAX_RECORDS = 500
"""Most records of one reading; the kernel can log in floods."""


def kernel_records(since_us: int, log: Path = KERNEL_LOG) -> list[str]:
    """The texts of the kernel's records since a time in microseconds since boot; none if the log is not readable."""
    # 4,1234,98765432,-;NVRM: Xid (PCI:0000:1b:00): 79, pid=1234, name=python, GPU has fallen off the bus.
    #  SUBSYSTEM=pci
    return [text for time_us, text in _parsed(_read(log)) if time_us >= since_us]


class KernelLogTail:
    """The records that the kernel adds from now on."""

    def __init__(self, log: Path = KERNEL_LOG) -> None:
        """Raises OSError if the log may not be read."""
        self._file = os.open(log, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        kind = os.fstat(self._file).st_mode
        if not stat.S_ISFIFO(kind):
            os.lseek(self._file, 0, os.SEEK_END)
        self._notifies = not stat.S_ISREG(kind)

    def descriptor(self) -> int | None:
        """What becomes readable with the next record; None for a plain file."""
        return self._file if self._notifies else None

    def read(self, at_s: float = 0.0) -> tuple[str, ...]:
        """The texts of the records since the last reading."""
        return tuple(text for time_us, text in _parsed(_read_records(self._file, MAX_RECORDS)) if time_us >= 0)

    def close(self) -> None:
        """Close the log."""
        os.close(self._file)


def _parsed(data: bytes) -> list[tuple[int, str]]:
    """Each record's time, and its text without its properties."""
    records = (line.partition(";") for line in data.decode(errors="replace").splitlines())
    return [(_time_us(stamp), text) for stamp, _, text in records]


def _time_us(stamp: str) -> int:
    """The time in a record's prefix (`priority,number,microseconds,flags`); -1 for a line that is no record."""
    fields = stamp.split(",")
    return int(fields[2]) if len(fields) > 3 and fields[2].isdecimal() else -1


def _read(log: Path) -> bytes:
    """The whole log."""
    try:
        descriptor = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return b""
    try:
        return _read_records(descriptor)
    finally:
        os.close(descriptor)


def _read_records(descriptor: int, most: int | None = None) -> bytes:
    """What is left of the log: each read of the device returns one record, and fails after the last."""
    records: list[bytes] = []
    while most is None or len(records) < most:
        try:
            record = os.read(descriptor, _RECORD_BYTES)
        except BrokenPipeError:
            continue  # the kernel overwrote its ring buffer while it was read
        except OSError:
            break
        if not record:
            break
        records.append(record)
    return b"".join(records)
