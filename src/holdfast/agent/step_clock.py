"""Reads the steps of ranks without a Session, whose step clock (train/step_clock) writes them to a file.

The agent adds the clock's folder to PYTHONPATH, so that Python imports its sitecustomize before the program. The file
is shared memory: it needs no message, and the rank never waits for its agent.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import holdfast
from holdfast.protocol.rank_messages import RankStep

log = logging.getLogger("holdfast.agent")

STEP_CLOCK_DIR = Path(holdfast.__file__).parent / "train" / "step_clock"
"""The folder that is added to PYTHONPATH."""

ENTRIES = 4096
"""Steps whose times the file keeps, as in holdfast_step_clock.py."""

POLL_S = 0.1
"""Seconds between two readings, each of which takes some microseconds per rank."""

MAX_STEPS_PER_POLL = 32
"""Most steps that are reported per rank and poll; of more, only those whose number a power of two divides."""


def with_step_clock(environ: Mapping[str, str]) -> dict[str, str]:
    """A rank's environment with the step clock, unless the job switches it off."""
    if environ.get("HOLDFAST_STEP_CLOCK") == "0":
        return dict(environ)
    others = environ.get("PYTHONPATH")
    path = f"{STEP_CLOCK_DIR}{os.pathsep}{others}" if others else str(STEP_CLOCK_DIR)
    return {**environ, "PYTHONPATH": path}


def step_clock_file(socket: Path, rank: int) -> str:
    """Where a rank's step clock writes, as in holdfast_step_clock.py."""
    return f"{socket}-steps-{rank}"


class _RankClock:
    """The file of one rank."""

    def __init__(self, times: memoryview[float]) -> None:
        self._times = times
        self._step = 0
        self._ended = 0.0
        """Monotonic seconds at which that step ended."""

    def new_steps(self) -> list[tuple[int, float, float]]:
        """Number, start and end of the steps since the last call, in monotonic seconds; the first has no duration."""
        last = int(self._times[0])
        every = 1
        while (last - self._step) // every > MAX_STEPS_PER_POLL:
            every *= 2
        steps: list[tuple[int, float, float]] = []
        first = max(self._step + 1, last - ENTRIES // 2)
        for number in range(first + -first % every, last + 1, every):
            ended = float(self._times[1 + number % ENTRIES])
            if ended < self._ended:  # the rank writes the time before the number, but a CPU may swap them
                break
            steps.append((number, self._ended or ended, ended))
            self._step, self._ended = number, ended
        return steps


class StepClockReader:
    """Polls the clocks of the ranks of one attempt on this node."""

    def __init__(self, on_step: Callable[[int, RankStep, float], object]) -> None:
        """`on_step` receives the rank, its step in monotonic seconds, and when it ended."""
        self._on_step = on_step
        self._clocks: dict[int, _RankClock] = {}
        self._task: asyncio.Task[None] | None = None

    def add_rank(self, rank: int, socket: Path) -> bool:
        """A rank's clock has said hello over this socket: map its file and remove it; whether there is one."""
        path = step_clock_file(socket, rank)
        try:
            with open(path, "rb") as file:
                os.unlink(path)
                memory = mmap.mmap(file.fileno(), 8 * (1 + ENTRIES), prot=mmap.PROT_READ)
        except (OSError, ValueError) as error:
            log.warning("the step clock of rank %s cannot be read: %s", rank, error)
            return False
        self._clocks[rank] = _RankClock(memoryview(memory).cast("d"))
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._poll())
        return True

    def remove_rank(self, rank: int) -> None:
        """A rank's clock has stopped: read what it has written, once more."""
        self._read(rank)
        self._clocks.pop(rank, None)

    def stop(self) -> None:
        """The attempt is over."""
        self._clocks.clear()
        if self._task is not None:
            self._task.cancel()

    async def _poll(self) -> None:
        while self._clocks:
            for rank in tuple(self._clocks):
                self._read(rank)
            await asyncio.sleep(POLL_S)

    def _read(self, rank: int) -> None:
        if (clock := self._clocks.get(rank)) is not None:
            for number, started, ended in clock.new_steps():
                self._on_step(rank, RankStep(step=number, started=started, ended=ended), ended)
