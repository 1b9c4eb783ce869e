"""Derives one diagnosis from facts: who failed first, what only followed, the confidence, and the missing evidence.

Pure: the same facts give the same diagnosis. Rules define what a line means, hypotheses.py which causes are possible,
and precedence.py which of them came first. Where lines leave several causes open, the diagnosis is `unknown` and names
the evidence that would decide.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from msgspec.structs import replace

from holdfast.diagnose.desync import find_desync
from holdfast.diagnose.diagnosis import Diagnosis, Symptom
from holdfast.diagnose.diagnosis_text import as_evidence, evidence, fill_values, first_failure_of, next_evidence
from holdfast.diagnose.fact import Fact
from holdfast.diagnose.failure_classes import HANG_FAILURE_CLASSES, Confidence, FailureClass
from holdfast.diagnose.hypotheses import Hypothesis, hypothesis_of, is_fabric_rule, make_hypotheses
from holdfast.diagnose.line_prefix import parse_process
from holdfast.diagnose.log_chunk import LogSource
from holdfast.diagnose.next_evidence import also_possible, candidates_without_failure, select_evidence
from holdfast.diagnose.precedence import (
    Clocks,
    PeerSymptom,
    Suspect,
    by_likelihood,
    explained_among,
    first_cause,
)
from holdfast.diagnose.rules import RULES
from holdfast.diagnose.rules.hang_records import STACK
from holdfast.diagnose.rules.rule import Role
from holdfast.diagnose.rules.torchrun import LAUNCHER_ROOT_CAUSE

MAX_CLOCK_SKEW_S = 5.0
"""Clocks of two hosts may differ by this much without the order of their lines being wrong."""

CLOCKS = Clocks(skew_s=MAX_CLOCK_SKEW_S, report_lag_s=MAX_CLOCK_SKEW_S)
"""The clocks of several hosts."""
_EXIT_CLASSES = {
    FailureClass.PROGRAM_ERROR,
    FailureClass.USAGE,
    FailureClass.UNREACHABLE,
    FailureClass.KILLED,
    FailureClass.PREEMPTED,
}
"""Classes that explain their peers' network errors."""
_LAUNCHER_RULES = {"child-failed", "terminated", "aborted"}
"""Rules whose lines a launcher writes about a rank."""


def diagnose_facts(
    facts: Sequence[Fact],
    *,
    counts: Mapping[str, int],
    ranks_with_logs: frozenset[int] = frozenset(),
    first_rank: int | None = None,
    fabric_verified: bool = False,
    has_nccl_setup: bool = False,
    notes: tuple[str, ...] = (),
) -> Diagnosis:
    """Weighs all facts of an input.

    `counts` is how many lines each rule matched; `first_rank` is the rank that failed first, where the controller saw
    it. `fabric_verified` is whether the set-up logs together show that the fabric is sound; `set_up` whether there are
    such lines at all.
    """
    facts = _with_ranks(_of_launchers(facts))
    hang = find_desync(facts, ranks_with_logs, _world_size(facts))
    causes = make_hypotheses(facts, hang, fabric_verified)
    if first_rank is not None:
        causes = [_of_first_rank(cause, first_rank) for cause in causes]
    suspects = [as_suspect(cause, first_rank) for cause in causes]
    found = first_cause(suspects, CLOCKS)
    if found is None or found.confidence is Confidence.UNSURE:
        if fabric_verified:
            facts = [fact for fact in facts if not is_fabric_rule(fact.rule)]
        return _unknown(facts, suspects, found, counts, has_nccl_setup, notes)
    chosen = found.failure
    explained = [each.failure for each in explained_among(suspects, CLOCKS)]
    rivals = [each for each in causes if each is not chosen and each not in explained and not _explains(chosen, each)]
    sure = chosen.confidence
    if any(each.confidence is sure and each.failure_class.label is not chosen.failure_class.label for each in rivals):
        sure = Confidence.LIKELY
    return Diagnosis(
        what=chosen.message,
        failure_class=chosen.failure_class,
        code=chosen.code,
        confidence=sure,
        first_failure=chosen.first_failure,
        evidence=evidence(chosen.facts),
        symptoms=_symptoms(facts, counts, chosen),
        remedy=chosen.remedy,
        next_evidence=() if sure is Confidence.CERTAIN else next_evidence(chosen.needs, chosen.classes),
        also_seen=evidence([each.facts[0] for each in rivals if each.confidence is not Confidence.UNSURE]),
        notes=notes,
    )


