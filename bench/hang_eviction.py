"""How soon a hung replica is evicted, and how often a healthy one is; `step_timeout_s: auto`, two replicas.

.venv/bin/python -m bench.hang_eviction [--quick | --rounds N] [--seed N] [--step-s S]
.venv/bin/python -m bench.hang_eviction --peer
.venv/bin/python -m bench.hang_eviction --alarms-for 3600 [--load N]

In each round, at a random moment, one rank is stopped by a signal, or sleeps in its own code, or enters an all-reduce
that no other rank enters. The figure is the time from its last committed step until its process is gone, less three
times the 99th percentile of its steps until then; another column has the same until the other replica's next commit.

With `--peer` the same happens, twice each, to two replicas under TorchFT's own Manager and Lighthouse with default
timeouts. TorchFT does not end their process, so only the other's next commit is measured. With `--alarms-for` no fault
is injected for that many seconds, while other processes keep the cores busy; each evicted replica is a false alarm.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import socket
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

from bench.paired_stats import headline, percentile, say, table
from holdfast import api
from holdfast.events import (
    AnyEvent,
    AttemptStarted,
    FaultAction,
    FaultTarget,
    RankExited,
    RankHung,
    RanksStarted,
    RecoveryDecided,
)
from holdfast.events.log import EventReader
from holdfast.job.step_timeouts import AUTO_FACTOR
from holdfast.run_dir import RunDir

PROGRAM = Path(__file__).parents[1] / "tests" / "programs" / "replica_trainer.py"
REPLICAS = 2
GOAL_S = 1.0
ROUNDS, QUICK_ROUNDS = 12, 3
STEPS = 100
"""Steps of an attempt before it hangs: enough for a percentile."""
PATIENCE_S = 240.0
PEER = Path(__file__).parent / "programs" / "torchft_loop.py"
LIGHTHOUSE = Path(sys.executable).parent / "torchft_lighthouse"
PEER_ROUNDS = 2
SAY_S = 300.0

STOPPED, ASLEEP, ALONE = "stopped by a signal", "asleep in its own code", "in a separate all-reduce"
KINDS = (STOPPED, ASLEEP, ALONE)


@dataclass
class Training:
    """A run, and its log so far."""

    run: RunDir
    out: Path

    def __post_init__(self) -> None:
        self._reader = EventReader(self.run.events)
        self._events: list[AnyEvent] = []

    def events(self) -> list[AnyEvent]:
        """All events so far."""
        self._events.extend(self._reader.read())
        return self._events

    def attempt(self, replica: int) -> tuple[int, float]:
        """The number of a replica's latest attempt, and its start time."""
        started = [each for each in self.events() if isinstance(each, AttemptStarted) and each.replica == replica]
        return (started[-1].attempt, started[-1].at) if started else (-1, time.time())

    def commits(self, replica: int, attempt: int | None = None) -> list[float]:
        """When each step of a replica's attempt was committed; the latest attempt by default."""
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
    """Measure, print the table, and return nonzero unless the goal was met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--step-s", type=float, default=0.1)
    parser.add_argument("--peer", action="store_true", help="TorchFT's own Manager and Lighthouse too")
    parser.add_argument("--alarms-for", type=float, metavar="SECONDS")
    parser.add_argument("--load", type=int, default=os.cpu_count(), help="processes that only compute")
    given = parser.parse_args()
    if given.alarms_for:
        headline(f"False alarms of two replicas in {given.alarms_for:g} s, with {given.load} busy loops")
        with _training(given.step_s) as training, _load(given.load):
            return _alarms(training, given.alarms_for)
    if given.peer:
        headline(
            "A replica that hangs under TorchFT with its defaults: from its last step until the other's next commit"
        )
        return _peers(given.step_s)
    headline(f"A replica that hangs: from its last step until it is evicted, beyond {AUTO_FACTOR:g} x p99 of its steps")
    with _training(given.step_s) as training:
        return _rounds(training, given.rounds or (QUICK_ROUNDS if given.quick else ROUNDS), random.Random(given.seed))


def _rounds(training: Training, rounds: int, chance: random.Random) -> int:
    beyond: defaultdict[str, list[float]] = defaultdict(list)
    others: defaultdict[str, list[float]] = defaultdict(list)
    for number in range(rounds):
        kind, victim = KINDS[number % len(KINDS)], number % REPLICAS
        training.until(lambda: all(len(training.commits(each)) > STEPS for each in range(REPLICAS)))
        time.sleep(chance.uniform(0.0, 2.0))
        hang = _measure_eviction(training, victim, kind)
        beyond[kind].append(hang.gone_s - AUTO_FACTOR * hang.p99_s)
        others[kind].append(hang.other_s - AUTO_FACTOR * hang.p99_s)
        say(
            f"{number + 1:3d}/{rounds}  {kind}: reported after {hang.reported_s:.3f} s, gone after {hang.gone_s:.3f} s"
            f", the other's next commit {hang.other_s:.3f} s; p99 of its steps {hang.p99_s:.3f} s"
        )
    rows = [
        (kind, str(len(each)), f"{statistics.median(each):.3f} s", f"{max(each):.3f} s", f"{max(others[kind]):.3f} s")
        for kind, each in beyond.items()
    ]
    head = ("a rank is", "rounds", "gone, beyond 3 x p99, median", "longest", "the other's next commit, longest")
    say("\n" + table(head, rows))
    hung = [each for each in training.events() if isinstance(each, RecoveryDecided)]
    wrong = len(hung) - rounds
    met = max(max(each) for each in beyond.values()) <= GOAL_S and wrong == 0
    say(f"\ngoal: {GOAL_S:g} s, met: {'yes' if met else 'no'}; replicas evicted that did not hang: {wrong}")
    return 0 if met else 1


@dataclass(frozen=True, kw_only=True)
class HangTimes:
    """Times after a hang, in seconds since the replica's last committed step."""

    reported_s: float
    gone_s: float
    other_s: float
    p99_s: float
    """99th percentile of its steps until then."""


