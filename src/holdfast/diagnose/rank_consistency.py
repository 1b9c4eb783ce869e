"""Checks what ranks log about the world size and their rank, joined over hosts, processes and communicators.

Each line alone is valid; two that contradict each other are not. desync.py finds out who waited for whom.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct

from holdfast.diagnose.fact import MAX_RANKS, Fact


class RankConflict(Struct, frozen=True, kw_only=True):
    """Lines that cannot all be right."""

    message: str
    facts: tuple[Fact, ...]


class MissingRanks(Struct, frozen=True, kw_only=True):
    """Ranks missing from a communicator that most of its ranks entered."""

    ranks: tuple[int, ...]
    world_size: int
    facts: tuple[Fact, ...]


def rank_conflict(facts: Sequence[Fact]) -> RankConflict | None:
    """Two different numbers of ranks or nodes, or two processes with one rank; None where all agree."""
    by_name: dict[str, dict[str, Fact]] = {}
    held: dict[tuple[str, int], dict[tuple[str | None, int | None], Fact]] = {}
    for fact in facts:
        if fact.rule.code == "world-size-logged":
            name, number = fact.values.get("name", "MEMBER"), fact.values.get("said") or fact.values.get("members", "")
            by_name.setdefault(name, {}).setdefault(number, fact)
            if name == "MEMBER" and fact.process.rank is not None:
                held.setdefault((fact.source, fact.process.rank), {}).setdefault((f"line {fact.line}", None), fact)
        elif (comm := _comm(fact)) and fact.process.rank is not None and fact.process.host is not None:
            held.setdefault((comm, fact.process.rank), {}).setdefault((fact.process.host, fact.process.pid), fact)
    for name, numbers in by_name.items():
        if len(numbers) > 1:
            return RankConflict(
                message=f"ranks were given different {name}: {', '.join(numbers)}", facts=tuple(numbers.values())
            )
    for (_, rank), holders in held.items():
        if len(holders) > 1:
            who = " and ".join(f"{host} (pid {pid})" if pid is not None else f"{host}" for host, pid in holders)
            return RankConflict(message=f"two processes are rank {rank}: {who}", facts=tuple(holders.values()))
    return None


def missing_ranks(facts: Iterable[Fact]) -> MissingRanks | None:
    """The missing ranks of a communicator that most ranks began to create and none finished; None without one."""
    begun: dict[str, dict[int, Fact]] = {}
    done: set[str] = set()
    for fact in facts:
        if (comm := _comm(fact)) and fact.process.rank is not None:
            begun.setdefault(comm, {})[fact.process.rank] = fact
            if fact.values["state"] == "COMPLETE":
                done.add(comm)
    for comm, came in begun.items():
        world = int(next(iter(came.values())).values["world"][:9])
        if comm not in done and world <= MAX_RANKS and world / 2 <= len(came) < world:
            missing = tuple(sorted(set(range(world)) - came.keys()))
            return MissingRanks(ranks=missing, world_size=world, facts=tuple(came.values()))
    return None


def missing_lightning_members(facts: Iterable[Fact]) -> MissingRanks | None:
    """The missing ranks where at least half of Lightning's ranks log the start of rendezvous; None if none is missing.

    A log of one node of two looks the same, so this only justifies a question where nothing else was found.
    """
    came = {
        fact.process.rank: fact
        for fact in facts
        if fact.rule.code == "world-size-logged" and fact.values.get("members") and fact.process.rank is not None
    }
    if not came:
        return None
    world = max(int(fact.values["members"]) for fact in came.values())
    if not world / 2 <= len(came) < world <= MAX_RANKS:
        return None
    missing = tuple(sorted(set(range(world)) - came.keys()))
    return MissingRanks(ranks=missing, world_size=world, facts=tuple(came.values()))


def _comm(fact: Fact) -> str:
    return fact.values.get("comm", "") if fact.rule.code == "comm-rank" else ""