def _of_launchers(facts: Sequence[Fact]) -> list[Fact]:
    """Facts without the rank in the name of a file in which torchrun names another: such a file is a launcher's."""
    first = {fact.source: fact.process.rank for fact in facts if fact.rule is LAUNCHER_ROOT_CAUSE}
    return [
        replace(fact, process=replace(fact.process, rank=parse_process(fact.text, LogSource(name=fact.source)).rank))
        if first.get(fact.source, fact.process.rank) != fact.process.rank
        and fact.rule.code not in _LAUNCHER_RULES
        and not fact.values.get("rank")
        else fact
        for fact in facts
    ]


def _with_ranks(facts: Sequence[Fact]) -> list[Fact]:
    """Facts in the order of their clocks, with the rank filled in where host and process id were seen with one."""
    ranks: dict[tuple[str | None, int | None], int] = {
        (fact.process.host, fact.process.pid): fact.process.rank
        for fact in facts
        if fact.rule.code == "comm-rank" and fact.process.host is not None and fact.process.rank is not None
    }
    nodes = {
        fact.process.rank: fact.process.node for fact in facts if fact.process.rank is not None and fact.process.node
    }
    named = [
        replace(fact, process=replace(fact.process, rank=rank))
        if fact.process.rank is None and (rank := ranks.get((fact.process.host, fact.process.pid))) is not None
        else fact
        for fact in facts
    ]
    named = [
        replace(fact, process=replace(fact.process, node=node))
        if fact.process.rank is not None
        and fact.process.node is None
        and (node := nodes.get(fact.process.rank)) is not None
        else fact
        for fact in named
    ]
    if any(fact.at is None for fact in named):
        return named  # keeps the order in which they were read
    return sorted(named, key=lambda fact: fact.at or 0.0)


def _world_size(facts: Iterable[Fact]) -> int | None:
    """The world size, where a line gives it."""
    sizes = [int(world) for fact in facts if (world := fact.values.get("world", "")).isdecimal() and len(world) < 8]
    return max(sizes, default=None)


# Choice


def _of_first_rank(cause: Hypothesis, rank: int) -> Hypothesis:
    """The cause with the failed rank's own lines in front; with its whole traceback nothing is left open."""
    facts = tuple(sorted(cause.facts, key=lambda fact: fact.process.rank != rank))
    whole = (
        facts[0].process.rank == rank
        and cause.classes == (FailureClass.PROGRAM_ERROR,)
        and "raised_at" in facts[0].values
    )
    reordered = facts[0] is not cause.facts[0] and facts[0].rule.code == cause.code
    restated = hypothesis_of(facts[0].rule, facts) if reordered else cause
    sure = Confidence.CERTAIN if whole else cause.confidence
    culprit = cause.first_failure if _is_reported_by_peers(cause) else first_failure_of(facts[0]) or cause.first_failure
    return replace(restated, confidence=sure, facts=facts, first_failure=culprit)


def _is_reported_by_peers(cause: Hypothesis) -> bool:
    """Whether the culprit wrote none of the lines: a rank for which the failed ones had waited until their timeout."""
    rank = cause.first_failure.rank if cause.first_failure else None
    wrote = {
        fact.process.rank for fact in cause.facts if fact.rule is not STACK and not fact.rule.code.startswith("run-")
    }
    return rank is not None and rank not in wrote


def as_suspect(cause: Hypothesis, first_rank: int | None) -> Suspect[Hypothesis]:
    """What matters of a cause for the order."""
    rank = cause.first_failure.rank if cause.first_failure else None
    is_known = first_rank is not None and rank is not None and not _is_reported_by_peers(cause)
    rule, first = RULES.get(cause.code), cause.facts[0]
    return Suspect(
        failure=cause,
        at=first.at,
        layer=cause.failure_class.layer,
        confidence=cause.confidence,
        ends_process=cause.failure_class in _EXIT_CLASSES and cause.confidence is not Confidence.UNSURE,
        symptom=PeerSymptom.PEER if rule is not None and rule.peer_death_symptom else PeerSymptom.NONE,
        is_of_other_rank=is_known and rank != first_rank,
        slows_only=cause.performance_only,
        is_indirect=cause.code.startswith("run-"),  # a rank's own log shows more than what the run saw of its end
        line=(first.source, first.line),
    )


