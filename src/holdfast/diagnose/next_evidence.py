"""Owns which facts to ask a person for where what was read does not decide, and how many of them.

Pure. Refuses to own what the facts are and how they are got (rules/deciding.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from holdfast.diagnose.diagnosis import NextEvidence
from holdfast.diagnose.diagnosis_text import next_evidence
from holdfast.diagnose.fact import Fact
from holdfast.diagnose.failure_classes import FailureClass
from holdfast.diagnose.rules import RULES

MAX_OPEN_CLASSES = 8
"""Classes that an `unknown` leaves open; facts that would decide between more have not said where to look."""

Candidate = tuple[tuple[str, ...], tuple[FailureClass, ...], tuple[FailureClass, ...]]
"""Names of facts, between what they decide, and what the same facts may show beyond that."""

_NCCL_SETUP_RULES = {"comm-rank", "net-rdma", "rdma-requested"}
"""Rules whose lines NCCL writes while it sets a communicator up."""
_AFTER_NCCL_SETUP: tuple[Candidate, ...] = (
    (("stacks",), (FailureClass.HANG_UNKNOWN, FailureClass.COLLECTIVE_MISMATCH, FailureClass.STRAGGLER), ()),
    (("acs",), (FailureClass.ACS_IOMMU,), ()),
    (("transport",), (FailureClass.GDR_MISSING, FailureClass.TCP_FALLBACK), ()),
    (("interfaces",), (FailureClass.WRONG_INTERFACE,), ()),
    (("all-ranks",), (FailureClass.PROGRAM_ERROR,), ()),
)
"""What to ask where a set-up shows no failure: whether it hangs, is slow, or another rank failed."""
_DURING_NCCL_SETUP: tuple[Candidate, ...] = (
    (("stacks",), (FailureClass.HANG_UNKNOWN, FailureClass.OTHER), ()),
    (("interfaces",), (FailureClass.WRONG_INTERFACE, FailureClass.FIREWALL), ()),
    (("all-ranks",), (FailureClass.RENDEZVOUS, FailureClass.RANK_COUNT), ()),
    (("versions",), (FailureClass.VERSION_MISMATCH, FailureClass.DRIVER), ()),
)
"""What to ask where NCCL has begun and says no more."""


def select_evidence(candidates: Iterable[Candidate]) -> tuple[NextEvidence, ...]:
    """The facts that would decide, each once: as many as leave no more open than a person can look after."""
    kept: list[Candidate] = []
    left: set[FailureClass] = set()
    for each in candidates:
        more = left | {failure_class.label for failure_class in each[1]}
        if not left or len(more) <= MAX_OPEN_CLASSES:
            left = more
            kept.append(each)
    found: dict[str, NextEvidence] = {}
    for names, classes, beyond_them in kept:
        for failure_class in beyond_them:
            if len(left | {failure_class.label}) <= MAX_OPEN_CLASSES:
                left.add(failure_class.label)
        also = tuple(
            failure_class
            for failure_class in beyond_them
            if failure_class.label in left and failure_class not in classes
        )
        for each in next_evidence(names, (*classes, *also)):
            found.setdefault(each.what, each)
    return tuple(found.values())


def also_possible(code: str) -> tuple[FailureClass, ...]:
    """What a cause may also come of, which only other logs would show."""
    rule = RULES.get(code)
    return rule.also_possible if rule else ()


def candidates_without_failure(facts: Sequence[Fact], has_nccl_setup: bool) -> tuple[Candidate, ...]:
    """What would decide where no line tells of a failure; `set_up` is whether NCCL wrote of its set-up."""
    codes = {fact.rule.code for fact in facts}
    if codes & _NCCL_SETUP_RULES or (has_nccl_setup and "nccl-started" not in codes):
        return _AFTER_NCCL_SETUP
    if has_nccl_setup or "nccl-started" in codes:
        return _DURING_NCCL_SETUP
    return ((("all-ranks", "nccl-warn", "stacks") if facts else ("output",), (), ()),)
