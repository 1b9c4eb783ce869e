"""How soon a replica that hangs is expelled, and how often one that does not; `step_deadline_s: auto`, two replicas.

.venv/bin/python -m bench.expulsion [--quick | --rounds N] [--seed N] [--step-s S]
.venv/bin/python -m bench.expulsion --alarms-for 3600 [--load N]

In each round one rank is stopped by a signal at a moment that is drawn, or goes to sleep in its own code, or enters an
all-reduce that nobody else does. A figure is the time from its last committed step until its process is gone, less
three times the 99th percentile of its own steps until then. With `--alarms-for` nothing is done to any replica for so
many seconds, while other processes keep the cores busy; each one that is expelled is a false alarm.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Generator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from bench.pairs import headline, percentile, say, table
from holdfast import api
from holdfast.events import (
    AnyEvent,
    AttemptStarted,
    DrillAction,
    DrillTarget,
    RankExited,
    RankHung,
    RanksStarted,
    RecoveryDecided,
)
from holdfast.events.log import EventReader
from holdfast.folder import RunFolder
from holdfast.job.patience import AUTO_FACTOR, EARLY_STEPS

PROGRAM = Path(__file__).parents[1] / "tests" / "programs" / "holder.py"
REPLICAS = 2
GOAL_S = 1.0
ROUNDS, QUICK_ROUNDS = 12, 3
LIVES_S = 65.0
"""An attempt that lives so long does not flap (control/policy.py)."""
PATIENCE_S = 240.0
SAY_S = 300.0

STOPPED, ASLEEP, ALONE = "stopped by a signal", "asleep in its own code", "in an all-reduce of its own"
KINDS = (STOPPED, ASLEEP, ALONE)


@dataclass
class Training:
    """A run, and what its log has said so far."""

    run: RunFolder
    out: Path

    def __post_init__(self) -> None:
        self._reader = EventReader(self.run.events)
        self._events: list[AnyEvent] = []

    def events(self) -> list[AnyEvent]:
        """All so far."""
        self._events.extend(self._reader.read())
        return self._events

    def attempt(self, replica: int) -> tuple[int, float]:
        """The number of a replica's latest attempt, and when it was started."""
        started = [each for each in self.events() if isinstance(each, AttemptStarted) and each.replica == replica]
        return (started[-1].attempt, started[-1].at) if started else (-1, time.time())

    def commits(self, replica: int, attempt: int | None = None) -> list[float]:
        """When each step of a replica's attempt was committed, the latest if none is named."""
        number = self.attempt(replica)[0] if attempt is None else attempt
        note = self.out / f"{replica}.{number}.commits"
        lines = note.read_text().split("\n")[:-1] if note.exists() else []
        return [float(line.split()[1]) for line in lines]

    def until(self, ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not ready():
            if time.monotonic() > deadline:
                raise TimeoutError(f"not within {PATIENCE_S:g} s")
            time.sleep(0.02)


def main() -> int:
    """Measure, print the table, and say by the exit code whether the goal was met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--step-s", type=float, default=0.1)
    parser.add_argument("--alarms-for", type=float, metavar="SECONDS")
    parser.add_argument("--load", type=int, default=os.cpu_count(), help="processes that do nothing but compute")
    given = parser.parse_args()
    if given.alarms_for:
        headline(f"False alarms of two replicas in {given.alarms_for:g} s, beside {given.load} busy loops")
        with _training(given.step_s) as training, _load(given.load):
            return _alarms(training, given.alarms_for)
    headline(
        f"A replica that hangs: from its last step until it is expelled, beyond {AUTO_FACTOR:g} x p99 of its steps"
    )
    with _training(given.step_s) as training:
        return _rounds(training, given.rounds or (QUICK_ROUNDS if given.quick else ROUNDS), random.Random(given.seed))


def _rounds(training: Training, rounds: int, chance: random.Random) -> int:
    beyond: defaultdict[str, list[float]] = defaultdict(list)
    for number in range(rounds):
        kind, victim = KINDS[number % len(KINDS)], number % REPLICAS
        training.until(lambda victim=victim: time.time() - training.attempt(victim)[1] > LIVES_S)
        training.until(lambda: all(len(training.commits(each)) > 2 * EARLY_STEPS for each in range(REPLICAS)))
        time.sleep(chance.uniform(0.0, 2.0))
        expelled_s, p99_s = _expelled(training, victim, kind)
        beyond[kind].append(expelled_s - AUTO_FACTOR * p99_s)
        say(f"{number + 1:3d}/{rounds}  {kind}: expelled after {expelled_s:.3f} s, p99 of its steps {p99_s:.3f} s")
    rows = [
        (kind, str(len(each)), f"{statistics.median(each):.3f} s", f"{max(each):.3f} s")
        for kind, each in beyond.items()
    ]
    say("\n" + table(("a rank is", "rounds", "beyond 3 x p99, median", "longest"), rows))
    hung = [each for each in training.events() if isinstance(each, RecoveryDecided)]
    wrong = len(hung) - rounds
    met = max(max(each) for each in beyond.values()) <= GOAL_S and wrong == 0
    say(f"\ngoal: {GOAL_S:g} s, met: {'yes' if met else 'no'}; replicas expelled that did not hang: {wrong}")
    return 0 if met else 1


def _expelled(training: Training, victim: int, kind: str) -> tuple[float, float]:
    """Have a replica hang; seconds from its last step until it was ended, and the 99th percentile of its steps."""
    attempt, _ = training.attempt(victim)
    if kind is STOPPED:
        started = [each for each in training.events() if isinstance(each, RanksStarted) and each.replica == victim]
        os.kill(started[-1].ranks[0].pid, signal.SIGSTOP)
    else:
        target = DrillTarget.RANK if kind is ASLEEP else DrillTarget.COLLECTIVE
        api.drill(training.run, target=target, index=victim, action=DrillAction.HANG)

    def ends() -> list[RankExited]:
        exits = (each for each in training.events() if isinstance(each, RankExited))
        return [each for each in exits if (each.replica, each.attempt) == (victim, attempt)]

    training.until(lambda: bool(ends()))
    commits = training.commits(victim, attempt)
    steps_s = [later - earlier for earlier, later in pairwise(commits)]
    return ends()[0].at - commits[-1], percentile(steps_s, 99)


def _alarms(training: Training, seconds: float) -> int:
    training.until(lambda: all(training.commits(each) for each in range(REPLICAS)))
    began, said = time.monotonic(), 0.0
    while (passed_s := time.monotonic() - began) < seconds:
        if passed_s - said >= SAY_S:
            said = passed_s
            say(f"{passed_s:6.0f} s  {_told(training)}")
        time.sleep(1.0)
    say(f"{seconds:6.0f} s  {_told(training)}")
    expelled = [each for each in training.events() if isinstance(each, RecoveryDecided)]
    for each in expelled:
        say(f"replica {each.replica}: {each.finding.what}; {'; '.join(each.finding.evidence)}")
    return 1 if expelled else 0


def _told(training: Training) -> str:
    commits = training.commits(0)
    steps_s = [later - earlier for earlier, later in pairwise(commits)]
    events = training.events()
    reports = sum(isinstance(each, RankHung) for each in events)
    expelled = sum(isinstance(each, RecoveryDecided) for each in events)
    spread = ", ".join(f"{percentile(steps_s, each):.3f} s" for each in (50, 99, 100))
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    steps = f"{len(commits)} steps, p50, p99, longest {spread}"
    return f"{steps}; load {load}; silent ranks looked at {reports}, replicas expelled {expelled}"


@contextlib.contextmanager
def _training(step_s: float) -> Generator[Training]:
    """Two replicas of one rank each, until the bench has what it wants to know."""
    with tempfile.TemporaryDirectory() as home:
        os.environ["HOLDFAST_HOME"] = home
        overrides = (
            f"recovery={{replicas: {REPLICAS}, max_restarts: 1000000, step_deadline_s: auto}}",
            "checkpoint.every_steps=200",
        )
        command = (sys.executable, str(PROGRAM), f"{step_s}", home)
        job = api.load_job(None, command=command, nodes=REPLICAS, name="expulsion", overrides=overrides)
        run = api.start(job, "local", base=Path(home))
        try:
            yield Training(run, Path(home))
        finally:
            api.cancel(run, force=True)
            for _ in api.follow(run):
                pass


@contextlib.contextmanager
def _load(loops: int) -> Generator[None]:
    """Processes that do nothing but compute."""
    command = [sys.executable, "-c", "while True: pass"]
    started = [subprocess.Popen(command) for _ in range(loops)]
    try:
        yield
    finally:
        for each in started:
            each.kill()
            each.wait()


if __name__ == "__main__":
    sys.exit(main())
