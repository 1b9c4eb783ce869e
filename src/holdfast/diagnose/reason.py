"""Owns the way from facts to one answer: who was first, what only followed, how sure, and which fact is missing.

Pure: the same facts give the same answer. Rules say what a line means, causes what lines could come from (cause.py);
here causes are weighed against one another. A line that follows from others is never the cause, an answer is only as
sure as its line is specific, and where lines leave several causes open the answer is `unknown` with the fact that
would decide.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from holdfast.diagnose.answer import Answer, Consequence
from holdfast.diagnose.asking import beyond, missing, of_set_up
from holdfast.diagnose.cause import DEPTH, HANGS, Cause, cause_of, causes_of, is_of_fabric
from holdfast.diagnose.classes import Class
from holdfast.diagnose.deadlock import deadlock
from holdfast.diagnose.fact import Fact
from holdfast.diagnose.rules import RULES
from holdfast.diagnose.rules.records import STACK
from holdfast.diagnose.rules.row import Role, Sureness
from holdfast.diagnose.rules.torchrun import FIRST_ENDED
from holdfast.diagnose.wording import culprit_of, deciding, evidence, filled, shown

CLOCKS_S = 5.0
"""Clocks of two hosts may differ so much without an order of their lines being wrong."""

_SURENESS = tuple(Sureness)
_ENDS = {Class.PROGRAM_ERROR, Class.USAGE, Class.UNREACHABLE, Class.KILLED, Class.PREEMPTED}
"""Classes that lie above what their peers then say of the network."""
_OF_LAUNCHERS = {"child-failed", "terminated", "aborted"}
"""Rules whose lines a launcher writes of a rank."""


def answer(
    facts: Sequence[Fact],
    *,
    counts: Mapping[str, int],
    ranks_with_logs: frozenset[int] = frozenset(),
    first_rank: int | None = None,
    sound_fabric: bool = False,
    set_up: bool = False,
    notes: tuple[str, ...] = (),
) -> Answer:
    """Weigh all facts of a pile.

    `counts` is how many lines each rule recognised; `first_rank` is who failed first, where somebody watched;
    `sound_fabric` is whether the set-up logs, read together, show that the fabric is as it should be; `set_up` whether
    there are such lines at all.
    """
    facts = _named(facts)
    hang = deadlock(facts, ranks_with_logs, _world(facts))
    causes = causes_of(facts, hang, sound_fabric)
    if first_rank is not None:
        causes = [_about(cause, first_rank) for cause in causes]
    chosen = _first(causes, first_rank)
    if chosen is None or chosen.sure is Sureness.UNSURE:
        if sound_fabric:
            facts = [fact for fact in facts if not is_of_fabric(fact.rule)]
        return _unknown(facts, causes, chosen, counts, set_up, notes)
    explained = [each for each in causes if _of_gone_peers(each, causes)]
    rivals = [each for each in causes if each is not chosen and each not in explained and not _explains(chosen, each)]
    sure = chosen.sure
    if any(each.sure is sure and each.klass.label is not chosen.klass.label for each in rivals):
        sure = Sureness.LIKELY
    return Answer(
        what=chosen.says,
        klass=chosen.klass,
        code=chosen.code,
        sure=sure,
        culprit=chosen.culprit,
        evidence=evidence(chosen.facts),
        consequences=_consequences(facts, counts, chosen),
        remedy=chosen.remedy,
        missing=() if sure is Sureness.CERTAIN else deciding(chosen.decides, chosen.classes),
        also=evidence([each.facts[0] for each in rivals if each.sure is not Sureness.UNSURE]),
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


# Choosing


def _about(cause: Cause, rank: int) -> Cause:
    """The cause with what the rank wrote that failed first in front; with all of its traceback nothing is left open."""
    facts = tuple(sorted(cause.facts, key=lambda fact: fact.who.rank != rank))
    whole = facts[0].who.rank == rank and cause.classes == (Class.PROGRAM_ERROR,) and "raised_at" in facts[0].values
    told = cause_of(facts[0].rule, facts) if facts[0].rule.code == cause.code else cause
    sure = Sureness.CERTAIN if whole else cause.sure
    culprit = cause.culprit if _is_found_by_others(cause) else culprit_of(facts[0]) or cause.culprit
    return replace(told, sure=sure, facts=facts, culprit=culprit)


def _is_found_by_others(cause: Cause) -> bool:
    """Whether the culprit wrote none of the lines: a rank that those which failed had waited for in vain."""
    rank = cause.culprit.rank if cause.culprit else None
    wrote = {fact.who.rank for fact in cause.facts if fact.rule is not STACK and not fact.rule.code.startswith("run-")}
    return rank is not None and rank not in wrote


def _first(causes: Sequence[Cause], first_rank: int | None) -> Cause | None:
    """The cause: ends a run before slowing it, surer first, deeper first, and earlier among equals."""

    def of_another(cause: Cause) -> bool:
        rank = cause.culprit.rank if cause.culprit else None
        if first_rank is None or rank is None or _is_found_by_others(cause):
            return False
        return rank != first_rank

    def weight(cause: Cause) -> tuple[bool, bool, bool, int]:
        gone = _of_gone_peers(cause, causes)
        return cause.degrades, of_another(cause), gone, _SURENESS.index(cause.sure)

    # Of equals what a rank wrote says more than what the run saw of its end.
    ranked = sorted(causes, key=lambda each: (weight(each), DEPTH[each.klass], each.code.startswith("run-")))
    if not ranked:
        return None
    best = ranked[0]
    alike = [each for each in ranked if weight(each) == weight(best)]
    return next((each for each in alike if _clearly_before(each, best) and _may_precede(each, best)), best)


def _of_gone_peers(cause: Cause, causes: Sequence[Cause]) -> bool:
    """Whether its lines only say that a peer no longer answers, and another cause is what ended a rank before."""
    rule = RULES.get(cause.code)
    if rule is None or not rule.of_gone_peers:
        return False
    return any(
        other.klass in _ENDS and other.sure is not Sureness.UNSURE and not _clearly_before(cause, other)
        for other in causes
    )


def _clearly_before(one: Cause, other: Cause) -> bool:
    mine, theirs = one.facts[0].at, other.facts[0].at
    if one.facts[0].source == other.facts[0].source and (mine is None or theirs is None):
        return one.facts[0].line < other.facts[0].line
    return mine is not None and theirs is not None and mine < theirs - CLOCKS_S


def _may_precede(one: Cause, other: Cause) -> bool:
    """Whether being earlier is enough: for what is as deep, and for what is certain."""
    return DEPTH[one.klass] <= DEPTH[other.klass] or one.sure is Sureness.CERTAIN


def _explains(cause: Cause, other: Cause) -> bool:
    """Whether another cause only follows from this one, or is the same said with other words."""
    if other.klass.label is cause.klass.label or set(other.classes) <= HANGS:
        return True
    return other.sure is Sureness.UNSURE or other.degrades or DEPTH[other.klass] > DEPTH[cause.klass]


def _unknown(
    facts: Sequence[Fact],
    causes: Sequence[Cause],
    nearest: Cause | None,
    counts: Mapping[str, int],
    set_up: bool,
    notes: tuple[str, ...],
) -> Answer:
    """What is known, and which facts would decide."""
    if nearest is not None:
        ordered = _by_likelihood(causes, nearest)
        votes = Counter(klass for cause in ordered for klass in cause.classes)
        asked = (
            (cause.decides, tuple(sorted(cause.classes, key=lambda klass: -votes[klass])), beyond(cause.code))
            for cause in ordered
        )
        return Answer(
            what=nearest.says,
            klass=Class.UNKNOWN,
            code=nearest.code,
            sure=Sureness.UNSURE,
            culprit=None if nearest.degrades or set(nearest.classes) & HANGS else nearest.culprit,
            evidence=evidence(nearest.facts),
            consequences=_consequences(facts, counts, nearest),
            remedy=nearest.remedy,
            missing=missing(asked),
            also=evidence([each.facts[0] for each in ordered if each is not nearest]),
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
            missing=missing(of_set_up(facts, set_up)),
            notes=notes,
        )
    # What a launcher says of a rank is the least of what can be said of it.
    by_word = sorted(told, key=lambda fact: fact.rule.code in _OF_LAUNCHERS)
    asked = ((fact.rule.decides, fact.rule.classes, fact.rule.beyond) for fact in by_word)
    secondary = told[0].rule.role is Role.SECONDARY
    words = filled(told[0].rule.says, told[0])
    what = f"only consequences are in what was read: {words}" if secondary else words
    first = _first_ended(facts)
    return Answer(
        what=f"{what}; {filled(first.rule.says, first)}" if first else what,
        klass=Class.UNKNOWN,
        code=told[0].rule.code,
        sure=Sureness.UNSURE,
        culprit=culprit_of(first) if first else None,
        evidence=evidence([*([first] if first else []), *told]),
        missing=missing(asked),
        notes=notes,
    )


def _by_likelihood(causes: Sequence[Cause], nearest: Cause) -> list[Cause]:
    """The likeliest first, of causes that no line decides between.

    That is `nearest`, then those that end a run before those that slow it; of these the ones with the stronger
    evidence; then the ones whose first line is earlier, by more than clocks differ; then the deeper ones.
    """
    clocks = [cause.facts[0].at for cause in causes if cause.facts[0].at is not None]
    began = min(clocks, default=0.0)

    def weight(cause: Cause) -> tuple[bool, bool, int, int, int]:
        at = cause.facts[0].at
        late = 0 if at is None else int((at - began) // CLOCKS_S)
        return cause is not nearest, cause.degrades, _SURENESS.index(cause.sure), late, DEPTH[cause.klass]

    return sorted(causes, key=weight)


def _first_ended(facts: Iterable[Fact]) -> Fact | None:
    """Whom the launcher saw end first; nobody where that rank itself wrote of having lost another."""
    first = next((fact for fact in facts if fact.rule is FIRST_ENDED and fact.who.rank is not None), None)
    own = (fact for fact in facts if fact.rule.role is Role.SECONDARY and fact.rule.code not in _OF_LAUNCHERS)
    return None if first is None or first.who.rank in {fact.who.rank for fact in own} else first


def _consequences(facts: Iterable[Fact], counts: Mapping[str, int], cause: Cause) -> tuple[Consequence, ...]:
    first: dict[str, Fact] = {}
    for fact in facts:
        hang = fact.rule.role is Role.PRIMARY and set(fact.rule.classes) <= HANGS and cause.klass not in HANGS
        if fact.rule.role is Role.SECONDARY or hang or (fact.rule.of_gone_peers and cause.klass in _ENDS):
            first.setdefault(fact.rule.code, fact)
    return tuple(
        Consequence(says=filled(fact.rule.says, fact), code=code, count=counts.get(code, 1), first=shown(fact))
        for code, fact in first.items()
        if code != cause.code
    )
