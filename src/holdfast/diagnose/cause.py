"""Owns what could be the cause: of each rule's lines, of several lines together, and of what is missing among them.

Pure. Refuses to own which of them it is (reason.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from holdfast.diagnose.answer import Culprit
from holdfast.diagnose.classes import Class
from holdfast.diagnose.counting import absence, contradiction, members_absent
from holdfast.diagnose.deadlock import Deadlock
from holdfast.diagnose.fact import Fact
from holdfast.diagnose.rules import RULES
from holdfast.diagnose.rules.fabric import FABRIC_CODES
from holdfast.diagnose.rules.joint import JOINTS
from holdfast.diagnose.rules.row import Role, Rule, Sureness
from holdfast.diagnose.wording import culprit_among, culprit_of, filled, ranks_in_words

_DEPTHS: tuple[tuple[Class, ...], ...] = (
    (Class.GPU_XID, Class.OOM_HOST, Class.NODE_LOST),
    (Class.SHM_TOO_SMALL, Class.MEMLOCK, Class.DRIVER, Class.VERSION_MISMATCH, Class.STORAGE, Class.OOM_GPU),
    (Class.NAN_DATA, Class.RANK_COUNT, Class.WRONG_INTERFACE, Class.RDMA_DEVICE_MISSING, Class.NOT_STARTED),
    (Class.ACS_IOMMU, Class.FIREWALL, Class.NETWORK_LOSS, Class.GDR_MISSING, Class.TCP_FALLBACK, Class.RENDEZVOUS),
    (Class.OTHER, Class.PROGRAM_ERROR, Class.USAGE, Class.UNREACHABLE, Class.PREEMPTED, Class.KILLED),
    (Class.COLLECTIVE_MISMATCH, Class.STRAGGLER, Class.HANG_UNKNOWN),
)
DEPTH = {each: depth for depth, classes in enumerate(_DEPTHS) for each in classes}
"""What lies deeper explains what lies above it: a lost GPU a hang, never a hang a lost GPU."""
_OF_FABRIC = frozenset({Class.TCP_FALLBACK, Class.RDMA_DEVICE_MISSING, Class.GDR_MISSING})
HANGS = frozenset(_DEPTHS[-1])
_MEETING = {Class.RENDEZVOUS, Class.RANK_COUNT, *HANGS}
"""Classes under which it also shows that ranks were told different numbers."""


@dataclass(frozen=True, kw_only=True)
class Cause:
    """One possible cause, with what speaks for it."""

    code: str
    classes: tuple[Class, ...]
    sure: Sureness
    says: str
    remedy: tuple[str, ...]
    decides: tuple[str, ...]
    facts: tuple[Fact, ...]
    """In order; the first is the first seen."""
    culprit: Culprit | None
    degrades: bool = False

    @property
    def klass(self) -> Class:
        return self.classes[0]


def causes_of(facts: Sequence[Fact], hang: Deadlock | None, sound_fabric: bool) -> list[Cause]:
    """Everything that facts could come from; with a sound fabric, nothing that single lines suggest of it."""
    by_code: dict[str, list[Fact]] = {}
    for fact in facts:
        by_code.setdefault(fact.rule.code, []).append(fact)
    # The set-up logs of all ranks, read together, outweigh what single lines of theirs suggest.
    weighed = sound_fabric or any(code in by_code for code in FABRIC_CODES)
    fast = "net-fast" in by_code and "net-socket" not in by_code
    causes = [
        cause_of(group[0].rule, group)
        for group in by_code.values()
        if group[0].rule.role is Role.PRIMARY
        and not (weighed and is_of_fabric(group[0].rule))
        and not (fast and _is_fallback(group[0].rule))
    ]
    for joint in JOINTS:
        if all(code in by_code for code in joint.needs):
            found = tuple(by_code[code][0] for code in joint.needs)
            causes.append(
                Cause(
                    code=joint.code,
                    classes=(joint.klass,),
                    sure=joint.sure,
                    says=joint.says,
                    remedy=joint.remedy,
                    decides=found[0].rule.decides,
                    facts=found,
                    culprit=culprit_of(found[0]),
                    degrades=found[0].rule.degrades,
                )
            )
    if hang is not None and (found := _from_deadlock(hang)) is not None:
        causes.append(found)
    return [*causes, *_from_counting(facts, causes)]


def _is_fallback(rule: Rule) -> bool:
    return rule.degrades and rule.classes[0] in {Class.TCP_FALLBACK, Class.RDMA_DEVICE_MISSING}


def is_of_fabric(rule: Rule) -> bool:
    """Whether a single line speaks of a fabric that is not used as it could be."""
    degrades = rule.degrades or rule.role is Role.CONTEXT
    return degrades and rule.code not in FABRIC_CODES and any(klass in _OF_FABRIC for klass in rule.classes[:1])


def cause_of(rule: Rule, facts: Sequence[Fact]) -> Cause:
    """What a rule makes of the lines it recognised."""
    at = facts[0].values.get("raised_at")
    says = filled(rule.says, facts[0])
    return Cause(
        code=rule.code,
        classes=rule.classes,
        sure=rule.sure,
        says=f"{says}, at {at}" if at else says,
        remedy=tuple(filled(step, facts[0]) for step in rule.remedy),
        decides=tuple(name for name in rule.decides if not (at and name == "first-traceback")),
        facts=tuple(facts),
        culprit=culprit_among(facts),
        degrades=rule.degrades,
    )


def _from_deadlock(hang: Deadlock) -> Cause | None:
    """What the watchdogs and stacks of several ranks say together, where they say more than that somebody waited."""
    waited = ranks_in_words(hang.waiting)
    if hang.differing:
        calls = ", ".join(f"rank {fact.who.rank} in {fact.values['op']}" for fact in hang.differing[:4])
        says = f"ranks waited in different collectives: {calls}"
        return _not_together(says, hang.differing, None, code="collective-differs")
    if hang.elsewhere and len(hang.elsewhere) <= len(hang.waiting):
        return _stood_elsewhere(hang, waited)
    if hang.behind:
        first, late = hang.behind[0], ", ".join(str(stand.rank) for stand in hang.behind[:8])
        at = f"collective {first.enqueued if first.waits else first.completed}"
        says = f"rank {late} never entered the collective that {waited} waited in; it was at {at}"
        culprit = Culprit(rank=first.rank, node=first.fact.who.node, host=first.fact.who.host)
        return _not_together(says, (*(stand.fact for stand in hang.behind), *hang.facts[:3]), culprit)
    if hang.astray:
        calls = " and ".join(
            f"rank {fact.who.rank} in {fact.values['op']} at {fact.values['stands_at']}" for fact in hang.astray
        )
        alone = culprit_of(hang.astray[0]) if len(hang.inside) > 2 else None
        return _not_together(f"ranks waited in different calls: {calls}", hang.astray, alone, code="collective-differs")
    if 0 < len(hang.silent) <= 8:
        says = f"{waited} waited in a collective; rank {', '.join(map(str, hang.silent))} did not"
        return _not_together(says, (*hang.facts, *hang.inside[:3]), Culprit(rank=min(hang.silent)))
    return None


def _stood_elsewhere(hang: Deadlock, waited: str) -> Cause:
    """The stack of a rank that was not in the collective is what decides."""
    late, place = hang.elsewhere[0], hang.elsewhere[0].values["stands_at"]
    away = ranks_in_words([fact.who.rank or 0 for fact in hang.elsewhere])
    ops = (fact.values["op"] for fact in hang.inside)
    op = next((f" ({call})" for call in (*ops, *(fact.values.get("raised_at") for fact in hang.facts)) if call), "")
    # NCCL's calls return before they are done: a rank that stands at `loss.item()` waits for one all the same.
    gpu = any(fact.rule.code == "watchdog-timeout" for fact in hang.facts)
    return _not_together(
        f"{away} never entered the collective{op} that {waited} waited in; it stood at {place}",
        (*hang.elsewhere, *hang.inside[:2], *hang.facts[:3]),
        culprit_of(late),
        sure=Sureness.LIKELY if gpu else Sureness.CERTAIN,
        look=f"see why rank {late.who.rank} stood at {place} instead of coming to the collective",
    )


def _not_together(
    says: str,
    facts: tuple[Fact, ...],
    culprit: Culprit | None,
    *,
    code: str = "never-entered",
    sure: Sureness = Sureness.LIKELY,
    look: str = "see what that rank did instead of the collective: its own last lines, `py-spy dump`",
) -> Cause:
    return Cause(
        code=code,
        classes=(Class.COLLECTIVE_MISMATCH, Class.STRAGGLER, Class.HANG_UNKNOWN),
        sure=sure,
        says=says,
        remedy=(
            look,
            "every rank must make the same calls in the same order: equal numbers of batches, no branch by rank",
        ),
        decides=("stacks", "last-collectives"),
        facts=facts,
        culprit=culprit,
    )


def _from_counting(facts: Sequence[Fact], others: Sequence[Cause]) -> Iterator[Cause]:
    """What ranks say of their number and never say alone; numbers may change from one attempt to the next."""
    alone = all(other.sure is Sureness.UNSURE or set(other.classes) & _MEETING for other in others)
    if (found := contradiction(facts)) is not None:
        yield Cause(
            code="ranks-contradict",
            classes=(Class.RANK_COUNT, Class.RENDEZVOUS),
            sure=Sureness.LIKELY if alone else Sureness.UNSURE,
            says=found.says,
            remedy=RULES["rank-count"].remedy,
            decides=("who-joined",),
            facts=found.facts,
            culprit=None,
        )
    if (absent := absence(facts) or (None if others else members_absent(facts))) is not None:
        came, away = len(absent.facts), ranks_in_words(absent.ranks)
        yield Cause(
            code="ranks-absent",
            classes=(Class.RENDEZVOUS, Class.RANK_COUNT, Class.NOT_STARTED, Class.HANG_UNKNOWN),
            sure=Sureness.UNSURE,
            says=f"{came} of {absent.world} ranks began to meet; {away} never came",
            remedy=("see whether the missing ranks were started, and what they did instead",),
            decides=("who-joined", "stacks"),
            facts=absent.facts[:3],
            culprit=Culprit(rank=absent.ranks[0]),
        )
