"""Watches the counters of a node's RDMA ports while its agent runs, and reports what fails or becomes slow."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from holdfast.agent.rdma_traffic import Traffic, updated
from holdfast.findings import Finding
from holdfast.host.rdma_counters import RdmaCounterFiles, pauses

POLL_S = 5.0
"""Seconds between two readings; one of eight ports takes a few milliseconds of CPU, most of it in the driver."""

Pauses = Mapping[str, Mapping[str, int]]
"""By port, as `ethtool -S` counts them."""


async def watch_rdma(
    where: str, report_finding: Callable[[Finding], None], *, root: Path = Path("/"), poll_s: float = POLL_S
) -> None:
    """Poll until cancelled; returns at once where there is no active port."""
    files = RdmaCounterFiles(root)
    if not files.kinds:
        return
    try:
        traffic, first = Traffic(kinds=files.kinds), await asyncio.to_thread(_pauses, files)
        while True:
            reading = await asyncio.to_thread(lambda: files.read(time.monotonic()))
            traffic, findings = updated(traffic, reading, where)
            for finding in findings:
                now = await asyncio.to_thread(_pauses, files)
                report_finding(_with_pauses(finding, first, now))
            await asyncio.sleep(poll_s)
    finally:
        files.close()


def _pauses(files: RdmaCounterFiles) -> Pauses:
    return {port: pauses(interface) for port, interface in files.interfaces.items()}


def _with_pauses(finding: Finding, first: Pauses, now: Pauses) -> Finding:
    """Add how often flow control has paused the finding's port."""
    port = finding.where.rpartition(", ")[2]
    grown = {name: value - first.get(port, {}).get(name, 0) for name, value in now.get(port, {}).items()}
    if not (text := ", ".join(f"{name} +{value:,}" for name, value in grown.items() if value > 0)):
        return finding
    return msgspec.structs.replace(finding, evidence=(*finding.evidence, f"{port} since the agent's start: {text}"))
