"""The form of what any reader has found: one fact, its rule, its line, and its process.

Readers of text (scanner.py), of structured files and of init logs all create facts; root_cause_analysis.py turns them
into a diagnosis.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, field

from holdfast.diagnose.rules.rule import Rule

MAX_RANKS = 1 << 20
"""No job has more ranks, whatever a line says; time grows with them."""


class ProcessRef(Struct, frozen=True, kw_only=True):
    """The process that a line is about, or that wrote it, as far as the line says."""

    rank: int | None = None
    node: str | None = None
    host: str | None = None
    pid: int | None = None

    def __str__(self) -> str:
        parts = (
            f"rank {self.rank}" if self.rank is not None else "",
            f"on {self.node or self.host}" if self.node or self.host else "",
            f"(pid {self.pid})" if self.pid is not None and self.rank is None else "",
        )
        return " ".join(filter(None, parts))


class Fact(Struct, frozen=True, kw_only=True):
    """One rule's match in the input."""

    rule: Rule
    source: str
    """Name of the source, as in `Source.name`."""
    line: int
    """Its line from 1; 0 for a statement about the source as a whole."""
    text: str
    """The line as written, cut where it is long; for structured input, a short form of the value."""
    process: ProcessRef = field(default_factory=ProcessRef)
    at: float | None = None
    """Seconds since the epoch by the writer's clock; None where unknown."""
    has_year: bool = True
    """Whether that clock includes the year, which is otherwise guessed."""
    at_of_previous_line: float | None = None
    """The time of the nearest line above with a clock, for a line without one."""
    values: Mapping[str, str] = field(default_factory=dict[str, str])
    """Values captured by the rule's pattern, by name."""
