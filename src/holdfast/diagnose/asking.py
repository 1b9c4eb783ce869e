"""Owns which facts to ask a person for where what was read does not decide, and how many of them.

Pure. Refuses to own what the facts are and how they are got (rules/deciding.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from holdfast.diagnose.answer import Missing
from holdfast.diagnose.classes import Class
from holdfast.diagnose.fact import Fact
from holdfast.diagnose.rules import RULES
from holdfast.diagnose.wording import deciding

MOST_OPEN = 8
"""Classes that an `unknown` leaves open; facts that would decide between more have not said where to look."""

Asked = tuple[tuple[str, ...], tuple[Class, ...], tuple[Class, ...]]
"""Names of facts, between what they decide, and what the same facts may show beyond that."""

_OF_SET_UP = {"comm-rank", "net-fast", "rdma-meant"}
"""Rules whose lines NCCL writes while it sets a communicator up."""
_AFTER_SET_UP: tuple[Asked, ...] = (
    (("stacks",), (Class.HANG_UNKNOWN, Class.COLLECTIVE_MISMATCH, Class.STRAGGLER), ()),
    (("acs",), (Class.ACS_IOMMU,), ()),
    (("transport",), (Class.GDR_MISSING, Class.TCP_FALLBACK), ()),
    (("interfaces",), (Class.WRONG_INTERFACE,), ()),
    (("all-ranks",), (Class.PROGRAM_ERROR,), ()),
)
"""What to ask where a set-up shows no failure: whether it hangs, is slow, or another rank failed."""
_IN_SET_UP: tuple[Asked, ...] = (
    (("stacks",), (Class.HANG_UNKNOWN, Class.OTHER), ()),
    (("interfaces",), (Class.WRONG_INTERFACE, Class.FIREWALL), ()),
    (("all-ranks",), (Class.RENDEZVOUS, Class.RANK_COUNT), ()),
    (("versions",), (Class.VERSION_MISMATCH, Class.DRIVER), ()),
)
"""What to ask where NCCL has begun and says no more."""


def missing(asked: Iterable[Asked]) -> tuple[Missing, ...]:
    """The facts that would decide, each once: as many as leave no more open than a person can look after."""
    kept: list[Asked] = []
    left: set[Class] = set()
    for each in asked:
        more = left | {klass.label for klass in each[1]}
        if not left or len(more) <= MOST_OPEN:
            left = more
            kept.append(each)
    found: dict[str, Missing] = {}
    for names, classes, beyond_them in kept:
        for klass in beyond_them:
            if len(left | {klass.label}) <= MOST_OPEN:
                left.add(klass.label)
        also = tuple(klass for klass in beyond_them if klass.label in left and klass not in classes)
        for each in deciding(names, (*classes, *also)):
            found.setdefault(each.fact, each)
    return tuple(found.values())


def beyond(code: str) -> tuple[Class, ...]:
    """What a cause may also come of, which only other logs would show."""
    rule = RULES.get(code)
    return rule.beyond if rule else ()


def of_set_up(facts: Sequence[Fact], set_up: bool) -> tuple[Asked, ...]:
    """What would decide where no line tells of a failure; `set_up` is whether NCCL wrote of its set-up."""
    codes = {fact.rule.code for fact in facts}
    if codes & _OF_SET_UP or (set_up and "nccl-begun" not in codes):
        return _AFTER_SET_UP
    if set_up or "nccl-begun" in codes:
        return _IN_SET_UP
    return ((("all-ranks", "nccl-warn", "stacks") if facts else ("output",), (), ()),)
