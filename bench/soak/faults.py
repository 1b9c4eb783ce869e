"""Faults drawn from a seed, the log of the run that they are injected into, and its end."""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import leak_slopes
from bench.paired_stats import say
from holdfast import api
from holdfast.cli.event_text import event_line
from holdfast.errors import HoldfastError
from holdfast.events import (
    AnyEvent,
    CheckpointCommitted,
    FaultAction,
    FaultRequested,
    FaultTarget,
    RunFinished,
    StepCommitted,
)
from holdfast.events.log import EventReader
from holdfast.run_dir import RunDir

BEAT_S = 0.02
STUCK_S = 180.0
"""No step for this long after the last fault is a failed recovery."""
SHOWN = 25
"""Events that are shown when the run is stuck."""


@dataclass(frozen=True, kw_only=True)
class FaultRow:
    """A kind of fault, its weight, and its duration; without times it is permanent."""

    action: FaultAction
    target: FaultTarget
    weight: int
    for_s: tuple[float, float] | None = None
    amount: tuple[float, float] | None = None
    """The target; the drill itself names it (job/fault_catalog.py)."""
    slow: bool = False
    """Whether its recovery takes tens of seconds by design; `--brisk` leaves it out."""
    netns: bool = False


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One drawn fault, and its delay in seconds after the previous one."""

    after_s: float
    row: FaultRow
    index: int
    for_s: float | None
    amount: float | None

    def __str__(self) -> str:
        which = f" {self.index}" if self.row.target.is_numbered else ""
        lasting = f" for {self.for_s:.1f} s" if self.for_s is not None else ""
        amount = f" by {self.amount:.0f}" if self.amount is not None else ""
        return f"{self.row.action} {self.row.target}{which}{lasting}{amount}"


def draw(seed: int, number: int, rows: Sequence[FaultRow], every_s: float, nodes: int) -> Fault:
    """The fault of that number: the same for the same seed, independent of earlier ones."""
    chance = random.Random(f"{seed}/{number}")
    (row,) = chance.choices(rows, [row.weight for row in rows])
    return Fault(
        after_s=chance.expovariate(1 / every_s),
        row=row,
        index=chance.randrange(nodes) if row.target.is_numbered else 0,
        for_s=chance.uniform(*row.for_s) if row.for_s else None,
        amount=chance.uniform(*row.amount) if row.amount else None,
    )


class RunStuck(Exception):
    """The run makes no progress, or has ended; the message ends with its last log lines."""


class Watch:
    """The part of a run's log that has been read."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.asked: Counter[str] = Counter()
        """Requested faults, by kind."""
        self.moved_at = time.monotonic()
        """When the last step or fault was read."""
        self.finished: RunFinished | None = None
        self._reader = EventReader(run.events)
        self._recent: deque[AnyEvent] = deque(maxlen=SHOWN)
        """The last events except steps and checkpoints."""
        self.read()

    @property
    def faults(self) -> int:
        return self.asked.total()

    def read(self) -> None:
        """Read new events; raise when the run makes no progress."""
        for event in self._reader.read():
            if not isinstance(event, StepCommitted | CheckpointCommitted):
                self._recent.append(event)
            if isinstance(event, StepCommitted | FaultRequested):
                self.moved_at = time.monotonic()
            if isinstance(event, FaultRequested):
                self.asked[f"{event.action} {event.target}"] += 1
            if isinstance(event, RunFinished):
                self.finished = event
            self.take(event)
        if self.finished is None and time.monotonic() - self.moved_at > STUCK_S:
            raise RunStuck(f"no step for {STUCK_S:g} s\n{self.story()}")

    def take(self, event: AnyEvent) -> None:
        """Note what the target's own rules need."""

    def allows(self, fault: Fault) -> bool:
        """Whether a fault may come now: too many without a step in between are a crash loop."""
        raise NotImplementedError

    def story(self) -> str:
        return "\n".join(map(event_line, self._recent))

    def wait(self, ready: Callable[[], bool]) -> None:
        """Read until a condition is met; raise when the run ends before."""
        while not ready():
            if self.finished is not None:
                raise RunStuck(f"the run has ended\n{self.story()}")
            self.read()
            time.sleep(BEAT_S)

    def inject(self, seed: int, faults: int, rows: Sequence[FaultRow], every_s: float, nodes: int) -> Iterator[Fault]:
        """Inject the remaining faults; yields each right before it comes."""
        while self.faults < faults:
            number = self.faults
            fault = draw(seed, number, rows, every_s, nodes)
            due = time.monotonic() + fault.after_s
            self.wait(lambda fault=fault, due=due: time.monotonic() >= due and self.allows(fault))
            yield fault
            say(f"  {number + 1:4d}/{faults}  {fault}")
            self.wait(lambda fault=fault, number=number: self._requested(fault, number))

    def _requested(self, fault: Fault, number: int) -> bool:
        """Whether the fault is in the log, after one more request: no controller may be running at the moment."""
        if self.faults > number:
            return True
        row = fault.row
        with contextlib.suppress(HoldfastError):
            api.inject_fault(
                self.run,
                target=row.target,
                index=fault.index,
                action=row.action,
                for_s=fault.for_s,
                amount=fault.amount,
            )
        self.read()
        return self.faults > number


def find_or_start(state: Path, start: Callable[[], RunDir]) -> RunDir:
    """The run of this state: found, and resumed where no controller runs it, or started."""
    os.environ["HOLDFAST_HOME"] = str(state / "home")
    for run in api.runs():
        api.restart_controller(run)
        say(f"resuming {run.run_id}")
        return run
    return start()


def end(run: RunDir) -> list[str]:
    """End the run, and return any leftovers."""
    with contextlib.suppress(HoldfastError):
        api.cancel(run, force=True)  # it may have ended already
    for _ in api.follow(run):
        pass
    left = [f"process {pid} is left" for pid in leak_slopes.processes_of(run)]
    return [*left, *(f"{folder} is left" for folder in leak_slopes.socket_folders(run))]
