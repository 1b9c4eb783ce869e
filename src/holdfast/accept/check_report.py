"""The result of one acceptance check, as it is kept, printed and reported."""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

from holdfast.accept.agreement import CheckName
from holdfast.findings import Finding


class Verdict(StrEnum):
    """How a check ended."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_APPLICABLE = "not applicable"
    """The target has nothing that the check could judge; the finding says what."""


class Figure(Struct, frozen=True, kw_only=True):
    """One measured figure."""

    name: str
    value: str
    """With its unit."""
    agreed: str = ""
    """What it must be; empty if it is only shown."""
    met: bool = True


class CheckReport(Struct, frozen=True, kw_only=True):
    """What a check found."""

    check: CheckName
    verdict: Verdict
    finding: Finding | None = None
    """Why it failed, or does not apply, with the remedy."""
    figures: tuple[Figure, ...] = ()
    evidence: tuple[str, ...] = ()
    """What was observed, a line each."""
    runs: tuple[str, ...] = ()
    """Ids of its runs."""
    bus_bytes_s: float | None = None
    """Of the check `fabric`: bytes per second that a rank sends in the largest all-reduce; None if not measured."""
    began_at: float = 0.0
    """Unix seconds."""
    took_s: float = 0.0
