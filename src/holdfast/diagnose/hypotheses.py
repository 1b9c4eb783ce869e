"""The possible causes: of each rule's lines, of several lines together, and of missing lines.

Pure. root_cause_analysis.py chooses among them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from holdfast.diagnose.desync import Desync
from holdfast.diagnose.diagnosis_text import fill_values, first_failure_among, first_failure_of, format_ranks
from holdfast.diagnose.fact import Fact, ProcessRef
from holdfast.diagnose.failure_classes import HANG_FAILURE_CLASSES, Confidence, FailureClass
from holdfast.diagnose.rank_consistency import missing_lightning_members, missing_ranks, rank_conflict
from holdfast.diagnose.rules import RULES
from holdfast.diagnose.rules.combinations import COMBINATIONS
from holdfast.diagnose.rules.hang_records import FLIGHT_ALL_WAITING, FLIGHT_RULES, STACK
from holdfast.diagnose.rules.nccl_setup import FABRIC_CODES
from holdfast.diagnose.rules.rule import Role, Rule

_FABRIC_CLASSES = frozenset({FailureClass.TCP_FALLBACK, FailureClass.RDMA_DEVICE_MISSING, FailureClass.GDR_MISSING})
_FLIGHT_CODES = {rule.code for rule in FLIGHT_RULES if rule is not FLIGHT_ALL_WAITING}
_RENDEZVOUS_CLASSES = {FailureClass.RENDEZVOUS, FailureClass.RANK_COUNT, *HANG_FAILURE_CLASSES}
"""Classes under which ranks also report different world sizes."""


class Hypothesis(Struct, frozen=True, kw_only=True):
    """One possible cause, with its evidence."""

    code: str
    classes: tuple[FailureClass, ...]
    confidence: Confidence
    message: str
    remedy: tuple[str, ...]
    needs: tuple[str, ...]
    facts: tuple[Fact, ...]
    """In order of appearance."""
    first_failure: ProcessRef | None
    performance_only: bool = False

    @property
    def failure_class(self) -> FailureClass:
        return self.classes[0]


def make_hypotheses(facts: Sequence[Fact], desync: Desync | None, fabric_verified: bool) -> list[Hypothesis]:
    """All hypotheses for these facts; with a sound fabric, single lines about it suggest none."""
    by_code: dict[str, list[Fact]] = {}
    for fact in facts:
        by_code.setdefault(fact.rule.code, []).append(fact)
    # The set-up logs of all ranks, read together, outweigh what single lines suggest.
    weighed = fabric_verified or any(code in by_code for code in FABRIC_CODES)
    fast = "net-rdma" in by_code and "net-socket" not in by_code
    causes = [
        hypothesis_of(group[0].rule, group)
        for group in by_code.values()
        if group[0].rule.role is Role.CAUSE
        and not (weighed and is_fabric_rule(group[0].rule))
        and not (fast and _is_fallback(group[0].rule))
    ]
    for joint in COMBINATIONS:
        if all(code in by_code for code in joint.requires):
            found = tuple(by_code[code][0] for code in joint.requires)
            causes.append(
                Hypothesis(
                    code=joint.code,
                    classes=(joint.failure_class,),
                    confidence=joint.confidence,
                    message=joint.message,
                    remedy=joint.remedy,
                    needs=found[0].rule.needs,
                    facts=found,
                    first_failure=first_failure_of(found[0]),
                    performance_only=found[0].rule.performance_only,
                )
            )
    stacks = {fact.process.rank: fact for fact in by_code.get(STACK.code, ()) if "stack_location" in fact.values}
    causes = [_with_stack(cause, stacks) for cause in causes]
    if desync is not None and (found := _from_desync(desync)) is not None:
        causes.append(found)
    return [*causes, *_from_rank_consistency(facts, causes)]


def _is_fallback(rule: Rule) -> bool:
    return rule.performance_only and rule.classes[0] in {FailureClass.TCP_FALLBACK, FailureClass.RDMA_DEVICE_MISSING}


def is_fabric_rule(rule: Rule) -> bool:
    """Whether a single line suggests a fabric that is degraded."""
    degrades = rule.performance_only or rule.role is Role.CONTEXT
    return (
        degrades
        and rule.code not in FABRIC_CODES
        and any(failure_class in _FABRIC_CLASSES for failure_class in rule.classes[:1])
    )


def hypothesis_of(rule: Rule, facts: Sequence[Fact]) -> Hypothesis:
    """The hypothesis of a rule for the lines it matched."""
    at = facts[0].values.get("raised_at")
    text = fill_values(rule.message, facts[0])
    return Hypothesis(
        code=rule.code,
        classes=rule.classes,
        confidence=rule.confidence,
        message=f"{text}, at {at}" if at else text,
        remedy=tuple(fill_values(step, facts[0]) for step in rule.remedy),
        needs=tuple(name for name in rule.needs if not (at and name == "first-traceback")),
        facts=tuple(facts),
        first_failure=first_failure_among(facts),
        performance_only=rule.performance_only,
    )


def _with_stack(cause: Hypothesis, stacks: Mapping[int | None, Fact]) -> Hypothesis:
    """With where the rank was that flight recorders name."""
    rank = cause.first_failure.rank if cause.first_failure else None
    if cause.code not in _FLIGHT_CODES or rank not in stacks:
        return cause
    stack = stacks[rank]
    text = f"{cause.message}; rank {rank} was at {stack.values['stack_location']}"
    return replace(cause, message=text, facts=(*cause.facts, stack))


def _from_desync(desync: Desync) -> Hypothesis | None:
    """The hypothesis of the ranks' watchdogs and stacks together, where they show more than that ranks waited."""
    waited = format_ranks(desync.waiting)
    if desync.mismatched:
        calls = ", ".join(f"rank {fact.process.rank} in {fact.values['op']}" for fact in desync.mismatched[:4])
        text = f"ranks waited in different collectives: {calls}"
        return _collective_mismatch(text, desync.mismatched, None, code="collective-mismatch")
    if desync.outside_collective and len(desync.outside_collective) <= len(desync.waiting):
        return _outside_collective(desync, waited)
    if desync.lagging:
        first, late = desync.lagging[0], ", ".join(str(stand.rank) for stand in desync.lagging[:8])
        at = f"collective {first.enqueued if first.is_waiting else first.completed}"
        text = f"rank {late} never entered the collective in which {waited} waited; it was at {at}"
        culprit = ProcessRef(rank=first.rank, node=first.fact.process.node, host=first.fact.process.host)
        return _collective_mismatch(text, (*(stand.fact for stand in desync.lagging), *desync.facts[:3]), culprit)
    if desync.waiting_apart:
        calls = " and ".join(
            f"rank {fact.process.rank} in {fact.values['op']} at {fact.values['stack_location']}"
            for fact in desync.waiting_apart
        )
        alone = first_failure_of(desync.waiting_apart[0]) if len(desync.inside_collective) > 2 else None
        return _collective_mismatch(
            f"ranks waited in different calls: {calls}", desync.waiting_apart, alone, code="collective-mismatch"
        )
    if 0 < len(desync.silent) <= 8:
        text = f"{waited} waited in a collective; rank {', '.join(map(str, desync.silent))} did not"
        return _collective_mismatch(
            text, (*desync.facts, *desync.inside_collective[:3]), ProcessRef(rank=min(desync.silent))
        )
    return None


