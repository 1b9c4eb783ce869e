"""A run's clock: the wall clock read once, then advanced by the monotonic clock, so that setting the wall clock has no
effect.

Every process of a run has one. A process that takes over from another one of the same boot continues its clock.
Deadlines, order and durations use this clock; jumps of the wall clock are only reported.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from holdfast.findings import Finding, Owner, Severity

JUMP_S = 1.0
"""Seconds of deviation since the last poll that count as a jump; NTP slews move the clock slowly."""

JUMP_POLL_S = 2.0
"""Seconds between polls of the wall clock."""


class ClockSample(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A reading of one process's clock that another process can convert: a time on it, and the machine's time at that
    moment.
    """

    at: float
    """Unix seconds."""
    monotonic_s: float
    """Seconds on the machine's monotonic clock, which all its processes share."""
    boot: str
    """Identifies the boot that the monotonic clock counts from."""
    wall_offset_s: float = 0.0
    """Seconds that the wall clock was ahead of `at`."""


def _wall_s() -> float:
    return time.time()


def boot_id() -> str:
    """Identifies this boot of this machine; empty if the kernel does not report it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


class Clock:
    """Unix seconds that never jump and never decrease."""

    def __init__(
        self,
        former: ClockSample | None = None,
        *,
        not_before: float = 0.0,
        wall: Callable[[], float] = _wall_s,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Continue an earlier process's clock if the machine is the same, and never before a known time."""
        self._wall = wall
        self._monotonic = monotonic
        self._boot = boot_id()
        known = former is not None and self._same_boot(former)
        zero = former.at - former.monotonic_s if former is not None and known else wall() - monotonic()
        self._zero = max(zero, not_before - monotonic())
        self._wall_offset_s = former.wall_offset_s if former is not None and known else wall() - self()

    def __call__(self) -> float:
        """Now, in Unix seconds."""
        return self._zero + self._monotonic()

    @property
    def sample(self) -> ClockSample:
        """The reading that another process needs to convert this clock's times."""
        return ClockSample(at=self(), monotonic_s=self._monotonic(), boot=self._boot, wall_offset_s=self._wall_offset_s)

    def offset_s(self, other: ClockSample | None) -> float | None:
        """Seconds that another clock of this machine is ahead of this one; None for a clock of another machine."""
        if other is None or not self._same_boot(other):
            return None
        return other.at - other.monotonic_s - self._zero

    def jumped_s(self) -> float:
        """Seconds by which the wall clock was set since the last call; 0.0 if it was not."""
        ahead_s = self._wall() - self()
        jump_s = ahead_s - self._wall_offset_s
        if abs(jump_s) < JUMP_S:
            return 0.0
        self._wall_offset_s = ahead_s
        return jump_s

    def _same_boot(self, other: ClockSample) -> bool:
        return bool(self._boot) and other.boot == self._boot


def clock_jumped(where: str, jump_s: float) -> Finding:
    """The finding for a wall clock that was set during a run."""
    return Finding(
        code="clock-jumped",
        severity=Severity.WARNING,
        what=f"the wall clock of {where} jumped {abs(jump_s):,.1f} s {'ahead' if jump_s > 0 else 'back'}",
        where=where,
        evidence=("the run counts its own time, so no deadline moved and nothing was restarted for it",),
        remedy="Keep the clock true with NTP (chrony, systemd-timesyncd). A machine that slept jumps ahead too.",
        owner=Owner.CLUSTER,
    )


def shift_wall_clock(by_s: float) -> None:
    """Shift the wall clock as this process sees it, as if it had been set; for drills."""
    true = time.time
    time.time = lambda: true() + by_s
