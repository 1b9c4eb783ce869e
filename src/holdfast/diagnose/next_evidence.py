"""Chooses the evidence to request where the input does not decide, and how much of it.

Pure. rules/evidence_requests.py describes each request.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from holdfast.diagnose.diagnosis import NextEvidence
from holdfast.diagnose.diagnosis_text import next_evidence
from holdfast.diagnose.fact import Fact
from holdfast.diagnose.failure_classes import FailureClass
from holdfast.diagnose.rules import RULES

MAX_OPEN_CLASSES = 8
"""Classes that an `unknown` leaves open; evidence that decides between more is too vague."""

Candidate = tuple[tuple[str, ...], tuple[FailureClass, ...], tuple[FailureClass, ...]]
"""Names of requests, the classes between which they decide, and what else the same evidence may show."""

_NCCL_SETUP_RULES = {"comm-rank", "net-rdma", "rdma-requested"}
"""Rules whose lines NCCL writes while it sets a communicator up."""
_AFTER_NCCL_SETUP: tuple[Candidate, ...] = (
    (("stacks",), (FailureClass.HANG_UNKNOWN, FailureClass.COLLECTIVE_MISMATCH, FailureClass.STRAGGLER), ()),
    (("acs",), (FailureClass.ACS_IOMMU,), ()),
    (("transport",), (FailureClass.GDR_MISSING, FailureClass.TCP_FALLBACK), ()),
    (("interfaces",), (FailureClass.WRONG_INTERFACE,), ()),
    (("all-ranks",), (FailureClass.PROGRAM_ERROR,), ()),
)
"""What to request where a set-up shows no failure: whether it hangs, is slow, or another rank failed."""
_DURING_NCCL_SETUP: tuple[Candidate, ...] = (
    (("stacks",), (FailureClass.HANG_UNKNOWN, FailureClass.OTHER), ()),
    (("interfaces",), (FailureClass.WRONG_INTERFACE, FailureClass.FIREWALL), ()),
    (("all-ranks",), (FailureClass.RENDEZVOUS, FailureClass.RANK_COUNT), ()),
    (("versions",), (FailureClass.VERSION_MISMATCH, FailureClass.DRIVER), ()),
)
"""What to request where NCCL has started and logs no more."""


def select_evidence(candidates: Iterable[Candidate]) -> tuple[NextEvidence, ...]:
    """The evidence that would decide, each once: as many as leave no more open than a user can follow up."""
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
    """Other causes of the same lines, which only other logs would show."""
    rule = RULES.get(code)
    return rule.also_possible if rule else ()


def candidates_without_failure(facts: Sequence[Fact], has_nccl_setup: bool) -> tuple[Candidate, ...]:
    """What would decide where no line reports a failure; `set_up` is whether NCCL logged its set-up."""
    codes = {fact.rule.code for fact in facts}
    if codes & _NCCL_SETUP_RULES or (has_nccl_setup and "nccl-started" not in codes):
        return _AFTER_NCCL_SETUP
    if has_nccl_setup or "nccl-started" in codes:
        return _DURING_NCCL_SETUP
    return ((("all-ranks", "nccl-warn", "stacks") if facts else ("output",), (), ()),)
