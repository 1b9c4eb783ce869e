"""Reads the steps of ranks without a Session, whose step clock (train/step_clock) writes them to a file.

The agent adds the clock's folder to PYTHONPATH, so that Python imports its sitecustomize before the program. The file
is shared memory: it needs no message, and the rank never waits for its agent. A request for a profile is written there
too.
"""

from __future__ import annotations

import asyncio
import logging
import math
import mmap
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

import holdfast
from holdfast.protocol.rank_messages import ProfileStepsNow, RankStep

log = logging.getLogger("holdfast.agent")

STEP_CLOCK_DIR = Path(holdfast.__file__).parent / "train" / "step_clock"
"""The folder that is added to PYTHONPATH."""

ENTRIES = 4096
"""Steps whose times the file keeps, as in holdfast_step_clock.py."""

REQUEST = 1 + ENTRIES
MAX_REQUEST_BYTES = 4096
FILE_BYTES = 8 * (REQUEST + 1) + MAX_REQUEST_BYTES
"""Where the file has a request, and the file's size, as in holdfast_step_clock.py."""

START_WITHIN_S = 1.0
"""A profile begins after a step whose number is a multiple of a power of two: of as many steps as take at least this.
So the agents of several nodes, which receive the order at different times, nearly always choose the same step."""

LEAD_S = 0.1
"""Least seconds from a request to its first step: a clock of fast steps reads requests every 0.05 s."""

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


class ProfileRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a step clock is requested to profile (holdfast_step_profiler.py)."""

    first: int
    """The first step of the profile."""
    traces: str
    """Start of the paths of its files, as in `ProfileStepsNow`."""
    kept: int
    """Ranks of the replica that keep a trace of these steps."""
    memory: bool


class _RankClock:
    """The file of one rank."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._times = memoryview(memory)[: 8 * (REQUEST + 1)].cast("d")
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

    @property
    def last_step(self) -> int:
        return int(self._times[0])

    def step_s(self) -> float:
        """Mean seconds of the latest steps; 0 before the second."""
        last = self.last_step
        count = min(last - 1, 16)
        return (self._times[1 + last % ENTRIES] - self._times[1 + (last - count) % ENTRIES]) / count if count else 0.0

    def request(self, request: ProfileRequest) -> None:
        """Have the rank profile its steps; a profile that it has not ended takes precedence."""
        text = msgspec.json.encode(request)
        if self._times[REQUEST] or len(text) > MAX_REQUEST_BYTES:
            return
        self._memory[8 * (REQUEST + 1) : 8 * (REQUEST + 1) + len(text)] = text
        self._times[REQUEST] = len(text)


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
            with open(path, "r+b") as file:
                os.unlink(path)
                memory = mmap.mmap(file.fileno(), FILE_BYTES)
        except (OSError, ValueError) as error:
            log.warning("the step clock of rank %s cannot be read: %s", rank, error)
            return False
        self._clocks[rank] = _RankClock(memory)
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._poll())
        return True

    def remove_rank(self, rank: int) -> None:
        """A rank's clock has stopped: read what it has written, once more."""
        self._read(rank)
        self._clocks.pop(rank, None)

    def profile(self, wanted: ProfileStepsNow, *, world_size: int) -> None:
        """Have the chosen ranks that are here profile the same steps, and keep a trace.

        Without chosen ranks these are the first and the last: which one is the slowest is not known.
        """
        chosen = set(wanted.ranks or (0, world_size - 1))
        clocks = [self._clocks[rank] for rank in sorted(chosen) if rank in self._clocks]
        if not clocks or not wanted.traces:
            return
        last = max(clock.last_step for clock in clocks)
        first = first_profiled_step(last, max(clock.step_s() for clock in clocks))
        request = ProfileRequest(first=first, traces=wanted.traces, kept=len(chosen), memory=wanted.memory)
        for clock in clocks:
            clock.request(request)

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


def first_profiled_step(last: int, step_s: float) -> int:
    """The first step of a profile that is requested after the `last` one; no rank has begun it yet."""
    steps = START_WITHIN_S / step_s if step_s > 0 else 1.0
    grid = 2 ** max(0, math.ceil(math.log2(steps)))
    lead = max(1, math.ceil(LEAD_S / step_s)) if step_s > 0 else 1
    return (last + lead + grid) // grid * grid + 1
