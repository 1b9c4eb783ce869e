"""Watches ranks whose program has ended while threads keep the process alive: reports them, and ends them in time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from holdfast.agent.stacks import take
from holdfast.events.orders import StartRanks
from holdfast.events.rank import ProgramOver
from holdfast.findings import Finding, Severity, of_replica

REPORT_S = 10.0
"""Seconds that threads have to end before they are reported: most do, and pools are told to only at this time."""


SHOWN, TEXT = 8, 400
"""Most threads that are named, and characters of each: what a rank sends may be anything."""


class Overtime:
    """The ranks of one attempt on this node whose program has ended."""

    def __init__(
        self,
        order: StartRanks,
        *,
        node: int,
        folder: Path,
        pid_of: Callable[[int], int | None],
        steps_of: Callable[[int], int],
        find: Callable[[Finding], object],
        end: Callable[[int], bool],
    ) -> None:
        """`pid_of` gives a rank's process while it runs, `steps_of` a number that grows with the steps in there.

        `end` ends it and says whether it could.
        """
        self._order, self._node, self._folder = order, node, folder
        self._pid_of, self._steps_of, self._find, self._end = pid_of, steps_of, find, end
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._over: dict[int, ProgramOver] = {}

    def begin(self, over: ProgramOver) -> None:
        """A rank's program has ended and its process has not."""
        if over.rank not in self._tasks and self._pid_of(over.rank) is not None:
            self._over[over.rank] = over
            self._tasks[over.rank] = asyncio.ensure_future(self._watch(over))

    def code(self, ranks: range) -> int | None:
        """The exit code that these ranks' programs ended with; None unless all of them have."""
        if any(rank not in self._over for rank in ranks):
            return None
        return int(any(self._over[rank].failed for rank in ranks))

    def stop(self) -> None:
        for task in self._tasks.values():
            task.cancel()

    async def _watch(self, over: ProgramOver) -> None:
        deadline_s = self._order.exit_deadline_s
        now = asyncio.get_running_loop().time
        end_at = None if deadline_s is None else now() + deadline_s
        steps = self._steps_of(over.rank)
        await asyncio.sleep(REPORT_S if deadline_s is None else min(REPORT_S, deadline_s / 2))
        if (pid := self._pid_of(over.rank)) is None:
            return
        stacks = await take(pid, self._folder / f"stacks-attempt-{self._order.attempt}-rank-{over.rank}.txt")
        evidence = (
            *(f"thread {thread[:TEXT]}" for thread in over.threads[:SHOWN]),
            *([f"stacks: {stacks.path}"] if stacks.path else []),
        )
        when = "never (recovery.exit_deadline_s)"
        if deadline_s is not None:
            when = f"{deadline_s:g} s after its end or its last step"
        self._find(self._finding(over, evidence, f"its process is ended {when}"))
        if end_at is None or deadline_s is None:
            return
        await asyncio.sleep(max(0.0, end_at - now()))
        while (more := self._steps_of(over.rank)) > steps:  # a thread trains on
            steps = more
            await asyncio.sleep(deadline_s)
        if self._pid_of(over.rank) is not None and self._end(over.rank):
            ended = "with an error" if over.failed else "with code 0"
            self._find(
                self._finding(over, evidence, f"it was killed after {deadline_s:g} s and counts as ended {ended}")
            )

    def _finding(self, over: ProgramOver, evidence: tuple[str, ...], follows: str) -> Finding:
        count = len(over.threads)
        rank = f"rank {over.rank}{of_replica(self._order.replica)}"
        how = "ended with an error" if over.failed else "ended"
        threads = "a thread that is not a daemon keeps" if count == 1 else f"{count} threads that are not daemons keep"
        return Finding(
            code="rank-kept-alive",
            severity=Severity.WARNING,
            what=f"the program of {rank} has {how}, and {threads} its process alive; {follows}",
            where=f"{rank} on node{self._node}",
            evidence=evidence,
            remedy="Have the program end the thread, or start it with `daemon=True`; "
            "one that needs more time gets it by `recovery.exit_deadline_s`.",
        )
