"""Notices that a node which exchanged data with others no longer does: its ranks may all wait for one. Pure.

A long evaluation, a checkpoint or a compilation looks the same, so nothing is stopped for it.
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from holdfast.findings import Owner
from holdfast.watch.monitor import Symptom

QUIET_S = 600.0
"""Seconds without data."""
LEAST_BYTES_S = 10e3
"""A rate that counts as data: keep-alive messages of stores and watchdogs have less than a tenth of it."""


class QuietTraffic(Struct, frozen=True, kw_only=True):
    """What is remembered of a node's traffic."""

    busy_at_s: float | None = None
    """When it last exchanged data; None before the first time."""
    reported: bool = False
    """Whether it has been quiet for so long since then, and that was reported."""


def updated(quiet: QuietTraffic, bytes_s: float, at_s: float) -> tuple[QuietTraffic, bool]:
    """The node after a reading of its rate, and whether it is to be reported as quiet now."""
    if bytes_s >= LEAST_BYTES_S:
        return QuietTraffic(busy_at_s=at_s), False
    if quiet.busy_at_s is None or quiet.reported or at_s - quiet.busy_at_s < QUIET_S:
        return quiet, False
    return replace(quiet, reported=True), True


def symptom(by: str) -> Symptom:
    """What is reported of a node whose ranks have exchanged no data by TCP or RDMA for so long."""
    return Symptom(
        code="traffic-stopped",
        device="",
        what=f"its ranks have exchanged no data with other nodes for {QUIET_S / 60:.0f} minutes",
        evidence=lambda: (f"less than {LEAST_BYTES_S / 1e3:.0f} kB/s by {by}, and more before",),
        remedy="The stacks of all ranks are compared now. Nothing, if they evaluate, compile or write a checkpoint.",
        owner=Owner.USER,
        stops_traffic=True,
    )
