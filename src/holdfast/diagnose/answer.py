"""Owns the form of a diagnosis: frozen, complete, and the same for a terminal, a report and a machine.

Refuses to own how it is reached (reason.py) and how it is shown (cli).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import msgspec

from holdfast.diagnose.classes import Class
from holdfast.diagnose.rules.row import Sureness
from holdfast.diagnose.transport import Transport
from holdfast.diagnose.transport import document as transport_document

MOST_MAY_BE = 3
"""Classes that a person is given where nothing decides; `missing` has all of them."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """One line that speaks for what is said, and where it stands."""

    where: str
    """`file:line`."""
    text: str
    code: str
    """The rule that recognised it."""


@dataclass(frozen=True, kw_only=True)
class Culprit:
    """Who was first, as far as that is known."""

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


@dataclass(frozen=True, kw_only=True)
class Missing:
    """A fact that would decide, how to get it, and between what it decides."""

    fact: str
    get: str
    decides: tuple[Class, ...]


@dataclass(frozen=True, kw_only=True)
class Consequence:
    """Lines that only follow from what happened, told once for all of a kind."""

    says: str
    code: str
    count: int
    first: Evidence


@dataclass(frozen=True, kw_only=True)
class Other:
    """How another run ended that is in the same pile."""

    what: str
    klass: Class
    sure: Sureness
    at: str
    """When, by the clock of the line that says so; empty where it has none."""
    first: Evidence


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a person is told about a pile of logs."""

    what: str
    """What happened, as one sentence."""
    klass: Class
    code: str
    """The rule that decided; empty when nothing did."""
    sure: Sureness
    culprit: Culprit | None = None
    evidence: tuple[Evidence, ...] = ()
    last_lines: tuple[Evidence, ...] = ()
    """The last lines of the rank that failed first, where nothing better is known."""
    consequences: tuple[Consequence, ...] = ()
    remedy: tuple[str, ...] = ()
    """What to do, in order, as commands or changes where there are any."""
    missing: tuple[Missing, ...] = ()
    """Which facts would decide, or make sure; never empty when the class is `unknown`."""
    also: tuple[Evidence, ...] = ()
    """Other causes seen, for a second look."""
    others: tuple[Other, ...] = ()
    """Other runs in the same pile, mostly earlier ones, and how they ended; nothing of them speaks for this answer."""
    transport: Transport | None = None
    """What the fabric did, where NCCL's set-up lines were among what was read."""
    notes: tuple[str, ...] = ()
    """What was not read, and what else a reader should know of how this was reached."""

    @property
    def may_be(self) -> tuple[Class, ...]:
        """Of an `unknown` with evidence: what it may be, the likeliest first (`reason.py` has the order)."""
        if self.klass is not Class.UNKNOWN or not self.evidence:
            return ()
        return tuple(dict.fromkeys(klass for each in self.missing for klass in each.decides))[:MOST_MAY_BE]


def document(answer: Answer) -> dict[str, Any]:
    """The answer as plain lists and words for a machine."""
    plain: dict[str, Any] = msgspec.to_builtins(replace(answer, transport=None))
    plain["transport"] = transport_document(answer.transport) if answer.transport else None
    return plain
