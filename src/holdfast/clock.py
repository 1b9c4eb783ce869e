"""Owns the time of a run: the wall clock read once, then counted on, so that a clock that is set moves nothing.

Every process of a run has one. It starts at the wall clock and goes on with the machine's monotonic clock; whoever
takes over from another process of the same boot goes on with that one's clock. Deadlines, order and durations are the
monotonic clock's; what the wall clock does meanwhile is only told.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from holdfast.findings import Finding, Owner, Severity

JUMP_S = 1.0
"""A wall clock that is this much elsewhere than at the last look was set; what keeps clocks true moves them slowly."""

JUMP_POLL_S = 2.0
"""How often a process looks whether the wall clock was set."""


class ClockSample(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one process tells another of its clock: a moment on it, and the same moment on the machine's own."""

    at: float
    """Unix seconds."""
    monotonic_s: float
    """Seconds on the machine's monotonic clock, which all its processes share."""
    boot: str
    """Names the boot that the monotonic clock counts from."""
    wall_offset_s: float = 0.0
    """How far the wall clock was ahead of `at`."""


def _wall_s() -> float:
    return time.time()


def boot_id() -> str:
    """Names this boot of this machine; empty where the kernel does not tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


class Clock:
    """Unix seconds that never jump and never go back."""

    def __init__(
        self,
        former: ClockSample | None = None,
        *,
        not_before: float = 0.0,
        wall: Callable[[], float] = _wall_s,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Go on with a former process's clock where the machine is the same, and never before a known moment."""
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
        """What another process must know to tell this clock's time."""
        return ClockSample(at=self(), monotonic_s=self._monotonic(), boot=self._boot, wall_offset_s=self._wall_offset_s)

    def offset_s(self, other: ClockSample | None) -> float | None:
        """How far another clock of this machine is ahead of this one, in seconds; None for one of another machine."""
        if other is None or not self._same_boot(other):
            return None
        return other.at - other.monotonic_s - self._zero

    def jumped_s(self) -> float:
        """How far the wall clock was set since this was asked last, in seconds; 0.0 when it was not."""
        ahead_s = self._wall() - self()
        jump_s = ahead_s - self._wall_offset_s
        if abs(jump_s) < JUMP_S:
            return 0.0
        self._wall_offset_s = ahead_s
        return jump_s

    def _same_boot(self, other: ClockSample) -> bool:
        return bool(self._boot) and other.boot == self._boot


def clock_jumped(where: str, jump_s: float) -> Finding:
    """What is to be said of a wall clock that was set while a run went on."""
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
    """Shift what this process takes for the wall clock, as if it had been set; for drills."""
    true = time.time
    time.time = lambda: true() + by_s
