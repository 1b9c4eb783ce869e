"""Keeps flight recorder dumps within the memory budget; when memory is short, only each rank's last call.

flight_recorder.py parses and compares dumps.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from msgspec.structs import replace

from holdfast.diagnose.memory_budget import MemoryBudget
from holdfast.diagnose.structured.flight_recorder import FlightDump, GroupPosition

# Bytes kept besides its own text
_DUMP_BYTES = 1024
_GROUP_BYTES = 512
_CALL_BYTES = 320
_MEMBER_BYTES = 96


class DumpStore:
    """The dumps of an input, as far as memory allows."""

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget
        # So that the first ranks' calls leave memory for the positions of the others
        self._calls_budget = MemoryBudget(budget.left_bytes // 2)
        self.dumps: list[FlightDump] = []
        self.shortened = self.left_out = 0
        self._members: dict[frozenset[int], frozenset[int]] = {}
        self._texts: set[str] = set()

    def add(self, dump: FlightDump) -> None:
        """Keeps a dump: whole, or only the last call of each group, or not at all."""
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
        """Notes on what exceeded the limits."""
        if self.shortened:
            yield f"left out: all calls but the last of {self.shortened:,} flight recorder dumps, for lack of memory"
        if self.left_out:
            yield f"left out: {self.left_out:,} flight recorder dumps, over the limit; diagnose fewer together"

    def _shared(self, ranks: frozenset[int]) -> frozenset[int] | None:
        """The set shared with another dump: each of a job's ranks lists them all; None if memory is short."""
        if ranks not in self._members:
            if not self._budget.reserve(_MEMBER_BYTES * len(ranks)):
                return None
            self._members[ranks] = ranks
        return self._members[ranks]

    def _calls_bytes(self, dump: FlightDump) -> int:
        """The size of the calls, with those of their strings that no earlier dump had."""
        calls = sum(len(position.calls) for position in dump.groups.values())
        return _CALL_BYTES * calls + sum(map(sys.getsizeof, _texts(dump) - self._texts))


def _texts(dump: FlightDump) -> set[str]:
    calls = (call for position in dump.groups.values() for call in position.calls.values())
    return {text for call in calls for text in (call.op, call.sizes, call.where)}


def _last(position: GroupPosition) -> GroupPosition:
    """The dump with only the rank's current call, which the others are compared with."""
    last = position.current
    return replace(position, calls={} if last is None else {last.seq: last})