def _measure_eviction(training: Training, victim: int, kind: str) -> HangTimes:
    """Hang a replica, and measure what follows."""
    attempt, _ = training.attempt(victim)
    if kind is STOPPED:
        started = [each for each in training.events() if isinstance(each, RanksStarted) and each.replica == victim]
        os.kill(started[-1].ranks[0].pid, signal.SIGSTOP)
    else:
        target = FaultTarget.RANK if kind is ASLEEP else FaultTarget.COLLECTIVE
        api.inject_fault(training.run, target=target, index=victim, action=FaultAction.HANG)

    def ends() -> list[RankExited]:
        exits = (each for each in training.events() if isinstance(each, RankExited))
        return [each for each in exits if (each.replica, each.attempt) == (victim, attempt)]

    def reports() -> list[float]:
        hangs = (each for each in training.events() if isinstance(each, RankHung))
        return [each.at for each in hangs if (each.replica, each.attempt) == (victim, attempt)]

    training.until(lambda: bool(ends()))
    commits = training.commits(victim, attempt)
    last = commits[-1]
    training.until(lambda: training.commits(1 - victim)[-1] > ends()[0].at)
    training.until(lambda: training.attempt(victim)[0] > attempt)
    other = next(
        each for each in training.commits(1 - victim) if each > last + AUTO_FACTOR * statistics.median(_steps(commits))
    )
    return HangTimes(
        reported_s=reports()[-1] - last,
        gone_s=ends()[0].at - last,
        other_s=other - last,
        p99_s=percentile(_steps(commits), 99),
    )


