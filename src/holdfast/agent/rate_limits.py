"""Limits what one rank can make its agent read, log and forward; drops beyond a limit are counted and reported."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from enum import StrEnum

from msgspec import Struct, field

from holdfast.findings import Finding, Severity


class RateLimit(Struct, frozen=True, kw_only=True):
    """Burst size, and long-term rate per second."""

    burst: float
    per_s: float


READ_LIMIT = RateLimit(burst=32 * 2**20, per_s=2 * 2**20)
"""Bytes read from one connection; beyond them the agent reads more slowly and a Session drops reports."""
MESSAGE_OVERHEAD_BYTES = 64
"""Added to the size of each message, which bounds their number to 32,768 per second."""
DROPPED_MESSAGE_BYTES = 4096
"""Added for each dropped message, which bounds their number to 512 per second."""
FINDING_LIMIT = RateLimit(burst=64, per_s=1 / 60)
"""Findings of one rank; the rest are dropped. A Session repeats a finding once a minute at most."""
CHECKPOINT_LIMIT = RateLimit(burst=256, per_s=1)
"""Checkpoint reports of one rank; beyond them only the newest is forwarded."""


class RateLimiter:
    """Token bucket; times are monotonic seconds."""

    def __init__(self, limit: RateLimit) -> None:
        self._limit = limit
        self._level = limit.burst
        self._refilled_at = -math.inf

    def try_acquire(self, now: float) -> bool:
        """Take one token if it is available."""
        self._refill(now)
        if self._level < 1:
            return False
        self._level -= 1
        return True

    def charge(self, cost: float, now: float) -> float:
        """Take `cost` tokens in any case; return the seconds to wait before taking more."""
        self._refill(now)
        self._level -= cost
        return max(0.0, -self._level / self._limit.per_s)

    def wait_s(self, cost: float, now: float) -> float:
        """Seconds until `cost` tokens are available."""
        self._refill(now)
        return max(0.0, (cost - self._level) / self._limit.per_s)

    def _refill(self, now: float) -> None:
        self._level = min(self._limit.burst, self._level + (now - self._refilled_at) * self._limit.per_s)
        self._refilled_at = now


class DropReason(StrEnum):
    """Why the agent dropped a rank's message."""

    MALFORMED = "not a message that the agent knows"
    TOO_LONG = "a message longer than the agent reads"
    ANOTHER_RANK = "from a rank that is not of this attempt, or from another one than before on that connection"
    CONNECTIONS = "from a connection too many"
    FINDINGS = "a finding too many"


class DropCounter(Struct):
    """Counts dropped messages on one node; reports each rank and reason at most twice."""

    node: int
    _counts: Counter[tuple[int, DropReason]] = field(default_factory=Counter[tuple[int, DropReason]])

    def count(self, rank: int, reason: DropReason, sample: str) -> Finding | None:
        """Count a dropped message; return the finding if it is the first of its rank and reason."""
        self._counts[rank, reason] += 1
        if self._counts[rank, reason] > 1:
            return None
        return self._finding(rank, f"the agent dropped a message of rank {rank}: {reason}", sample)

    def totals(self) -> Iterator[Finding]:
        """Findings for the end of the attempt, where more than the first was dropped."""
        for (rank, why), count in self._counts.items():
            if count > 1:
                yield self._finding(rank, f"the agent dropped {count:,} messages of rank {rank}: each {why}", "")

    def _finding(self, rank: int, what: str, sample: str) -> Finding:
        return Finding(
            code="rank-messages-dropped",
            severity=Severity.WARNING,
            what=what,
            where=f"rank {rank} on node{self.node}",
            evidence=(sample,) if sample else (),
            remedy="Find what writes to HOLDFAST_RANK_SOCKET in that rank besides a Session, and how often. The rank "
            "continues; its other messages count.",
        )
