"""The schema of a rule: one row with the lines that it matches and what they mean.

To add one, append a `Rule` to the `RULES` of its subject's file: scanner.py finds its lines, `holdfast diagnose` weighs
them, and `holdfast explain` derives its text, so it needs no row in knowledge/. A CAUSE has classes, a remedy unless it
is UNSURE, and `needs` unless it is CERTAIN. Further lines that it must match go into tests/diagnose/rule_lines.tsv.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from msgspec import Struct, field

from holdfast.diagnose.failure_classes import Confidence, FailureClass

NO_FAULT_PATTERN = (
    r"(?i)\b(?:no|0|zero|without)\s+(?:\w+\s+){0,2}(?:unhealthy|fail(?:ed|ures?)\b|errors?\b|fatal\b|straggl|corrupt|symbol)"
    r"|[:=]\s*(?:none|no|not active|n/a|false)\s*$"
    r"|(?:error|fail|fatal|ecc|count|slow|corrupt|incomplete|detected|crashloop|sequence)\w*\s{0,40}[:=]?\s*0\s*$"
)
"""A line that names a fault in order to deny it: a counter at zero, `Not Active`, `none`, `0 failed`."""


class Role(StrEnum):
    """The role of a line in a failure."""

    CAUSE = "cause"
    """It can be the cause."""
    SYMPTOM = "symptom"
    """It follows from a failure elsewhere; never the cause."""
    CONTEXT = "context"
    """It describes the environment, and supports or rules out other lines."""


class Rule(Struct, frozen=True, kw_only=True):
    """One kind of line, or of structured record, and what it means."""

    code: str
    """Stable kebab-case name; `explain` accepts it and evidence carries it."""
    matches: Mapping[str, str] = field(default_factory=dict[str, str])
    """RE2 patterns searched in a line, each with a line that it matches, in the form in which its writer logs it.

    Named groups become values, and `rank`, `host` and `pid` identify the process. Empty where only a structured reader
    finds it.
    """
    role: Role = Role.CAUSE
    classes: tuple[FailureClass, ...] = ()
    """The failure classes that it indicates, the likeliest first."""
    confidence: Confidence = Confidence.UNSURE
    """The confidence in the first class from this line alone."""
    also_possible: tuple[FailureClass, ...] = ()
    """Other possible causes, which only other logs would show: named where nothing decides, and never weighed."""
    message: str
    """What happened, as a sentence; `{name}` is a captured value."""
    remedy: tuple[str, ...] = ()
    """What to do, in order; commands and changes as typed."""
    needs: tuple[str, ...] = ()
    """Names of the evidence requests (rules/evidence_requests.py) that would confirm it, or choose between its classes.
    """
    source: str = ""
    """The origin of the line: a file of a library, or an address; and since which version, where not all write it."""
    exclude: str = ""
    """RE2 pattern of lines with the same words but no meaning here: the rule ignores them."""
    fallback: bool = False
    """Whether it counts only on a line that no other rule matches; the first such rule counts."""
    peer_death_symptom: bool = False
    """Whether its lines also appear when a peer has ended: an earlier or simultaneous error that ended a rank explains
    them.
    """
    performance_only: bool = False
    """Whether it slows a run rather than ending it: the cause only if nothing else is found."""

    @property
    def pattern(self) -> str:
        """All its patterns as one."""
        return "|".join(self.matches)