def _steps(commits: list[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise(commits)]


def _peers(step_s: float) -> int:
    """Measure the same with TorchFT, and print it."""
    rows: list[tuple[str, ...]] = []
    for kind, number in ((STOPPED, signal.SIGSTOP), (ASLEEP, signal.SIGUSR1)):
        told: list[str] = []
        for _ in range(PEER_ROUNDS):
            told.append(_managed(step_s, number))
            say(f"TorchFT, {kind}: the other's next commit {told[-1]}")
        rows.append((kind, *told))
    head = (
        "a rank is",
        *(f"TorchFT with its defaults: the other's next commit, round {each + 1}" for each in range(PEER_ROUNDS)),
    )
    say("\n" + table(head, rows))
    return 0


def _managed(step_s: float, number: signal.Signals) -> str:
    """Hang one of two replicas; return, as text, what happened to the other."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        out = Path(folder)
        with socket.create_server(("127.0.0.1", 0)) as held:
            address = f"127.0.0.1:{held.getsockname()[1]}"

        def start(name: str, *command: str) -> subprocess.Popen[bytes]:
            log = stack.enter_context((out / f"{name}.log").open("wb"))
            process = subprocess.Popen(command, stdout=log, stderr=log)
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        start("lighthouse", str(LIGHTHOUSE), "--min_replicas", "1", "--bind", address)
        started = [
            start(f"{each}", sys.executable, str(PEER), folder, f"{each}", f"{step_s}", f"http://{address}")
            for each in range(REPLICAS)
        ]

        def commits(replica: int) -> list[float]:
            note = out / str(replica)
            return list(map(float, note.read_text().split("\n")[:-1])) if note.exists() else []

        deadline = time.monotonic() + PATIENCE_S
        while min(len(commits(each)) for each in range(REPLICAS)) <= STEPS:
            if time.monotonic() > deadline:
                raise TimeoutError(f"TorchFT made no {STEPS} steps within {PATIENCE_S:g} s")
            time.sleep(0.02)
        started[1].send_signal(number)
        time.sleep(10 * step_s)
        last, had = commits(1)[-1], len(commits(0))
        while len(commits(0)) <= had:
            if started[0].poll() is not None:
                return f"never: it died after {time.time() - last:.1f} s"
            if time.time() - last > PATIENCE_S:
                return f"not within {PATIENCE_S:g} s"
            time.sleep(0.02)
        return f"after {commits(0)[had] - last:.1f} s"


def _alarms(training: Training, seconds: float) -> int:
    training.until(lambda: all(training.commits(each) for each in range(REPLICAS)))
    began, said = time.monotonic(), 0.0
    while (passed_s := time.monotonic() - began) < seconds:
        if passed_s - said >= SAY_S:
            said = passed_s
            say(f"{passed_s:6.0f} s  {_told(training)}")
        time.sleep(1.0)
    say(f"{seconds:6.0f} s  {_told(training)}")
    evicted = [each for each in training.events() if isinstance(each, RecoveryDecided)]
    for each in evicted:
        say(f"replica {each.replica}: {each.finding.what}; {'; '.join(each.finding.evidence)}")
    return 1 if evicted else 0


def _told(training: Training) -> str:
    commits = training.commits(0)
    steps_s = [later - earlier for earlier, later in pairwise(commits)]
    events = training.events()
    reports = sum(isinstance(each, RankHung) for each in events)
    evicted = sum(isinstance(each, RecoveryDecided) for each in events)
    spread = ", ".join(f"{percentile(steps_s, each):.3f} s" for each in (50, 99, 100))
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    steps = f"{len(commits)} steps, p50, p99, longest {spread}"
    return f"{steps}; load {load}; silent ranks reported {reports}, replicas evicted {evicted}"


@contextlib.contextmanager
def _training(step_s: float) -> Generator[Training]:
    """Two replicas of one rank each, until the bench has its measurements."""
    with tempfile.TemporaryDirectory() as home:
        os.environ["HOLDFAST_HOME"] = home
        overrides = (
            f"recovery={{replicas: {REPLICAS}, max_restarts: 1000000, step_timeout_s: auto}}",
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
    """Processes that only compute."""
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
