"""Owns the way from facts to one answer: who was first, what only followed, how sure, and which fact is missing.

Pure: the same facts give the same answer. Rules say what a line means; here lines are weighed against one another.
A line that follows from others is never the cause, an answer is only as sure as its line is specific, and where lines
leave several causes open the answer is `unknown` with the fact that would decide.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from holdfast.diagnose.answer import Answer, Consequence, Culprit, Evidence, Missing
from holdfast.diagnose.classes import Class
from holdfast.diagnose.counting import absence, contradiction
from holdfast.diagnose.deadlock import Deadlock, deadlock
from holdfast.diagnose.fact import Fact
from holdfast.diagnose.rules import RULES
from holdfast.diagnose.rules.deciding import DECIDING
from holdfast.diagnose.rules.fabric import FABRIC_CODES
from holdfast.diagnose.rules.joint import JOINTS
from holdfast.diagnose.rules.row import Role, Rule, Sureness

MOST_EVIDENCE = 6
CLOCKS_S = 5.0
"""Clocks of two hosts may differ so much without an order of their lines being wrong."""

_DEPTHS: tuple[tuple[Class, ...], ...] = (
    (Class.GPU_XID, Class.OOM_HOST, Class.NODE_LOST),
    (Class.SHM_TOO_SMALL, Class.MEMLOCK, Class.DRIVER, Class.VERSION_MISMATCH, Class.STORAGE, Class.OOM_GPU),
    (Class.NAN_DATA, Class.RANK_COUNT, Class.WRONG_INTERFACE, Class.RDMA_DEVICE_MISSING, Class.NOT_STARTED),
    (Class.ACS_IOMMU, Class.FIREWALL, Class.NETWORK_LOSS, Class.GDR_MISSING, Class.TCP_FALLBACK, Class.RENDEZVOUS),
    (Class.OTHER, Class.PROGRAM_ERROR, Class.PREEMPTED, Class.KILLED),
    (Class.COLLECTIVE_MISMATCH, Class.STRAGGLER, Class.HANG_UNKNOWN),
)
_DEPTH = {each: depth for depth, classes in enumerate(_DEPTHS) for each in classes}
"""What lies deeper explains what lies above it: a lost GPU a hang, never a hang a lost GPU."""
_OF_FABRIC = frozenset({Class.TCP_FALLBACK, Class.RDMA_DEVICE_MISSING, Class.GDR_MISSING})
_HANGS = frozenset(_DEPTHS[-1])
_MEETING = {Class.RENDEZVOUS, Class.RANK_COUNT, *_HANGS}
"""Classes under which it also shows that ranks were told different numbers."""
_VALUE = re.compile(r"(: )?\{(\w+)\}")
_SURENESS = tuple(Sureness)


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


def answer(
    facts: Sequence[Fact],
    *,
    counts: Mapping[str, int],
    ranks_with_logs: frozenset[int] = frozenset(),
    first_rank: int | None = None,
    sound_fabric: bool = False,
    notes: tuple[str, ...] = (),
) -> Answer:
    """Weigh all facts of a pile.

    `counts` is how many lines each rule recognised; `first_rank` is who failed first, where somebody watched;
    `sound_fabric` is whether the set-up logs, read together, show that the fabric is as it should be.
    """
    facts = _named(facts)
    hang = deadlock(facts, ranks_with_logs, _world(facts))
    causes = _causes(facts, hang, sound_fabric)
    if first_rank is not None:
        causes = [_about(cause, first_rank) for cause in causes]
    chosen = _first(causes, first_rank)
    if chosen is None or chosen.sure is Sureness.UNSURE:
        if sound_fabric:
            facts = [fact for fact in facts if not _is_of_fabric(fact.rule)]
        return _unknown(facts, causes, chosen, counts, notes)
    rivals = [each for each in causes if each is not chosen and not _explains(chosen, each)]
    sure = chosen.sure
    if any(each.sure is sure and each.klass.label is not chosen.klass.label for each in rivals):
        sure = Sureness.LIKELY
    return Answer(
        what=chosen.says,
        klass=chosen.klass,
        code=chosen.code,
        sure=sure,
        culprit=chosen.culprit,
        evidence=_evidence(chosen.facts),
        consequences=_consequences(facts, counts, chosen),
        remedy=chosen.remedy,
        missing=() if sure is Sureness.CERTAIN else _missing(chosen.decides, chosen.classes),
        also=_evidence([each.facts[0] for each in rivals if each.sure is not Sureness.UNSURE]),
        notes=notes,
    )


def _named(facts: Sequence[Fact]) -> list[Fact]:
    """Facts with the rank filled in where host and process id were seen with one, in the order of their clocks."""
    ranks: dict[tuple[str | None, int | None], int] = {
        (fact.who.host, fact.who.pid): fact.who.rank
        for fact in facts
        if fact.rule.code == "comm-rank" and fact.who.host is not None and fact.who.rank is not None
    }
    nodes = {fact.who.rank: fact.who.node for fact in facts if fact.who.rank is not None and fact.who.node}
    named = [
        replace(fact, who=replace(fact.who, rank=rank))
        if fact.who.rank is None and (rank := ranks.get((fact.who.host, fact.who.pid))) is not None
        else fact
        for fact in facts
    ]
    named = [
        replace(fact, who=replace(fact.who, node=node))
        if fact.who.rank is not None and fact.who.node is None and (node := nodes.get(fact.who.rank)) is not None
        else fact
        for fact in named
    ]
    if any(fact.at is None for fact in named):
        return named  # the order in which they were read stands
    return sorted(named, key=lambda fact: fact.at or 0.0)


def _world(facts: Iterable[Fact]) -> int | None:
    """How many ranks there are, where a line says so."""
    said = [int(world) for fact in facts if (world := fact.values.get("world", "")).isdecimal() and len(world) < 8]
    return max(said, default=None)


# Causes


def _causes(facts: Sequence[Fact], hang: Deadlock | None, sound_fabric: bool) -> list[Cause]:
    by_code: dict[str, list[Fact]] = {}
    for fact in facts:
        by_code.setdefault(fact.rule.code, []).append(fact)
    # The set-up logs of all ranks, read together, outweigh what single lines of theirs suggest.
    weighed = sound_fabric or any(code in by_code for code in FABRIC_CODES)
    fast = "net-fast" in by_code and "net-socket" not in by_code
    causes = [
        _cause(group[0].rule, group)
        for group in by_code.values()
        if group[0].rule.role is Role.PRIMARY
        and not (weighed and _is_of_fabric(group[0].rule))
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
                    culprit=_culprit(found[0]),
                    degrades=found[0].rule.degrades,
                )
            )
    if hang is not None and (found := _from_deadlock(hang)) is not None:
        causes.append(found)
    return [*causes, *_from_counting(facts, causes)]


def _is_fallback(rule: Rule) -> bool:
    return rule.degrades and rule.classes[0] in {Class.TCP_FALLBACK, Class.RDMA_DEVICE_MISSING}


def _is_of_fabric(rule: Rule) -> bool:
    """Whether a single line speaks of a fabric that is not used as it could be."""
    degrades = rule.degrades or rule.role is Role.CONTEXT
    return degrades and rule.code not in FABRIC_CODES and any(klass in _OF_FABRIC for klass in rule.classes[:1])


def _cause(rule: Rule, facts: Sequence[Fact]) -> Cause:
    at = facts[0].values.get("raised_at")
    says = _filled(rule.says, facts[0])
    return Cause(
        code=rule.code,
        classes=rule.classes,
        sure=rule.sure,
        says=f"{says}, at {at}" if at else says,
        remedy=tuple(_filled(step, facts[0]) for step in rule.remedy),
        decides=tuple(name for name in rule.decides if not (at and name == "first-traceback")),
        facts=tuple(facts),
        culprit=_culprit(facts[0]),
        degrades=rule.degrades,
    )


def _from_deadlock(hang: Deadlock) -> Cause | None:
    """What the watchdogs of several ranks say together, where they say more than that somebody waited."""
    status = next((stand for stand in hang.behind), None)
    if hang.differing:
        calls = ", ".join(f"rank {fact.who.rank} in {fact.values['op']}" for fact in hang.differing[:4])
        says, sure, culprit, shown = (
            f"ranks waited in different collectives: {calls}",
            Sureness.LIKELY,
            None,
            hang.differing,
        )
    elif status is not None:
        late = ", ".join(str(stand.rank) for stand in hang.behind[:8])
        at = f"collective {status.completed}" if not status.waits else f"collective {status.enqueued}"
        says = f"rank {late} never entered the collective that {_ranks(hang.waiting)} waited in; it was at {at}"
        sure, culprit = Sureness.LIKELY, Culprit(rank=status.rank, node=status.fact.who.node, host=status.fact.who.host)
        shown = tuple(stand.fact for stand in hang.behind) + hang.facts[:3]
    elif hang.silent and len(hang.silent) <= 8:
        says = f"{_ranks(hang.waiting)} waited in a collective; rank {', '.join(map(str, hang.silent))} did not"
        sure, culprit, shown = Sureness.LIKELY, Culprit(rank=min(hang.silent)), hang.facts
    else:
        return None
    return Cause(
        code="never-entered" if not hang.differing else "collective-differs",
        classes=(Class.COLLECTIVE_MISMATCH, Class.STRAGGLER, Class.HANG_UNKNOWN),
        sure=sure,
        says=says,
        remedy=(
            "see what that rank did instead of the collective: its own last lines, `py-spy dump`",
            "every rank must make the same calls in the same order: equal numbers of batches, no branch by rank",
        ),
        decides=("stacks", "last-collectives"),
        facts=shown,
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
    if (absent := absence(facts)) is not None:
        yield Cause(
            code="ranks-absent",
            classes=(Class.RENDEZVOUS, Class.RANK_COUNT, Class.NOT_STARTED, Class.HANG_UNKNOWN),
            sure=Sureness.UNSURE,
            says=f"{len(absent.facts)} of {absent.world} ranks began to meet; {_ranks(absent.ranks)} never came",
            remedy=("see whether the missing ranks were started, and what they did instead",),
            decides=("who-joined", "stacks"),
            facts=absent.facts[:3],
            culprit=Culprit(rank=absent.ranks[0]),
        )


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:4]))
    return f"rank {shown}" if len(ranks) <= 4 else f"{len(ranks)} ranks ({shown}, ...)"


# Choosing


def _about(cause: Cause, rank: int) -> Cause:
    """The cause with what the rank wrote that failed first in front; with all of its traceback nothing is left open."""
    facts = tuple(sorted(cause.facts, key=lambda fact: fact.who.rank != rank))
    whole = facts[0].who.rank == rank and cause.classes == (Class.PROGRAM_ERROR,) and "raised_at" in facts[0].values
    told = _cause(facts[0].rule, facts) if facts[0].rule.code == cause.code else cause
    sure = Sureness.CERTAIN if whole else cause.sure
    culprit = cause.culprit if _is_found_by_others(cause) else _culprit(facts[0]) or cause.culprit
    return replace(told, sure=sure, facts=facts, culprit=culprit)


def _is_found_by_others(cause: Cause) -> bool:
    """Whether the culprit wrote none of the lines: a rank that those which failed had waited for in vain."""
    rank = cause.culprit.rank if cause.culprit else None
    return rank is not None and rank not in {fact.who.rank for fact in cause.facts}


def _first(causes: Sequence[Cause], first_rank: int | None) -> Cause | None:
    """The cause: ends a run before slowing it, surer first, deeper first, and earlier among equals."""

    def of_another(cause: Cause) -> bool:
        rank = cause.culprit.rank if cause.culprit else None
        if first_rank is None or rank is None or _is_found_by_others(cause):
            return False
        return rank != first_rank

    def weight(cause: Cause) -> tuple[bool, bool, int]:
        return cause.degrades, of_another(cause), _SURENESS.index(cause.sure)

    ranked = sorted(causes, key=lambda each: (weight(each), _DEPTH[each.klass]))
    if not ranked:
        return None
    best = ranked[0]
    alike = [each for each in ranked if weight(each) == weight(best)]
    return next((each for each in alike if _clearly_before(each, best) and _may_precede(each, best)), best)


def _clearly_before(one: Cause, other: Cause) -> bool:
    mine, theirs = one.facts[0].at, other.facts[0].at
    if one.facts[0].source == other.facts[0].source and (mine is None or theirs is None):
        return one.facts[0].line < other.facts[0].line
    return mine is not None and theirs is not None and mine < theirs - CLOCKS_S


def _may_precede(one: Cause, other: Cause) -> bool:
    """Whether being earlier is enough: for what is as deep, and for what is certain."""
    return _DEPTH[one.klass] <= _DEPTH[other.klass] or one.sure is Sureness.CERTAIN


def _explains(cause: Cause, other: Cause) -> bool:
    """Whether another cause only follows from this one, or is the same said with other words."""
    if other.klass.label is cause.klass.label or set(other.classes) <= _HANGS:
        return True
    return other.sure is Sureness.UNSURE or other.degrades or _DEPTH[other.klass] > _DEPTH[cause.klass]


def _unknown(
    facts: Sequence[Fact],
    causes: Sequence[Cause],
    nearest: Cause | None,
    counts: Mapping[str, int],
    notes: tuple[str, ...],
) -> Answer:
    """What is known, and which facts would decide."""
    if nearest is not None:
        ordered = sorted(causes, key=lambda each: (each.degrades, _DEPTH[each.klass]))
        votes = Counter(klass for cause in ordered for klass in cause.classes)
        missing: dict[str, Missing] = {}
        for cause in ordered:
            classes = tuple(sorted(cause.classes, key=lambda klass: -votes[klass]))
            for each in _missing(cause.decides, classes):
                missing.setdefault(each.fact, each)
        return Answer(
            what=nearest.says,
            klass=Class.UNKNOWN,
            code=nearest.code,
            sure=Sureness.UNSURE,
            culprit=None,
            evidence=_evidence(nearest.facts),
            consequences=_consequences(facts, counts, nearest),
            remedy=nearest.remedy,
            missing=tuple(missing.values()),
            also=_evidence([each.facts[0] for each in ordered if each is not nearest]),
            notes=notes,
        )
    told = [fact for fact in facts if fact.rule.classes]
    told.sort(key=lambda fact: fact.rule.role is not Role.SECONDARY)
    if not told:
        return Answer(
            what="no line that was read tells of a failure",
            klass=Class.UNKNOWN,
            code="",
            sure=Sureness.UNSURE,
            missing=_missing(("all-ranks", "nccl-warn"), ()),
            notes=notes,
        )
    missing_of = {
        each.fact: each for fact in reversed(told) for each in reversed(_missing(fact.rule.decides, fact.rule.classes))
    }
    secondary = told[0].rule.role is Role.SECONDARY
    words = _filled(told[0].rule.says, told[0])
    return Answer(
        what=f"only consequences are in what was read: {words}" if secondary else words,
        klass=Class.UNKNOWN,
        code=told[0].rule.code,
        sure=Sureness.UNSURE,
        evidence=_evidence(told),
        missing=tuple(reversed(missing_of.values())),
        notes=notes,
    )


# Words


def _consequences(facts: Iterable[Fact], counts: Mapping[str, int], cause: Cause) -> tuple[Consequence, ...]:
    first: dict[str, Fact] = {}
    for fact in facts:
        hang = fact.rule.role is Role.PRIMARY and set(fact.rule.classes) <= _HANGS and cause.klass not in _HANGS
        if fact.rule.role is Role.SECONDARY or hang:
            first.setdefault(fact.rule.code, fact)
    return tuple(
        Consequence(says=_filled(fact.rule.says, fact), code=code, count=counts.get(code, 1), first=_shown(fact))
        for code, fact in first.items()
        if code != cause.code
    )


def _missing(names: Iterable[str], classes: tuple[Class, ...]) -> tuple[Missing, ...]:
    return tuple(Missing(fact=DECIDING[name].fact, get=DECIDING[name].get, decides=classes) for name in names)


def _evidence(facts: Iterable[Fact]) -> tuple[Evidence, ...]:
    """Each line once, no more than a person reads."""
    found: dict[tuple[str, int], Evidence] = {}
    for fact in facts:
        found.setdefault((fact.source, fact.line), _shown(fact))
        if len(found) == MOST_EVIDENCE:
            break
    return tuple(found.values())


def _shown(fact: Fact) -> Evidence:
    where = f"{fact.source}:{fact.line}" if fact.line else fact.source
    return Evidence(where=where, text=fact.text, code=fact.rule.code)


def _culprit(fact: Fact) -> Culprit | None:
    who = fact.who
    if (who.rank, who.node, who.host, who.pid) == (None, None, None, None):
        return None
    return Culprit(rank=who.rank, node=who.node, host=who.host, pid=who.pid)


def _filled(text: str, fact: Fact) -> str:
    """A sentence with the captured values in it."""
    return _VALUE.sub(lambda name: f"{name[1] or ''}{value}" if (value := fact.values.get(name[2])) else "", text)
