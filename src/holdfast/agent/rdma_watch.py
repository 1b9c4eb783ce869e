"""Watches the counters of a node's RDMA ports while its agent runs, and reports what fails or becomes slow."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from holdfast.agent.rdma_traffic import Traffic, updated
from holdfast.findings import Finding
from holdfast.host.daemon_threads import in_daemon_thread
from holdfast.host.rdma_counters import RdmaCounterFiles, pauses

T = TypeVar("T")

POLL_S = 5.0
"""Seconds between two readings; one of eight ports takes a few milliseconds of CPU, most of it in the driver."""

Pauses = Mapping[str, Mapping[str, int]]
"""By port, as `ethtool -S` counts them."""


async def watch_rdma(
    where: str, report_finding: Callable[[Finding], None], *, root: Path = Path("/"), poll_s: float = POLL_S
) -> None:
    """Poll until cancelled; returns at once where there is no active port."""
    files = await _read(lambda: RdmaCounterFiles(root))
    if not files.kinds:
        return
    try:
        traffic, first = Traffic(kinds=files.kinds), await _read(lambda: _pauses(files))
        while True:
            reading = await _read(lambda: files.read(time.monotonic()))
            traffic, findings = updated(traffic, reading, where)
            for finding in findings:
                report_finding(_with_pauses(finding, first, await _read(lambda: _pauses(files))))
            await asyncio.sleep(poll_s)
    finally:
        files.close()


async def _read(read: Callable[[], T]) -> T:
    """Read where a driver that hangs blocks neither the agent's work nor its exit."""
    return await asyncio.wrap_future(in_daemon_thread(read))


def _pauses(files: RdmaCounterFiles) -> Pauses:
    return {port: pauses(interface) for port, interface in files.interfaces.items()}


def _with_pauses(finding: Finding, first: Pauses, now: Pauses) -> Finding:
    """Add how often flow control has paused the finding's port."""
    port = finding.where.rpartition(", ")[2]
    grown = {name: value - first.get(port, {}).get(name, 0) for name, value in now.get(port, {}).items()}
    if not (text := ", ".join(f"{name} +{value:,}" for name, value in grown.items() if value > 0)):
        return finding
    return msgspec.structs.replace(finding, evidence=(*finding.evidence, f"{port} since the agent's start: {text}"))
