"""Status of the ranks of an attempt, computed lazily on access.

A restart emits events for thousands of ranks, and only the last attempt matters; applying each event of a month-long
log immediately would take minutes. So an event only records its update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum

from msgspec import Struct


class RankPhase(StrEnum):
    """State of a rank's process."""

    RUNNING = "running"
    EXITED = "exited"
    FAILED = "failed"
    HUNG = "hung"
    STOPPED = "stopped"
    """Stopped by holdfast."""
    LOST = "lost"
    """Lost with its node."""


class RankStatus(Struct, frozen=True, kw_only=True):
    """One rank of a replica's latest attempt."""

    rank: int
    node: int
    pid: int = 0
    """0 if only its node's agent knows it."""
    phase: RankPhase = RankPhase.RUNNING
    detail: str = ""
    """How it ended, as text."""
    last_step: int | None = None
    """The step at which it ended or hung; for a running rank, see its replica's step."""


RankUpdate = Callable[[dict[int, RankStatus]], object]
"""Updates the ranks of an attempt in place."""


class RankTable(Mapping[int, RankStatus]):
    """The ranks of an attempt by number, in order; immutable."""

    def __init__(self, before: RankTable | None = None, change: RankUpdate | None = None) -> None:
        self._previous = before
        self._change = change
        self._known: dict[int, RankStatus] | None = None

    def updated(self, change: RankUpdate) -> RankTable:
        """A new table with this update applied."""
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
