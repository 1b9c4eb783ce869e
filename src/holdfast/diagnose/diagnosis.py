"""Owns the form of a diagnosis: frozen, complete, and the same for a terminal, a report and a machine.

Refuses to own how it is reached (reason.py) and how it is shown (cli).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import msgspec

from holdfast.diagnose.failure_classes import FailureClass
from holdfast.diagnose.nccl_transport import TransportReport
from holdfast.diagnose.nccl_transport import to_dict as transport_document
from holdfast.diagnose.rules.rule import Confidence

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
class FirstFailure:
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
class NextEvidence:
    """A fact that would decide, how to get it, and between what it decides."""

    what: str
    how: str
    distinguishes: tuple[FailureClass, ...]


@dataclass(frozen=True, kw_only=True)
class Symptom:
    """Lines that only follow from what happened, told once for all of a kind."""

    message: str
    code: str
    count: int
    first: Evidence


@dataclass(frozen=True, kw_only=True)
class OtherRun:
    """How another run ended that is in the same pile."""

    what: str
    failure_class: FailureClass
    confidence: Confidence
    ended_at: str
    """When, by the clock of the line that says so; empty where it has none."""
    first: Evidence


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What a person is told about a pile of logs."""

    what: str
    """What happened, as one sentence."""
    failure_class: FailureClass
    code: str
    """The rule that decided; empty when nothing did."""
    confidence: Confidence
    first_failure: FirstFailure | None = None
    evidence: tuple[Evidence, ...] = ()
    last_lines: tuple[Evidence, ...] = ()
    """The last lines of the rank that failed first, where nothing better is known."""
    symptoms: tuple[Symptom, ...] = ()
    remedy: tuple[str, ...] = ()
    """What to do, in order, as commands or changes where there are any."""
    next_evidence: tuple[NextEvidence, ...] = ()
    """Which facts would decide, or make sure; never empty when the class is `unknown`."""
    also_seen: tuple[Evidence, ...] = ()
    """Other causes seen, for a second look."""
    other_runs: tuple[OtherRun, ...] = ()
    """Other runs in the same pile, mostly earlier ones, and how they ended; nothing of them speaks for this answer."""
    transport: TransportReport | None = None
    """What the fabric did, where NCCL's set-up lines were among what was read."""
    notes: tuple[str, ...] = ()
    """What was not read, and what else a reader should know of how this was reached."""

    @property
    def may_be(self) -> tuple[FailureClass, ...]:
        """Of an `unknown` with evidence: what it may be, the likeliest first (`reason.py` has the order)."""
        if self.failure_class is not FailureClass.UNKNOWN or not self.evidence:
            return ()
        return tuple(
            dict.fromkeys(failure_class for each in self.next_evidence for failure_class in each.distinguishes)
        )[:MOST_MAY_BE]


def to_dict(answer: Diagnosis) -> dict[str, Any]:
    """The answer as plain lists and words for a machine."""
    plain: dict[str, Any] = msgspec.to_builtins(replace(answer, transport=None))
    plain["transport"] = transport_document(answer.transport) if answer.transport else None
    return plain
