"""Owns how many flight recorder dumps are held, and how much of each: where room is short, how far each rank was.

Refuses to own what is in a dump, and what several say together (flight.py).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace

from holdfast.diagnose.memory_budget import MemoryBudget
from holdfast.diagnose.structured.flight_recorder import FlightDump, GroupPosition

# What is kept beyond its own text
_DUMP_BYTES = 1024
_GROUP_BYTES = 512
_CALL_BYTES = 320
_MEMBER_BYTES = 96


class DumpStore:
    """The dumps of a pile, as far as there is room."""

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget
        # So that the first ranks' calls leave room for where the others are
        self._calls_budget = MemoryBudget(budget.left_bytes // 2)
        self.dumps: list[FlightDump] = []
        self.shortened = self.left_out = 0
        self._members: dict[frozenset[int], frozenset[int]] = {}
        self._texts: set[str] = set()

    def add(self, dump: FlightDump) -> None:
        """Keep a dump: whole, or the last call of each group alone, or not at all."""
        members = {name: self._shared(ranks) for name, ranks in dump.members.items()}
        if None in members.values():
            self.left_out += 1
            return
        dump = replace(dump, members={name: ranks for name, ranks in members.items() if ranks is not None})
        calls_bytes = self._calls_bytes(dump)
        if not self._calls_budget.reserve(calls_bytes):
            dump = replace(dump, groups={name: _last(position) for name, position in dump.groups.items()})
            calls_bytes = self._calls_bytes(dump)
            self.shortened += 1
        if self._budget.reserve(_DUMP_BYTES + _GROUP_BYTES * (len(dump.groups) + len(dump.members)) + calls_bytes):
            self._texts.update(_texts(dump))
            self.dumps.append(dump)
        else:
            self.left_out += 1

    def notes(self) -> Iterator[str]:
        """What was more than is held."""
        if self.shortened:
            yield f"left out: all calls but the last of {self.shortened:,} flight recorder dumps, for want of room"
        if self.left_out:
            yield f"left out: {self.left_out:,} flight recorder dumps, since no more are held; diagnose fewer at once"

    def _shared(self, ranks: frozenset[int]) -> frozenset[int] | None:
        """The set as another dump has it already: each of a job's ranks lists them all; None where it finds no room."""
        if ranks not in self._members:
            if not self._budget.reserve(_MEMBER_BYTES * len(ranks)):
                return None
            self._members[ranks] = ranks
        return self._members[ranks]

    def _calls_bytes(self, dump: FlightDump) -> int:
        """What the calls take, with those of their words that no dump before had."""
        calls = sum(len(position.calls) for position in dump.groups.values())
        return _CALL_BYTES * calls + sum(map(sys.getsizeof, _texts(dump) - self._texts))


def _texts(dump: FlightDump) -> set[str]:
    calls = (call for position in dump.groups.values() for call in position.calls.values())
    return {text for call in calls for text in (call.op, call.sizes, call.where)}


def _last(position: GroupPosition) -> GroupPosition:
    """With the call alone in which the rank is, which is what others are compared with."""
    last = position.calls.get(position.enqueued)
    return replace(position, calls={} if last is None else {last.seq: last})
