"""Owns how facts are put into an answer: their lines as evidence, who wrote them, and sentences with values in them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from holdfast.diagnose.answer import Culprit, Evidence, Missing
from holdfast.diagnose.classes import Class
from holdfast.diagnose.fact import Fact
from holdfast.diagnose.rules.deciding import DECIDING

MOST_EVIDENCE = 6
_VALUE = re.compile(r"(: )?\{(\w+)\}")


def deciding(names: Iterable[str], classes: tuple[Class, ...]) -> tuple[Missing, ...]:
    """The facts of these names that would decide between classes, and how to get them."""
    return tuple(Missing(fact=DECIDING[name].fact, get=DECIDING[name].get, decides=classes) for name in names)


def evidence(facts: Iterable[Fact]) -> tuple[Evidence, ...]:
    """Each line once, no more than a person reads."""
    found: dict[tuple[str, int], Evidence] = {}
    for fact in facts:
        found.setdefault((fact.source, fact.line), shown(fact))
        if len(found) == MOST_EVIDENCE:
            break
    return tuple(found.values())


def shown(fact: Fact) -> Evidence:
    """Its line, and where it stands."""
    where = f"{fact.source}:{fact.line}" if fact.line else fact.source
    return Evidence(where=where, text=fact.text, code=fact.rule.code)


def culprit_among(facts: Sequence[Fact]) -> Culprit | None:
    """Who wrote the first of these lines; where that says no rank and all others that do say one, that one."""
    ranks = {fact.who.rank for fact in facts} - {None}
    return culprit_of(next((fact for fact in facts if len(ranks) == 1 and fact.who.rank is not None), facts[0]))


def culprit_of(fact: Fact) -> Culprit | None:
    """Who wrote its line; None where nothing tells."""
    who = fact.who
    if (who.rank, who.node, who.host, who.pid) == (None, None, None, None):
        return None
    return Culprit(rank=who.rank, node=who.node, host=who.host, pid=who.pid)


def filled(text: str, fact: Fact) -> str:
    """A sentence with the captured values in it."""
    return _VALUE.sub(lambda name: f"{name[1] or ''}{value}" if (value := fact.values.get(name[2])) else "", text)


def ranks_in_words(ranks: Sequence[int]) -> str:
    """`rank 1, 3`, or how many they are and the first of them."""
    first = ", ".join(map(str, ranks[:4]))
    return f"rank {first}" if len(ranks) <= 4 else f"{len(ranks)} ranks ({first}, ...)"
