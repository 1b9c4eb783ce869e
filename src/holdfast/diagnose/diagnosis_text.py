"""Renders facts into a diagnosis: their lines as evidence, who wrote them, and sentences with values."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from holdfast.diagnose.diagnosis import Evidence, NextEvidence
from holdfast.diagnose.fact import Fact, ProcessRef
from holdfast.diagnose.failure_classes import FailureClass
from holdfast.diagnose.rules.evidence_requests import EVIDENCE_REQUESTS

MAX_EVIDENCE = 6
_VALUE = re.compile(r"(: )?\{(\w+)\}")


def next_evidence(names: Iterable[str], classes: tuple[FailureClass, ...]) -> tuple[NextEvidence, ...]:
    """The evidence of these names that would decide between classes, and how to get it."""
    return tuple(
        NextEvidence(what=EVIDENCE_REQUESTS[name].what, how=EVIDENCE_REQUESTS[name].how, distinguishes=classes)
        for name in names
    )


def evidence(facts: Iterable[Fact]) -> tuple[Evidence, ...]:
    """Each line once, no more than a user reads."""
    found: dict[tuple[str, int], Evidence] = {}
    for fact in facts:
        found.setdefault((fact.source, fact.line), as_evidence(fact))
        if len(found) == MAX_EVIDENCE:
            break
    return tuple(found.values())


def as_evidence(fact: Fact) -> Evidence:
    """Its line and location."""
    where = f"{fact.source}:{fact.line}" if fact.line else fact.source
    return Evidence(where=where, text=fact.text, code=fact.rule.code)


def first_failure_among(facts: Sequence[Fact]) -> ProcessRef | None:
    """The writer of the first line; if it names no rank and all other lines name the same one, that rank."""
    ranks = {fact.process.rank for fact in facts} - {None}
    return first_failure_of(
        next((fact for fact in facts if len(ranks) == 1 and fact.process.rank is not None), facts[0])
    )


def first_failure_of(fact: Fact) -> ProcessRef | None:
    """The writer of its line; None where unknown."""
    return None if fact.process == ProcessRef() else fact.process


def fill_values(text: str, fact: Fact) -> str:
    """A sentence with the captured values filled in."""
    return _VALUE.sub(lambda name: f"{name[1] or ''}{value}" if (value := fact.values.get(name[2])) else "", text)


def format_ranks(ranks: Sequence[int]) -> str:
    """`rank 1, 3`, or the number of ranks and the first of them."""
    first = ", ".join(map(str, ranks[:4]))
    return f"rank {first}" if len(ranks) <= 4 else f"{len(ranks)} ranks ({first}, ...)"
