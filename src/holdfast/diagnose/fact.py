"""Owns the form of what any reader has found: one fact, by which rule, on which line, about whom.

Readers of text (scan.py), of structured files and of init logs all make these; reasoning turns them into an answer.
Refuses to own what a fact means: that is its rule's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from holdfast.diagnose.rules.rule import Rule

MAX_RANKS = 1 << 20
"""No job has more, whatever a line says; time grows with them."""


@dataclass(frozen=True, kw_only=True)
class ProcessRef:
    """Whom a line is about, or who wrote it, as far as it says."""

    host: str | None = None
    pid: int | None = None
    rank: int | None = None
    node: str | None = None


@dataclass(frozen=True, kw_only=True)
class Fact:
    """One thing found in what was read."""

    rule: Rule
    source: str
    """Name of the source, as in `Source.name`."""
    line: int
    """Its line from 1; 0 for what is said by the source as a whole."""
    text: str
    """The line as written, cut where it is long; for structured input the value in a few words."""
    process: ProcessRef = field(default_factory=ProcessRef)
    at: float | None = None
    """Seconds since the epoch by the writer's clock; None when nothing says."""
    has_year: bool = True
    """Whether that clock says the year, which is guessed else."""
    at_of_previous_line: float | None = None
    """The same of the line that has a clock next above, for one that has none."""
    values: Mapping[str, str] = field(default_factory=dict[str, str])
    """What the rule's pattern captured, by name."""
