"""Soak of replicas that train through TorchFT, on this machine.

Only the fourth fault of one replica without a committed step in between is delayed. At the end every replica's weights
must be bit-exact, every step committed, and none twice except those since the last checkpoint where all replicas were
lost together.
"""

from __future__ import annotations

import argparse
import sys
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from tests.runs.forked_starts import FORKABLE

from bench.paired_stats import percentile, say, table
from bench.soak.faults import Fault, FaultRow, RunStuck, Watch, end, find_or_start
from bench.soak.ledger import SoakOutcome
from holdfast import api
from holdfast.events import (
    AnyEvent,
    AttemptStarted,
    FaultAction,
    FaultInjected,
    FaultRequested,
    FaultTarget,
    Outcome,
    RecoveryDecided,
    StepCommitted,
)
from holdfast.report.formatting import percentage
from holdfast.run_dir import RunDir

PROGRAM = Path(__file__).parents[2] / "tests" / "programs" / "replica_trainer.py"
EVERY_S = 4.0
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


class ReplicaWatch(Watch):
    """Allows three faults of each replica without a committed step of it."""

    def __init__(self, run: RunDir) -> None:
        self.unstepped: Counter[int] = Counter()
        """Faults of each replica since its last committed step, including one that waits for its rank to be running."""
        self._due: dict[float, int] = {}
        """The replica of each requested fault that has not come yet, by request time."""
        self._injected_at: dict[int, float] = {}
        """When the latest came."""
        self._attempts: dict[int, int] = {}
        self._furthest: dict[int, int] = {}
        """The last step of each replica: one that it takes again is no progress, as for the run's own judgement."""
        self.recoveries = 0
        super().__init__(run)

    def take(self, event: AnyEvent) -> None:
        match event:
            case StepCommitted(replica=replica):
                after = event.ended > self._injected_at.get(replica, 0.0) + EFFECT_S
                after &= event.step > self._furthest.get(replica, 0)
                self._furthest[replica] = max(event.step, self._furthest.get(replica, 0))
                if after and event.attempt == self._attempts.get(replica):
                    self.unstepped[replica] = list(self._due.values()).count(replica)
            case FaultRequested() if event.target.is_numbered:
                self.unstepped[event.index] += 1
                self._due[event.at] = event.index
            case FaultInjected():
                if (replica := self._due.pop(event.requested_at, None)) is not None:
                    self._injected_at[replica] = event.at
            case AttemptStarted():
                self._attempts[event.replica] = event.attempt
            case RecoveryDecided():
                self.recoveries += 1
            case _:
                pass

    def allows(self, fault: Fault) -> bool:
        return not fault.row.target.is_numbered or self.unstepped[fault.index] < MOST_UNSTEPPED

    @property
    def settled(self) -> bool:
        """Whether every replica has committed a step after all its faults."""
        return not any(self.unstepped.values())


def soak(options: argparse.Namespace, state: Path) -> SoakOutcome:
    """Soak, and print the outcome."""
    replicas: int = options.replicas
    run = find_or_start(state, lambda: _start(state, replicas, FORKABLE if options.forked else ()))
    stuck = ""
    try:
        watch = ReplicaWatch(run)
        watch.wait(lambda: watch.settled)
        for _ in watch.inject(options.seed, options.faults, ROWS, options.every_s or EVERY_S, replicas):
            pass
        watch.wait(lambda: watch.settled)
        (state / "enough").touch()
        watch.wait(lambda: watch.finished is not None and watch.finished.outcome is Outcome.SUCCEEDED)
    except RunStuck as error:
        stuck = str(error)
    return _tell(run, state, replicas, stuck, end(run))


def _start(state: Path, replicas: int, settings: Sequence[str]) -> RunDir:
    overrides = (
        *settings,
        f"recovery={{replicas: {replicas}, max_restarts: 1000000, step_timeout_s: auto}}",
        "checkpoint.every_steps=20",
        f"nodes={replicas}",
        "name=soak",
    )
    command = (sys.executable, str(PROGRAM), f"{STEP_S}", str(state))
    return api.start(api.load_job(None, command=command, overrides=overrides), "local", base=state)


def _tell(run: RunDir, state: Path, replicas: int, stuck: str, problems: list[str]) -> SoakOutcome:
    watch, account = ReplicaWatch(run), api.summary(run).account
    lives = {path.name: _commits(path) for path in sorted(state.glob("*.commits"))}
    committed, again, gaps = _counted(lives)
    problems += _unequal(state, replicas)
    problems += _backwards(lives)
    if missing := set(range(1, max(committed, default=0) + 1)) - committed.keys():
        problems.append(f"{len(missing)} steps were lost, from {min(missing)}")
    kinds = ", ".join(f"{count} {kind}" for kind, count in watch.asked.most_common())
    say("")
    say(f"{watch.faults} faults in {account.total_s / 60:.1f} min ({kinds})")
    say(f"recoveries {watch.recoveries}, failed recoveries {int(bool(stuck))}")
    ettr = percentage(account.ettr) if account.ettr is not None else "-"
    spread = (f"{percentile(gaps, each):.3f} s" for each in (50, 99, 100)) if gaps else ("-", "-", "-")
    head = ("steps committed", "recomputed", "gap p50", "p99", "longest", "ETTR", "replicas equal")
    equal = "no" if problems else "bit-exact"
    say(table(head, [(str(len(committed)), str(again), *spread, ettr, equal)]))
    for problem in (*filter(None, [stuck]), *problems):
        say(f"\nFAILED: {problem}")
    return SoakOutcome(
        faults=dict(watch.asked),
        recoveries=watch.recoveries,
        failed=int(bool(stuck)),
        wrong=len(problems),
        steps=len(committed),
        minutes=round(account.total_s / 60, 1),
    )


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
