"""Detects a live run without progress: no output, no step, no checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct

from holdfast.events import (
    AnyEvent,
    AttemptStarted,
    CheckpointCommitted,
    RankExited,
    RanksStarted,
    RunFinished,
    StacksDumped,
    StepCommitted,
)
from holdfast.findings import Finding, Severity, replica_suffix
from holdfast.report.formatting import duration
from holdfast.report.rank_logs import RankLog

STATUS_IDLE_S = 300.0
"""Seconds without progress after which `status` reports a stall: few programs print nothing for longer."""

DIAGNOSE_IDLE_S = 30.0
"""The same for `diagnose`."""


class Stall(Struct, frozen=True, kw_only=True):
    """A run whose ranks are running without visible progress."""

    idle_s: float
    ended: tuple[tuple[RankExited, float], ...]
    """Ranks of the latest attempts that ended successfully, and how many seconds ago."""
    running: frozenset[RankLog]

    @property
    def what(self) -> str:
        """`no output for 16 min 02 s; rank 0 on node0 ended 14 min 10 s ago with exit code 0`."""
        shown = "".join(
            f"; rank {exited.rank}{replica_suffix(exited.replica)} on node{exited.node} ended {duration(ago)} ago"
            f" with exit code {exited.code}"
            for exited, ago in self.ended[:3]
        )
        more = f"; {len(self.ended) - 3} more ranks have ended" if len(self.ended) > 3 else ""
        return f"no output for {duration(self.idle_s)}{shown}{more}"

    def finding(self, run: str) -> Finding:
        return Finding(
            code="no-output",
            severity=Severity.INFO,
            what=self.what,
            where=run,
            remedy=f"`holdfast diagnose {run}` takes the stacks of all ranks and says where each waits.",
        )


def find_stall(
    events: Iterable[AnyEvent], *, now: float, written_s: Mapping[RankLog, float], least_s: float
) -> Stall | None:
    """The stall, if the running ranks have shown no progress for `least_s` seconds.

    `now` is on the run's clock; `written_s` is the age in seconds of each rank's last output.
    """
    attempts: dict[int, int] = {}
    running: set[RankLog] = set()
    ended: list[RankExited] = []
    heard_at = 0.0
    for event in events:
        match event:
            case RunFinished():
                return None
            case AttemptStarted():
                attempts[event.replica], heard_at = event.attempt, event.at
                running = {log for log in running if log.replica != event.replica}
                ended = [exited for exited in ended if exited.replica != event.replica]
            case RanksStarted():
                heard_at = event.at
                running |= {
                    RankLog(attempt=event.attempt, replica=event.replica, rank=state.rank) for state in event.ranks
                }
            case RankExited() if event.attempt == attempts.get(event.replica):
                running.discard(RankLog(attempt=event.attempt, replica=event.replica, rank=event.rank))
                if event.failed or event.stopped:
                    return None  # its attempt is about to restart
                ended.append(event)
            case StepCommitted() | CheckpointCommitted():
                heard_at = event.at
            case _:
                pass
    current = [ago for log, ago in written_s.items() if attempts.get(log.replica) == log.attempt]
    silent_s = min([now - heard_at, *current])
    if not running or silent_s < least_s:
        return None
    return Stall(
        idle_s=silent_s, ended=tuple((exited, now - exited.at) for exited in ended), running=frozenset(running)
    )


def format_stacks(taken: Iterable[StacksDumped]) -> str:
    """`rank 1 on node1 is in all_reduce (...)`, for the first few ranks with a stack dump."""
    known = sorted((each for each in taken if each.top_frame), key=lambda each: (each.replica, each.rank))
    shown = (
        f"rank {each.rank}{replica_suffix(each.replica)} on node{each.node} is in {each.top_frame}"
        for each in known[:4]
    )
    return "; ".join((*shown, *([f"{len(known) - 4} more ranks"] if len(known) > 4 else [])))
