"""Soak with replicas: one real run that trains through TorchFT, with random faults; then the outcome of its steps.

.venv/bin/python -m bench.soak_replicas [--faults N] [--seed N] [--every-s MEAN] [--replicas N] [--state FOLDER]

Faults come as in bench.soak, at exponentially distributed times, in any state of the run: also while a replica catches
up, two together, or all. Only the fourth fault of one replica without a committed step in between is delayed: equal
failures without progress are a crash loop. With `--state` it can be interrupted: the same command resumes it. At the
end every replica's weights must be bit-exact, every step committed, and none twice except those since the last
checkpoint where all replicas were lost together.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from bench import leak_slopes
from bench.paired_stats import headline, percentile, say, table
from bench.soak import BEAT_S, SHOWN, STUCK_S, Fault, FaultRow, RunStuck, draw
from holdfast import api
from holdfast.cli.event_text import event_line
from holdfast.errors import HoldfastError
from holdfast.events import (
    AnyEvent,
    AttemptStarted,
    FaultAction,
    FaultInjected,
    FaultRequested,
    FaultTarget,
    Outcome,
    RecoveryDecided,
    RunFinished,
    StepCommitted,
)
from holdfast.events.log import EventReader
from holdfast.report.formatting import percentage
from holdfast.run_dir import RunDir

PROGRAM = Path(__file__).parents[1] / "tests" / "programs" / "replica_trainer.py"
FAULTS, EVERY_S = 500, 4.0
STEP_S = 0.05
EFFECT_S = 0.5
"""A fault is logged before it takes effect: a step that ends this soon after may have finished without it."""
MOST_UNSTEPPED = 3
"""Faults of one replica without a committed step of it in between."""

_KILL, _STOP = FaultAction.KILL, FaultAction.STOP
ROWS = (
    FaultRow(action=_KILL, target=FaultTarget.RANK, weight=50),
    FaultRow(action=_KILL, target=FaultTarget.NODE, weight=14),
    FaultRow(action=_KILL, target=FaultTarget.AGENT, weight=10),
    FaultRow(action=_KILL, target=FaultTarget.CONTROLLER, weight=10),
    FaultRow(action=_KILL, target=FaultTarget.LIGHTHOUSE, weight=10),
    FaultRow(action=_STOP, target=FaultTarget.RANK, weight=3),
    FaultRow(action=_STOP, target=FaultTarget.RANK, weight=3, for_s=(0.1, 4.0)),
)


@dataclass
class Watch:
    """The part of a run's log that has been read."""

    run: RunDir
    asked: Counter[str] = field(default_factory=Counter[str])
    unstepped: Counter[int] = field(default_factory=Counter[int])
    """Faults of each replica since its last committed step, including one that waits for its rank to be running."""
    due: dict[float, int] = field(default_factory=dict[float, int])
    """The replica of each requested fault that has not come yet, by request time."""
    befell: dict[int, float] = field(default_factory=dict[int, float])
    """When the latest came."""
    attempts: dict[int, int] = field(default_factory=dict[int, int])
    recoveries: int = 0
    events: list[AnyEvent] = field(default_factory=list[AnyEvent])
    """All except steps."""
    finished: RunFinished | None = None

    def __post_init__(self) -> None:
        self._reader = EventReader(self.run.events)
        self._moved_at = time.monotonic()
        self.read()

    @property
    def faults(self) -> int:
        return self.asked.total()

    def read(self) -> None:
        """Read new events; raise when the run makes no progress."""
        for event in self._reader.read():
            self._take(event)
        if self.finished is None and time.monotonic() - self._moved_at > STUCK_S:
            raise RunStuck(f"no step for {STUCK_S:g} s\n{self.story()}")

    def _take(self, event: AnyEvent) -> None:
        match event:
            case StepCommitted():
                self._moved_at = time.monotonic()
                after = event.ended > self.befell.get(event.replica, 0.0) + EFFECT_S
                if after and event.attempt == self.attempts.get(event.replica):
                    self.unstepped[event.replica] = list(self.due.values()).count(event.replica)
                return
            case FaultRequested():
                self._moved_at = time.monotonic()
                self.asked[f"{event.action} {event.target}"] += 1
                if event.target.is_numbered:
                    self.unstepped[event.index] += 1
                    self.due[event.at] = event.index
            case FaultInjected():
                if (replica := self.due.pop(event.requested_at, None)) is not None:
                    self.befell[replica] = event.at
            case AttemptStarted():
                self.attempts[event.replica] = event.attempt
            case RecoveryDecided():
                self.recoveries += 1
            case RunFinished():
                self.finished = event
            case _:
                pass
        self.events.append(event)

    def story(self) -> str:
        return "\n".join(map(event_line, self.events[-SHOWN:]))

    def wait(self, until: float, fault: Fault) -> None:
        """Wait until a moment (monotonic seconds), and longer while the replica of a fault has had too many."""
        numbered = fault.row.target.is_numbered
        while time.monotonic() < until or (numbered and self.unstepped[fault.index] >= MOST_UNSTEPPED):
            self._beat()

    def settle(self, replicas: int) -> None:
        """Wait until every replica has committed a step after all its faults."""
        while any(self.unstepped[replica] for replica in range(replicas)):
            self._beat()

    def end(self) -> None:
        while self.finished is None:
            self._beat()

    def _beat(self) -> None:
        self.read()
        if self.finished is not None and self.finished.outcome is not Outcome.SUCCEEDED:
            raise RunStuck(f"the run has ended\n{self.story()}")
        time.sleep(BEAT_S)


