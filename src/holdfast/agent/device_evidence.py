"""Finds the line, in a failed rank's output or its node's kernel log, that reports a fault of a device."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec import Struct

from holdfast.agent.nccl_warnings import explaining
from holdfast.events import DeviceFault
from holdfast.host.kernel_log import KERNEL_LOG, kernel_records

TAIL_BYTES = 32 * 1024
"""Output before a rank's end that is searched: torch's report of a failed watchdog, twice with its C++ frames."""
MAX_LINE_CHARS = 500

_OF_DEVICES = re.compile(r"CUDA|[Cc]uda|NCCL|nccl|NVRM|NVLink|[Xx]id\b|GPU|mlx5|\bIBV_|\bibv_|amdgpu|c10")
"""Words without which no line reports a fault of a device; most failures need no further search."""

# [rank3]: torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered
_EXCEPTION = re.compile(r"(?:\[rank\d+\]:\s*)?[A-Za-z_][\w.]*(?:Error|Exception): ")


class DeviceEvidence(Struct, frozen=True, kw_only=True):
    """A line, and what it reports of a device; both may be missing where NCCL has warned."""

    line: str = ""
    fault: DeviceFault | None = None
    warnings: tuple[str, ...] = ()
    """What NCCL's own file says of the failure."""


def device_evidence(
    error: str,
    log: Path,
    *,
    since_us: int,
    by_signal: bool,
    warnings: Callable[[], Sequence[str]] = tuple,
    kernel_log: Path = KERNEL_LOG,
) -> DeviceEvidence | None:
    """The strongest evidence for a rank that failed with an error line, or by a fatal signal; None without any.

    It ran since `since_us`, and NCCL wrote what `warnings` returns to its file. If its error speaks of no device, only
    other exceptions that it wrote count: older lines and the kernel's may be about something else. NCCL's lines explain
    a failure, but decide no fault: when it wrote them is not known, and the device may have recovered since.
    """
    written = [line for line in _tail(log) if _OF_DEVICES.search(line)]
    if by_signal or not error or _OF_DEVICES.search(error):
        kernels = (line for line in kernel_records(since_us, kernel_log) if _OF_DEVICES.search(line))
        lines, said = [error, *written, *kernels], warnings()
    else:
        lines, said = [line for line in written if _EXCEPTION.match(line)], ()
    if not any(lines) and not said:
        return None
    from holdfast.diagnose.device_fault_lines import strongest_fault  # takes 30 ms, which few failures need

    found = strongest_fault(lines)
    told = tuple(line.strip()[:MAX_LINE_CHARS] for line in (explaining(said) if said else ()))
    if found is None:
        return DeviceEvidence(warnings=told) if told else None
    return DeviceEvidence(line=found[0].strip()[:MAX_LINE_CHARS], fault=found[1], warnings=told)


def fault_of_line(line: str) -> DeviceFault | None:
    """What a line of the kernel's log says of a device."""
    if not _OF_DEVICES.search(line):
        return None
    from holdfast.diagnose.device_fault_lines import device_fault

    return device_fault(line)


def _tail(log: Path) -> list[str]:
    """The last lines of a rank's output in this attempt."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            return file.read(TAIL_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return []
