"""Joins the watchdog lines and stacks of many ranks: who waited, in which collective, and who never came.

A watchdog's line names a rank that waited, never the faulty one. The faulty rank has a lower last enqueued collective,
or has completed the one it enqueued last, or waits elsewhere in its program, or logs nothing at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct

from holdfast.diagnose.fact import MAX_RANKS, Fact
from holdfast.diagnose.rules.hang_records import STACK
from holdfast.diagnose.rules.rule import Role

_TIMEOUT_RULES = {"watchdog-timeout", "gloo-timeout"}
"""Rules whose lines come from a rank that waited until its timeout."""
_POINT_TO_POINT = {"send", "recv", "isend", "irecv", "batch_isend_irecv"}
"""Calls between two ranks: those that wait in them are at different lines in a correct program too."""


class CollectivePosition(Struct, frozen=True, kw_only=True):
    """A rank's position in the collectives of one group."""

    rank: int
    enqueued: int
    completed: int
    fact: Fact

    @property
    def is_waiting(self) -> bool:
        return self.enqueued > self.completed


class Desync(Struct, frozen=True, kw_only=True):
    """What the ranks' watchdogs show together; empty tuples where they do not show it."""

    waiting: tuple[int, ...]
    lagging: tuple[CollectivePosition, ...]
    """Ranks that had not entered the collective in which others waited."""
    outside_collective: tuple[Fact, ...]
    """Stacks of ranks outside any collective while others waited in one."""
    inside_collective: tuple[Fact, ...]
    """Stacks of ranks that waited."""
    mismatched: tuple[Fact, ...]
    """Lines of ranks that waited in different collectives with the same sequence number."""
    waiting_apart: tuple[Fact, ...]
    """Stacks of one rank that waited where no other did, and of one other rank; empty where some did not wait."""
    silent: tuple[int, ...]
    """Ranks that logged neither waiting nor an error, where most others did."""
    facts: tuple[Fact, ...]


def find_desync(facts: Iterable[Fact], ranks_with_logs: frozenset[int], world_size: int | None) -> Desync | None:
    """Joins the watchdogs' matches and the stacks over ranks; None without a watchdog line or a waiting stack."""
    facts = list(facts)
    wait_facts = [fact for fact in facts if _reports_wait(fact)]
    stacks = {fact.process.rank: fact for fact in facts if fact.rule is STACK and "stack_location" in fact.values}
    inside = [fact for fact in stacks.values() if "op" in fact.values]
    if not wait_facts and not inside:
        return None
    timeouts = [fact for fact in wait_facts if fact.rule.code in _TIMEOUT_RULES]
    failed = {fact.process.rank for fact in facts if _reports_own_failure(fact)}
    positions = _positions(wait_facts)
    furthest = max((position.enqueued for position in positions if position.is_waiting), default=None)
    behind = tuple(position for position in positions if furthest is not None and position.enqueued < furthest)
    waiting = {fact.process.rank for fact in (*timeouts, *inside)} | {
        position.rank for position in positions if position.is_waiting
    }
    waiting = {rank for rank in waiting if rank is not None} - {position.rank for position in behind}
    elsewhere = {rank: fact for rank, fact in stacks.items() if rank is not None and rank not in waiting | failed}
    known = ranks_with_logs or frozenset(range(min(world_size or 0, MAX_RANKS) if len(waiting) > 1 else 0))
    silent = known - waiting - failed - elsewhere.keys() - {position.rank for position in behind}
    return Desync(
        waiting=tuple(sorted(waiting)),
        lagging=behind,
        outside_collective=tuple(fact for _, fact in sorted(elsewhere.items())) if waiting else (),
        inside_collective=tuple(inside),
        mismatched=_mismatched(timeouts),
        waiting_apart=() if elsewhere or silent else _waiting_apart(inside),
        silent=tuple(sorted(silent)) if len(silent) <= len(waiting) else (),
        facts=tuple(wait_facts),
    )


def _reports_wait(fact: Fact) -> bool:
    return fact.rule.code in _TIMEOUT_RULES or fact.rule.code == "collective-status"


def _reports_own_failure(fact: Fact) -> bool:
    """Whether a line reports its rank's failure, not only that it waited."""
    of_run = fact.rule.code.startswith("run-")
    return fact.rule.role is Role.CAUSE and not of_run and not _reports_wait(fact)


def _positions(facts: Sequence[Fact]) -> list[CollectivePosition]:
    """The last position of each rank in the group that most of them name."""
    groups: dict[str, dict[int, CollectivePosition]] = {}
    for fact in facts:
        if fact.rule.code != "collective-status" or fact.process.rank is None:
            continue
        position = CollectivePosition(
            rank=fact.process.rank,
            enqueued=int(fact.values["enqueued"]),
            completed=int(fact.values["completed"]),
            fact=fact,
        )
        groups.setdefault(fact.values.get("group", ""), {})[position.rank] = position
    largest = max(groups.values(), key=len, default=dict[int, CollectivePosition]())
    return sorted(largest.values(), key=lambda position: (position.enqueued, position.rank))


def _waiting_apart(inside: Sequence[Fact]) -> tuple[Fact, ...]:
    """The stack of the only rank that waits at its line, and of one of the others, which all wait at another."""
    places: dict[str, list[Fact]] = {}
    for fact in inside:
        places.setdefault(fact.values["stack_location"], []).append(fact)
    if len(places) != 2 or any(fact.values["op"] in _POINT_TO_POINT for fact in inside):
        return ()
    fewer, more = sorted(places.values(), key=len)
    return (fewer[0], more[0]) if len(fewer) == 1 else ()


def _mismatched(timeouts: Sequence[Fact]) -> tuple[Fact, ...]:
    """Lines of one sequence number that name different operations or sizes; the same group is assumed for two ranks."""
    by_number: dict[str, dict[tuple[str | None, ...], Fact]] = {}
    for fact in timeouts:
        if "seq" in fact.values and fact.process.rank is not None:
            call = fact.values.get("op"), fact.values.get("numel_in"), fact.values.get("numel_out")
            by_number.setdefault(fact.values["seq"], {}).setdefault(call, fact)
    for calls in by_number.values():
        if len({fact.process.rank for fact in calls.values()}) > 1 and len({call[0] for call in calls}) > 1:
            return tuple(calls.values())
    return ()