def main() -> int:
    """Soak, print the outcome, and return nonzero unless all went well."""
    parser = argparse.ArgumentParser(prog="bench.soak_replicas", description=__doc__)
    parser.add_argument("--faults", type=int, default=FAULTS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every-s", type=float, default=EVERY_S, help="mean seconds between faults")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--state", type=Path, help="directory for all state, to resume from")
    options = parser.parse_args()
    headline(f"soak: {options.faults} random faults, seed {options.seed}, {options.replicas} replicas of one rank")
    with contextlib.ExitStack() as stack:
        state = options.state or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="soak-")))
        state = state.absolute()
        state.mkdir(parents=True, exist_ok=True)
        os.environ["HOLDFAST_HOME"] = str(state / "home")
        run = _run(state, options.replicas)
        problems: list[str] = []
        try:
            watch = Watch(run)
            _give_all(watch, options.faults, options.seed, options.every_s, options.replicas)
            (state / "enough").touch()
            watch.end()
        except RunStuck as error:
            problems.append(str(error))
        with contextlib.suppress(HoldfastError):
            api.cancel(run, force=True)  # it may have ended already
        for _ in api.follow(run):
            pass
        problems += [f"process {pid} is left" for pid in leak_slopes.processes_of(run)]
        return _tell(run, state, options.replicas, problems)


def _run(state: Path, replicas: int) -> RunDir:
    """The run of this state: found, and resumed where no controller runs it, or started."""
    for run in api.runs():
        api.restart_controller(run)
        say(f"resuming {run.run_id}")
        return run
    overrides = (
        f"recovery={{replicas: {replicas}, max_restarts: 1000000, step_timeout_s: auto}}",
        "checkpoint.every_steps=20",
        f"nodes={replicas}",
        "name=soak",
    )
    command = (sys.executable, str(PROGRAM), f"{STEP_S}", str(state))
    return api.start(api.load_job(None, command=command, overrides=overrides), "local", base=state)


def _give_all(watch: Watch, faults: int, seed: int, every_s: float, replicas: int) -> None:
    watch.settle(replicas)
    while watch.faults < faults:
        fault = draw(seed, watch.faults, ROWS, every_s, replicas)
        watch.wait(time.monotonic() + fault.after_s, fault)
        say(f"  {watch.faults + 1:4d}/{faults}  {fault}")
        before = watch.faults
        while watch.faults == before:  # no controller may be running at the moment
            with contextlib.suppress(HoldfastError):
                row = fault.row
                api.inject_fault(watch.run, target=row.target, index=fault.index, action=row.action, for_s=fault.for_s)
            watch.read()
            time.sleep(BEAT_S)
    watch.settle(replicas)


def _tell(run: RunDir, state: Path, replicas: int, problems: list[str]) -> int:
    watch, account = Watch(run), api.summary(run).account
    lives = {path.name: _commits(path) for path in sorted(state.glob("*.commits"))}
    committed, again, gaps = _counted(lives)
    problems += _unequal(state, replicas)
    problems += _backwards(lives)
    if missing := set(range(1, max(committed, default=0) + 1)) - committed.keys():
        problems.append(f"{len(missing)} steps were lost, from {min(missing)}")
    kinds = ", ".join(f"{count} {kind}" for kind, count in watch.asked.most_common())
    say("")
    say(f"{watch.faults} faults in {account.total_s / 60:.1f} min ({kinds})")
    say(f"recoveries {watch.recoveries}, failed recoveries {len(problems)}")
    ettr = percentage(account.ettr) if account.ettr is not None else "-"
    spread = (f"{percentile(gaps, each):.3f} s" for each in (50, 99, 100)) if gaps else ("-", "-", "-")
    head = ("steps committed", "recomputed", "gap p50", "p99", "longest", "ETTR", "replicas equal")
    equal = "no" if problems else "bit-exact"
    say(table(head, [(str(len(committed)), str(again), *spread, ettr, equal)]))
    for problem in problems:
        say(f"\nFAILED: {problem}")
    return 1 if problems else 0


def _commits(path: Path) -> list[tuple[int, float]]:
    """The steps that an attempt committed, and when; an incomplete last line does not count."""
    lines = (told.split() for told in path.read_text().split("\n")[:-1])
    return [(int(step), float(at)) for step, at, *_ in lines]


def _counted(lives: Mapping[str, list[tuple[int, float]]]) -> tuple[dict[int, float], int, list[float]]:
    """When each step was first committed, how many a replica recomputed, and seconds between two of them."""
    first: dict[int, float] = {}
    times: defaultdict[tuple[str, int], int] = defaultdict(int)
    for name, steps in lives.items():
        for step, at in steps:
            first[step] = min(at, first.get(step, at))
            times[name.partition(".")[0], step] += 1
    gaps = [later - earlier for earlier, later in pairwise(sorted(first.values()))]
    return first, sum(count - 1 for count in times.values()), gaps


def _backwards(lives: Mapping[str, list[tuple[int, float]]]) -> Iterator[str]:
    """Where an attempt repeated a step; it may skip a step that another replica alone had committed."""
    for name, steps in lives.items():
        for (earlier, _), (later, _) in pairwise(steps):
            if later <= earlier:
                yield f"{name}: step {later} follows step {earlier}"


def _unequal(state: Path, replicas: int) -> list[str]:
    """Where the replicas' last states differ, or are missing."""
    ends = [state / f"{replica}.end" for replica in range(replicas)]
    if missing := [end.name for end in ends if not end.exists()]:
        return [f"{', '.join(missing)} is missing"]
    import torch

    found = [torch.load(end) for end in ends]
    digests = {
        (step, zlib.crc32(b"".join(each.numpy().tobytes() for each in weights.values()))) for step, weights in found
    }
    return [] if len(digests) == 1 else [f"the replicas differ at the end: {sorted(digests)}"]


if __name__ == "__main__":
    sys.exit(main())
