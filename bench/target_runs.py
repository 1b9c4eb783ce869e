"""Runs on targets of a bench's own folder: how long a launch and a recovery take there."""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from statistics import median

from bench import load_gate, result_file
from bench.paired_stats import OURS, PEER, PEER_AGAIN, compare, interleave, say, table
from bench.result_file import Result
from holdfast import api
from holdfast.events import FaultAction, FaultTarget, NodeCreated, RankExited, StepCommitted
from holdfast.run_dir import RunDir

BIN = Path(sys.executable).parent
ALL_REDUCE = Path(__file__).parent / "programs" / "allreduce.py"
STEPPER = Path(__file__).parents[1] / "tests" / "programs" / "torch_free_trainer.py"
WITHIN_S = 120.0
NODE_GRACE_S = 5.0
ROUNDS, QUICK_ROUNDS = 7, 1
RANKS = 2


def options_of(bench: str, doc: str | None) -> tuple[int, Path | None]:
    """What a bench's command line asks for: rounds, and the file for its results."""
    parser = argparse.ArgumentParser(prog=bench, description=doc)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--quick", action="store_true", help=f"only {QUICK_ROUNDS} round")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    return QUICK_ROUNDS if options.quick else options.rounds, options.json


class TargetRuns:
    """A folder with targets, given as the text of their files by name."""

    def __init__(self, base: Path, targets: Mapping[str, str]) -> None:
        self._base, self._number = base, 0
        os.environ["HOLDFAST_HOME"] = str(base / "home")
        os.environ["OMP_NUM_THREADS"] = "1"
        self._work = base / "work"
        folder = self._work / ".holdfast" / "targets"
        folder.mkdir(parents=True)
        for name, text in targets.items():
            (folder / f"{name}.yaml").write_text(text)

    def all_reduce_s(self, commands: Callable[[Path], list[list[str]]]) -> float:
        """Seconds from the start of these commands, given an output folder, to the end of the first all-reduce."""
        load_gate.wait_until_idle()
        out = Path(tempfile.mkdtemp(dir=self._base))
        words = [out / f"rank-{rank}" for rank in range(RANKS)]
        with (out / "log").open("wb") as log:
            started = time.time()
            running = [
                subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self._work)
                for argv in commands(out)
            ]
            ended = [command.wait(WITHIN_S) for command in running]
        if any(ended):
            raise RuntimeError((out / "log").read_text(errors="replace")[-3000:])
        return max(float(word.read_text()) for word in words) - started

    def launch(self, target: str, *settings: str) -> float:
        """Seconds from `holdfast run` to the end of the first all-reduce; `settings` are fields of the job."""
        own = [word for setting in settings for word in ("--set", setting)]

        def commands(out: Path) -> list[list[str]]:
            program = [sys.executable, str(ALL_REDUCE), str(out)]
            return [[str(BIN / "holdfast"), "run", "--on", target, "--nodes", str(RANKS), *own, "--", *program]]

        return self.all_reduce_s(commands)

    def kill(self, target: str, *settings: str, what: FaultTarget = FaultTarget.RANK) -> float:
        """Seconds from SIGKILL of a rank, or of its agent, to the next whole step."""
        with self._stepping(target, *settings) as (run, next_step):
            at = time.time()
            api.inject_fault(run, target=what, index=1, action=FaultAction.KILL)
            return next_step(1) - at

    def notice(self, target: str, *settings: str) -> float:
        """Seconds from SIGKILL of a rank to its end in the log."""
        with self._stepping(target, *settings) as (run, next_step):
            at = time.time()
            api.inject_fault(run, target=FaultTarget.RANK, index=1, action=FaultAction.KILL)
            next_step(1)
            exits = (event for event in api.events(run) if isinstance(event, RankExited))
            return next(event.at for event in exits if event.rank == 1 and not event.stopped) - at

    def lose(self, target: str, lose: Callable[[RunDir, str], None]) -> tuple[str, float]:
        """A machine that is lost, and the seconds until the next whole step."""
        with self._stepping(target) as (run, next_step):
            created = (event for event in api.events(run) if isinstance(event, NodeCreated))
            machine = next(event.machine for event in created if event.node == 1)
            at = time.time()
            lose(run, machine)
            return machine, next_step(1) - at

    @contextlib.contextmanager
    def _stepping(self, target: str, *own: str) -> Generator[tuple[RunDir, Callable[[int], float]]]:
        """A run that has made some steps; the function is the time of the first step of an attempt."""
        self._number += 1
        settings = (
            f"checkpoint.path={self._base / f'steps-{self._number}'}",
            f"recovery.node_grace_s={NODE_GRACE_S}",
            *own,
        )
        command = (sys.executable, str(STEPPER), "100000", "0.02")
        job = api.load_job(None, command=command, nodes=RANKS, name="stepping", overrides=settings)
        run = api.start(job, target, base=self._work)
        events = api.follow(run)

        def step_of(attempt: int) -> float:
            return next(event.at for event in events if isinstance(event, StepCommitted) and event.attempt == attempt)

        try:
            step_of(0)
            yield run, step_of
        finally:
            api.cancel(run)
            for _ in events:
                pass


def compared(
    claim: str, count: int, peer: str, theirs: Callable[[], float], ours: Callable[[], float], goal: float
) -> Result:
    """Rounds of the peer, holdfast and the peer again as a result, which is printed too."""
    say("")
    say(f"{claim}; peer: {peer}")
    rounds = interleave({PEER: theirs, OURS: ours, PEER_AGAIN: theirs}, count, unit="s")
    found = compare(rounds)
    row = (f"<= {goal}x", f"{found.ratio}x", str(found.floor), found.verdict(goal))
    say(table(("goal", "measured", "A/A floor", "met"), [row]))
    return result_file.from_rounds(claim, rounds, goal=goal, unit="s", peer=peer)


def beyond_grace(claim: str, losses: Sequence[float], *, goal_s: float) -> Result:
    """Seconds from losses of a machine to the next step, less `recovery.node_grace_s`, as a result, printed too."""
    beyond = [each - NODE_GRACE_S for each in losses]
    say(f"{claim}: {median(beyond):.2f} s, longest {max(beyond):.2f} s (goal {goal_s:g} s)")
    return result_file.absolute(claim, median(beyond), "s", goal=goal_s)
