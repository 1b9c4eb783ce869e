"""Reports and kills ranks whose program has ended while threads keep the process alive."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from holdfast.agent.stack_dump import dump_stacks, stacks_name
from holdfast.findings import Finding, Severity, replica_suffix
from holdfast.protocol.orders import StartRanks
from holdfast.protocol.rank_messages import ProgramEnded

REPORT_AFTER_S = 10.0
"""Seconds that threads get before they are reported; thread pools, for example, only shut down at exit."""


MAX_THREADS_SHOWN, MAX_THREAD_CHARS = 8, 400
"""Most threads listed, and most characters of each name, which the rank chooses."""


class ExitWatcher:
    """The ranks of one attempt on this node whose program has ended."""

    def __init__(
        self,
        order: StartRanks,
        *,
        node: int,
        folder: Path,
        pid_of: Callable[[int], int | None],
        steps_of: Callable[[int], int],
        report_finding: Callable[[Finding], object],
        kill: Callable[[int], bool],
    ) -> None:
        """`pid_of` returns a rank's pid while it runs, `steps_of` a number that grows with the steps of its process.

        `kill` kills the process and returns whether it could.
        """
        self._order, self._node, self._folder = order, node, folder
        self._pid_of, self._steps_of, self._report_finding, self._kill = pid_of, steps_of, report_finding, kill
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._ended_programs: dict[int, ProgramEnded] = {}

    def on_program_over(self, message: ProgramEnded) -> None:
        """A rank's program has ended and its process has not."""
        if message.rank not in self._tasks and self._pid_of(message.rank) is not None:
            self._ended_programs[message.rank] = message
            self._tasks[message.rank] = asyncio.ensure_future(self._watch(message))

    def exit_code(self, ranks: range) -> int | None:
        """The exit code of these ranks' programs; None unless all have ended."""
        if any(rank not in self._ended_programs for rank in ranks):
            return None
        return int(any(self._ended_programs[rank].failed for rank in ranks))

    def stop(self) -> None:
        for task in self._tasks.values():
            task.cancel()

    async def _watch(self, message: ProgramEnded) -> None:
        deadline_s = self._order.exit_timeout_s
        now = asyncio.get_running_loop().time
        end_at = None if deadline_s is None else now() + deadline_s
        steps = self._steps_of(message.rank)
        await asyncio.sleep(REPORT_AFTER_S if deadline_s is None else min(REPORT_AFTER_S, deadline_s / 2))
        if (pid := self._pid_of(message.rank)) is None:
            return
        stacks = await dump_stacks(
            pid, self._folder / stacks_name(self._order.replica, self._order.attempt, message.rank)
        )
        evidence = (
            *(f"thread {thread[:MAX_THREAD_CHARS]}" for thread in message.threads[:MAX_THREADS_SHOWN]),
            *([f"stacks: {stacks.path}"] if stacks.path else []),
        )
        when = "never (recovery.exit_timeout_s)"
        if deadline_s is not None:
            when = f"{deadline_s:g} s after its end or its last step"
        self._report_finding(self._finding(message, evidence, f"its process is ended {when}"))
        if end_at is None or deadline_s is None:
            return
        await asyncio.sleep(max(0.0, end_at - now()))
        while (more := self._steps_of(message.rank)) > steps:  # a thread is still training
            steps = more
            await asyncio.sleep(deadline_s)
        if self._pid_of(message.rank) is not None and self._kill(message.rank):
            ended = "with an error" if message.failed else "with code 0"
            self._report_finding(
                self._finding(message, evidence, f"it was killed after {deadline_s:g} s and counts as ended {ended}")
            )

    def _finding(self, message: ProgramEnded, evidence: tuple[str, ...], follows: str) -> Finding:
        count = len(message.threads)
        rank = f"rank {message.rank}{replica_suffix(self._order.replica)}"
        how = "ended with an error" if message.failed else "ended"
        threads = "a thread that is not a daemon keeps" if count == 1 else f"{count} threads that are not daemons keep"
        return Finding(
            code="rank-exit-blocked",
            severity=Severity.WARNING,
            what=f"the program of {rank} has {how}, and {threads} its process alive; {follows}",
            where=f"{rank} on node{self._node}",
            evidence=evidence,
            remedy="Have the program end the thread, or start it with `daemon=True`; "
            "one that needs more time gets it by `recovery.exit_timeout_s`.",
        )
