"""The form of a diagnosis: frozen, complete, and the same for a terminal, a report and JSON."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from holdfast.diagnose.fact import ProcessRef
from holdfast.diagnose.failure_classes import Confidence, FailureClass
from holdfast.diagnose.nccl_transport import TransportReport
from holdfast.diagnose.nccl_transport import to_dict as transport_document

MOST_MAY_BE = 3
"""How many classes an undecided diagnosis lists; `missing` has all of them."""


class Evidence(Struct, frozen=True, kw_only=True):
    """One line that supports the diagnosis, and its location."""

    where: str
    """`file:line`."""
    text: str
    code: str
    """The rule that matched it."""


class NextEvidence(Struct, frozen=True, kw_only=True):
    """Evidence that would decide, how to get it, and between which classes it decides."""

    what: str
    how: str
    distinguishes: tuple[FailureClass, ...]


class Symptom(Struct, frozen=True, kw_only=True):
    """Lines that only follow from the failure, listed once for all of a kind."""

    message: str
    code: str
    count: int
    first: Evidence


class OtherRun(Struct, frozen=True, kw_only=True):
    """How another run in the same input ended."""

    what: str
    failure_class: FailureClass
    confidence: Confidence
    ended_at: str
    """The time by the clock of its line; empty where it has none."""
    first: Evidence


class Diagnosis(Struct, frozen=True, kw_only=True):
    """The diagnosis of one set of logs."""

    what: str
    """What happened, as one sentence."""
    failure_class: FailureClass
    code: str
    """The rule that decided; empty when nothing did."""
    confidence: Confidence
    first_failure: ProcessRef | None = None
    """The process that failed first, as far as that is known."""
    evidence: tuple[Evidence, ...] = ()
    last_lines: tuple[Evidence, ...] = ()
    """The last lines of the rank that failed first, where there is no better evidence."""
    symptoms: tuple[Symptom, ...] = ()
    remedy: tuple[str, ...] = ()
    """What to do, in order, as commands or changes where possible."""
    next_evidence: tuple[NextEvidence, ...] = ()
    """Evidence that would decide or confirm; never empty when the class is `unknown`."""
    also_seen: tuple[Evidence, ...] = ()
    """Other possible causes found."""
    other_runs: tuple[OtherRun, ...] = ()
    """Other runs in the same input, mostly earlier ones, and how they ended; they do not support this diagnosis."""
    transport: TransportReport | None = None
    """What the fabric did, if the input has NCCL's set-up lines."""
    notes: tuple[str, ...] = ()
    """What was not read, and other notes on how the input was read."""

    @property
    def may_be(self) -> tuple[FailureClass, ...]:
        """For an `unknown` with evidence: possible causes, the likeliest first (root_cause_analysis.py sorts)."""
        if self.failure_class is not FailureClass.UNKNOWN or not self.evidence:
            return ()
        return tuple(
            dict.fromkeys(failure_class for each in self.next_evidence for failure_class in each.distinguishes)
        )[:MOST_MAY_BE]


def to_dict(answer: Diagnosis) -> dict[str, Any]:
    """The diagnosis as plain lists and strings for JSON."""
    plain: dict[str, Any] = msgspec.to_builtins(replace(answer, transport=None))
    plain["transport"] = transport_document(answer.transport) if answer.transport else None
    return plain
