"""Steps from a NaN on one rank to the decision, and whether rank and parameter group are named right.

.venv/bin/python -m bench.numeric_faults [--seeds 10] [--json FILE]

Each run is DDP over Gloo in a Session, on two local nodes of two ranks. The seed decides the rank, the step and the
parameter whose gradient has the NaN, or that the loss has it; the program plants it itself, without holdfast's drills.
A run ends with its first decision. Steps count from the one with the NaN to the last one that any rank finished.
Processes are forks of one that has imported torch (tests/programs/python_forks.py).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import sys
import tempfile
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import msgspec
from tests.runs.forked_starts import ForkedStarts

from bench import result_file
from bench.drill_diagnosis import end_run
from bench.paired_stats import headline, say, table
from holdfast import api
from holdfast.events import AnyEvent, NumericFaultObserved, RankExited, RecoveryDecided

PROGRAM = Path(__file__).parent / "programs" / "planted_nan.py"
NODES, RANKS_PER_NODE, PARAMETERS, GROUPS = 2, 2, 8, 4
STEPS, STEP_S = 100_000, 0.05
FIRST_STEP, LAST_STEP = 5, 40
MAX_WAIT_S = 150.0
GOAL_STEPS = 1


@dataclass(frozen=True, kw_only=True)
class Planted:
    """Where a NaN is planted."""

    rank: int
    step: int
    parameter: int
    """Its number in the order of the optimizer; -1 for the loss."""

    @classmethod
    def by(cls, seed: int) -> Planted:
        """The place that a seed decides; one in five is the loss."""
        chance = random.Random(seed)
        return cls(
            rank=chance.randrange(NODES * RANKS_PER_NODE),
            step=chance.randint(FIRST_STEP, LAST_STEP),
            parameter=-1 if seed % 5 == 4 else chance.randrange(PARAMETERS),
        )

    @property
    def group(self) -> int:
        """The parameter group that is to be named: a loss damages all, of which the first counts."""
        return max(0, self.parameter) * GROUPS // PARAMETERS

    def __str__(self) -> str:
        where = "loss" if self.parameter < 0 else f"parameter {self.parameter} of group {self.group}"
        return f"rank {self.rank}, step {self.step}, {where}"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a run made of it."""

    is_right: bool
    steps: int
    """Steps after the one with the NaN that any rank finished."""
    decided_s: float
    """Seconds from the rank's report to the decision, which comes when all ranks have ended."""
    what: str


def outcome_of(planted: Planted, log: list[AnyEvent]) -> Outcome:
    """The outcome that a log shows, up to its first decision."""
    faults = [event for event in log if isinstance(event, NumericFaultObserved) and event.damaged]
    (decided,) = (event for event in log if isinstance(event, RecoveryDecided))
    named = next((event for event in faults if event.rank == decided.first_failed_rank), None)
    group = named.parameter_group.partition(" ")[0] if named else ""
    last = max((event.last_step for event in log if isinstance(event, RankExited)), default=0)
    return Outcome(
        is_right=decided.first_failed_rank == planted.rank and group == str(planted.group),
        steps=last - planted.step,
        decided_s=decided.at - faults[0].at if faults else 0.0,
        what=f"{decided.finding.code}: {decided.finding.what}; group {group or '-'}",
    )


def run_seed(planted: Planted) -> Outcome:
    """Train with this NaN until the run has decided what follows."""
    with tempfile.TemporaryDirectory(prefix="numeric-") as base, _home(Path(base) / "home"):
        words = (STEPS, STEP_S, planted.rank, planted.step, planted.parameter)
        overrides = ("name=numeric", f"ranks_per_node={RANKS_PER_NODE}", "recovery.prewarm=false")
        command = (sys.executable, str(PROGRAM), *map(str, words))
        job = api.load_job(None, command=command, nodes=NODES, overrides=overrides)
        run = api.start(job, "local", base=Path(base))
        log: list[AnyEvent] = []
        try:
            deadline = time.monotonic() + MAX_WAIT_S
            for event in api.follow(run):
                log += [event] if event is not None else []
                if isinstance(event, RecoveryDecided) or time.monotonic() > deadline:
                    break
        finally:
            end_run(run)
        return outcome_of(planted, log)


@contextlib.contextmanager
def _home(folder: Path) -> Generator[None]:
    """Have runs kept in this folder."""
    before = os.environ.get("HOLDFAST_HOME")
    os.environ["HOLDFAST_HOME"] = str(folder)
    try:
        yield
    finally:
        os.environ.pop("HOLDFAST_HOME")
        if before is not None:
            os.environ["HOLDFAST_HOME"] = before


def main() -> int:
    """Plant a NaN for each seed; nonzero unless all are named right within the goal."""
    parser = argparse.ArgumentParser(prog="bench.numeric_faults", description=__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    headline("a NaN on one rank: who is named, and after how many steps the run acts")
    starts, rows, outcomes = ForkedStarts(), list[tuple[str, ...]](), list[Outcome]()
    try:
        with starts.used():
            for seed in range(options.seeds):
                planted = Planted.by(seed)
                outcome = run_seed(planted)
                outcomes.append(outcome)
                verdict = "right" if outcome.is_right else "WRONG"
                rows.append((str(planted), verdict, str(outcome.steps), f"{outcome.decided_s:.2f}", outcome.what))
                say(": ".join(rows[-1]))
    finally:
        starts.close()
    say("")
    say(table(("planted", "rank and group", "steps", "s to decide", "decision"), rows))
    right, steps = sum(each.is_right for each in outcomes), max(each.steps for each in outcomes)
    say(f"\n{right} of {len(outcomes)} right; at most {steps} steps after the NaN")
    claim = f"NaN on one of {NODES * RANKS_PER_NODE} ranks: steps to the action, rank and parameter group right"
    result = result_file.absolute(claim, steps, "steps", goal=GOAL_STEPS, decimals=0)
    details = {
        "right": f"{right} of {len(outcomes)}",
        "slowest decision": f"{max(e.decided_s for e in outcomes):.2f} s",
    }
    result_file.save(
        options.json,
        "Steps from a NaN to the action",
        [msgspec.structs.replace(result, details=details, headline=True)],
    )
    return 0 if right == len(outcomes) and steps <= GOAL_STEPS else 1


if __name__ == "__main__":
    sys.exit(main())