def _explains(cause: Hypothesis, other: Hypothesis) -> bool:
    """Whether another cause only follows from this one, or is the same in other words."""
    if other.failure_class.label is cause.failure_class.label or set(other.classes) <= HANG_FAILURE_CLASSES:
        return True
    return (
        other.confidence is Confidence.UNSURE
        or other.performance_only
        or other.failure_class.layer > cause.failure_class.layer
    )


def _unknown(
    facts: Sequence[Fact],
    suspects: Sequence[Suspect[Hypothesis]],
    found: Suspect[Hypothesis] | None,
    counts: Mapping[str, int],
    has_nccl_setup: bool,
    notes: tuple[str, ...],
) -> Diagnosis:
    """What is known, and which evidence would decide."""
    if found is not None:
        nearest = found.failure
        ordered = by_likelihood(suspects, nearest, CLOCKS)
        votes = Counter(failure_class for cause in ordered for failure_class in cause.classes)
        needs = (
            (
                cause.needs,
                tuple(sorted(cause.classes, key=lambda failure_class: -votes[failure_class])),
                also_possible(cause.code),
            )
            for cause in ordered
        )
        return Diagnosis(
            what=nearest.message,
            failure_class=FailureClass.UNKNOWN,
            code=nearest.code,
            confidence=Confidence.UNSURE,
            first_failure=None
            if nearest.performance_only or set(nearest.classes) & HANG_FAILURE_CLASSES
            else nearest.first_failure,
            evidence=evidence(nearest.facts),
            symptoms=_symptoms(facts, counts, nearest),
            remedy=nearest.remedy,
            next_evidence=select_evidence(needs),
            also_seen=evidence([each.facts[0] for each in ordered if each is not nearest]),
            notes=notes,
        )
    candidates = [fact for fact in facts if fact.rule.classes]
    candidates.sort(key=lambda fact: fact.rule.role is not Role.SYMPTOM)
    if not candidates:
        return Diagnosis(
            what="no line in the input reports a failure",
            failure_class=FailureClass.UNKNOWN,
            code="",
            confidence=Confidence.UNSURE,
            next_evidence=select_evidence(candidates_without_failure(facts, has_nccl_setup)),
            notes=notes,
        )
    # A launcher's line about a rank is the weakest evidence on it.
    by_weight = sorted(candidates, key=lambda fact: fact.rule.code in _LAUNCHER_RULES)
    needs = ((fact.rule.needs, fact.rule.classes, fact.rule.also_possible) for fact in by_weight)
    secondary = candidates[0].rule.role is Role.SYMPTOM
    words = fill_values(candidates[0].rule.message, candidates[0])
    what = f"the input shows only consequences: {words}" if secondary else words
    first = _launcher_root_cause(facts)
    return Diagnosis(
        what=f"{what}; {fill_values(first.rule.message, first)}" if first else what,
        failure_class=FailureClass.UNKNOWN,
        code=candidates[0].rule.code,
        confidence=Confidence.UNSURE,
        first_failure=first_failure_of(first) if first else None,
        evidence=evidence([*([first] if first else []), *candidates]),
        next_evidence=select_evidence(needs),
        notes=notes,
    )


def _launcher_root_cause(facts: Iterable[Fact]) -> Fact | None:
    """The rank that the launcher saw end first; None where that rank itself logged the loss of another."""
    first = next((fact for fact in facts if fact.rule is LAUNCHER_ROOT_CAUSE and fact.process.rank is not None), None)
    own = (fact for fact in facts if fact.rule.role is Role.SYMPTOM and fact.rule.code not in _LAUNCHER_RULES)
    return None if first is None or first.process.rank in {fact.process.rank for fact in own} else first


def _symptoms(facts: Iterable[Fact], counts: Mapping[str, int], cause: Hypothesis) -> tuple[Symptom, ...]:
    first: dict[str, Fact] = {}
    for fact in facts:
        hang = (
            fact.rule.role is Role.CAUSE
            and set(fact.rule.classes) <= HANG_FAILURE_CLASSES
            and cause.failure_class not in HANG_FAILURE_CLASSES
        )
        if (
            fact.rule.role is Role.SYMPTOM
            or hang
            or (fact.rule.peer_death_symptom and cause.failure_class in _EXIT_CLASSES)
        ):
            first.setdefault(fact.rule.code, fact)
    return tuple(
        Symptom(
            message=fill_values(fact.rule.message, fact), code=code, count=counts.get(code, 1), first=as_evidence(fact)
        )
        for code, fact in first.items()
        if code != cause.code
    )
