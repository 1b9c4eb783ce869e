"""Owns what is known of the ranks of an attempt: worked out when somebody looks, not with every event.

A restart of thousands of ranks says something of each of them, and so does the next; a month's status that followed
them one by one would take minutes, and all but the last attempt's are forgotten. So an event only leaves a note of how
it changes what is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum


class RankPhase(StrEnum):
    """What is known of a rank's process."""

    RUNNING = "running"
    EXITED = "exited"
    FAILED = "failed"
    HUNG = "hung"
    STOPPED = "stopped"
    """holdfast itself ended it."""
    LOST = "lost"
    """It was lost with its node."""


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """One rank of a replica's latest attempt."""

    rank: int
    node: int
    pid: int = 0
    """0 where only its node's agent knows."""
    phase: RankPhase = RankPhase.RUNNING
    detail: str = ""
    """How it ended, in words."""
    last_step: int | None = None
    """Where it ended or hung; of a rank that is running, its replica's step says it."""


RankUpdate = Callable[[dict[int, RankStatus]], object]
"""Changes what is known of an attempt's ranks, in place."""


class RankTable(Mapping[int, RankStatus]):
    """An attempt's ranks by number, in order; never changed, only followed by others."""

    def __init__(self, before: RankTable | None = None, change: RankUpdate | None = None) -> None:
        self._previous = before
        self._change = change
        self._known: dict[int, RankStatus] | None = None

    def updated(self, change: RankUpdate) -> RankTable:
        """The ranks when this has happened, too."""
        return RankTable(self, change)

    def _resolve(self) -> dict[int, RankStatus]:
        if self._known is None:
            changes: list[RankUpdate] = []
            seen: RankTable | None = self
            while seen is not None and seen._known is None:
                changes += [seen._change] if seen._change else []
                seen = seen._previous
            known = dict(seen._known) if seen is not None and seen._known is not None else {}
            for change in reversed(changes):
                change(known)
            self._known, self._previous, self._change = dict(sorted(known.items())), None, None
        return self._known

    def __getitem__(self, rank: int) -> RankStatus:
        return self._resolve()[rank]

    def __iter__(self) -> Iterator[int]:
        return iter(self._resolve())

    def __len__(self) -> int:
        return len(self._resolve())
