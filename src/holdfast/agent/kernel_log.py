"""Reads the kernel's log, where this process may."""

from __future__ import annotations

import os
from pathlib import Path

KERNEL_LOG = Path("/dev/kmsg")

_RECORD_BYTES = 8192
"""More than the kernel's longest record; a read of less fails."""


def kernel_records(since_us: int, log: Path = KERNEL_LOG) -> list[str]:
    """The texts of the kernel's records since a time in microseconds since boot; none if the log is not readable."""
    # 4,1234,98765432,-;NVRM: Xid (PCI:0000:1b:00): 79, pid=1234, name=python, GPU has fallen off the bus.
    #  SUBSYSTEM=pci
    records = (line.partition(";") for line in _read(log).decode(errors="replace").splitlines())
    return [text for stamp, _, text in records if _time_us(stamp) >= since_us]


def _time_us(stamp: str) -> int:
    """The time in a record's prefix (`priority,number,microseconds,flags`); -1 for a line that is no record."""
    fields = stamp.split(",")
    return int(fields[2]) if len(fields) > 3 and fields[2].isdecimal() else -1


def _read(log: Path) -> bytes:
    """The whole log: each read of the device returns one record, and fails after the last."""
    try:
        descriptor = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return b""
    records: list[bytes] = []
    try:
        while True:
            try:
                record = os.read(descriptor, _RECORD_BYTES)
            except BrokenPipeError:
                continue  # the kernel overwrote its ring buffer while it was read
            except OSError:
                break
            if not record:
                break
            records.append(record)
    finally:
        os.close(descriptor)
    return b"".join(records)
