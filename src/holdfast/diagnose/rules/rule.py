"""Owns the form of a rule: one row that says which line it recognises and what that line means."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from holdfast.diagnose.failure_classes import FailureClass

NO_FAULT_PATTERN = (
    r"(?i)\b(?:no|0|zero|without)\s+(?:\w+\s+){0,2}(?:unhealthy|fail(?:ed|ures?)\b|errors?\b|fatal\b|straggl|corrupt|symbol)"
    r"|[:=]\s*(?:none|no|not active|n/a|false)\s*$"
    r"|(?:error|fail|fatal|ecc|count|slow|corrupt|incomplete|detected|crashloop|sequence)\w*\s{0,40}[:=]?\s*0\s*$"
)
"""A line that names a fault to say that there is none: a counter at zero, `Not Active`, `none`, `0 failed`."""


class Role(StrEnum):
    """What a line can be to a failure."""

    CAUSE = "cause"
    """It can be the cause."""
    SYMPTOM = "symptom"
    """It follows from something that happened elsewhere; never the cause."""
    CONTEXT = "context"
    """It says how things are, and proves or rules out what others say."""


class Confidence(StrEnum):
    """How sure an answer is."""

    CERTAIN = "certain"
    """The line has one cause, and nothing seen speaks against it."""
    LIKELY = "likely"
    """The usual cause; another one is possible and is named."""
    UNSURE = "unsure"
    """Several causes write this line; it takes another fact to choose."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One kind of line, or of structured record, and what it means."""

    code: str
    """Stable kebab-case name; what `explain` takes and evidence carries."""
    lines: tuple[str, ...] = ()
    """Real lines that it recognises, as they were written."""
    pattern: str = ""
    """RE2 pattern searched in a line; named groups become values, and `rank`, `host` and `pid` say whom it is about.
    Empty for what only a structured reader finds."""
    role: Role = Role.CAUSE
    classes: tuple[FailureClass, ...] = ()
    """What it speaks for, the likeliest first."""
    confidence: Confidence = Confidence.UNSURE
    """How sure the first class is from this line alone."""
    also_possible: tuple[FailureClass, ...] = ()
    """What it may also come of, which only other logs would show: named where nothing decides, and never weighed."""
    message: str
    """What happened, as a sentence; `{name}` is a captured value."""
    remedy: tuple[str, ...] = ()
    """What to do, in order; commands and changes as they are typed."""
    needs: tuple[str, ...] = ()
    """Names of the facts (rules/deciding.py) that would confirm it, or choose between its classes."""
    versions: str = ""
    """Where the line exists: versions of the library that writes it."""
    source: str = ""
    """Who writes it: a file of a library, or an address."""
    exclude: str = ""
    """RE2 pattern of lines that have the same words and tell of nothing: on those the row does not count."""
    fallback: bool = False
    """Whether it counts only on a line that no other rule recognises; of several such the first."""
    peer_death_symptom: bool = False
    """Whether its lines also come where a peer has ended: an error that ended a rank, and was not later, explains them."""
    performance_only: bool = False
    """Whether it makes a run slow rather than ending it: the cause only where nothing else is found."""