def _outside_collective(desync: Desync, waited: str) -> Hypothesis:
    """The stack of a rank outside the collective is the deciding evidence."""
    late, place = desync.outside_collective[0], desync.outside_collective[0].values["stack_location"]
    away = format_ranks([fact.process.rank or 0 for fact in desync.outside_collective])
    ops = (fact.values["op"] for fact in desync.inside_collective)
    op = next((f" ({call})" for call in (*ops, *(fact.values.get("raised_at") for fact in desync.facts)) if call), "")
    # NCCL's calls return before they complete: a rank that stops at `loss.item()` waits for one all the same.
    gpu = any(fact.rule.code == "watchdog-timeout" for fact in desync.facts)
    return _collective_mismatch(
        f"{away} never entered the collective{op} in which {waited} waited; it was at {place}",
        (*desync.outside_collective, *desync.inside_collective[:2], *desync.facts[:3]),
        first_failure_of(late),
        confidence=Confidence.LIKELY if gpu else Confidence.CERTAIN,
        remedy=f"find out why rank {late.process.rank} was at {place} instead of entering the collective",
    )


def _collective_mismatch(
    message: str,
    facts: tuple[Fact, ...],
    first_failure: ProcessRef | None,
    *,
    code: str = "collective-not-entered",
    confidence: Confidence = Confidence.LIKELY,
    remedy: str = "find out what that rank did instead of the collective: its own last lines, `py-spy dump`",
) -> Hypothesis:
    return Hypothesis(
        code=code,
        classes=(FailureClass.COLLECTIVE_MISMATCH, FailureClass.STRAGGLER, FailureClass.HANG_UNKNOWN),
        confidence=confidence,
        message=message,
        remedy=(
            remedy,
            "every rank must make the same calls in the same order: equal numbers of batches, no branch by rank",
        ),
        needs=("stacks", "last-collectives"),
        facts=facts,
        first_failure=first_failure,
    )


def _from_rank_consistency(facts: Sequence[Fact], others: Sequence[Hypothesis]) -> Iterator[Hypothesis]:
    """Contradictions between ranks about the world size, which no single line shows; it may change between attempts."""
    alone = all(other.confidence is Confidence.UNSURE or set(other.classes) & _RENDEZVOUS_CLASSES for other in others)
    if (found := rank_conflict(facts)) is not None:
        yield Hypothesis(
            code="rank-conflict",
            classes=(FailureClass.RANK_COUNT, FailureClass.RENDEZVOUS),
            confidence=Confidence.LIKELY if alone else Confidence.UNSURE,
            message=found.message,
            remedy=RULES["rank-count"].remedy,
            needs=("who-joined",),
            facts=found.facts,
            first_failure=None,
        )
    if (absent := missing_ranks(facts) or (None if others else missing_lightning_members(facts))) is not None:
        came, away = len(absent.facts), format_ranks(absent.ranks)
        yield Hypothesis(
            code="communicator-incomplete",
            classes=(
                FailureClass.RENDEZVOUS,
                FailureClass.RANK_COUNT,
                FailureClass.NOT_STARTED,
                FailureClass.HANG_UNKNOWN,
            ),
            confidence=Confidence.UNSURE,
            message=f"{came} of {absent.world_size} ranks reached the rendezvous; {away} never came",
            remedy=("check whether the missing ranks were started, and what they did instead",),
            needs=("who-joined", "stacks"),
            facts=absent.facts[:3],
            first_failure=ProcessRef(rank=absent.ranks[0]),
        )
