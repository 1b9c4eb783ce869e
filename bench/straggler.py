"""After how many steps a rank that is 10 % slower is named, and how often one is named that is not.

.venv/bin/python -m bench.straggler [--rounds N] [--seed N] [--ranks N] [--step-s S] [--share 0.10]
.venv/bin/python -m bench.straggler --clean 300

A run of DDP over Gloo, whose steps are mostly spent asleep so that its ranks fit this machine's cores; other load is
not kept away. In each round a drill slows a random phase of a random rank, by a share of its step. With `--clean`
nothing is injected for that many seconds; each rank that is named is a false alarm.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from bench.drill_diagnosis import end_run
from bench.paired_stats import headline, say, table
from holdfast import api
from holdfast.events import AnyEvent, FaultAction, FaultInjected, FaultTarget, StepCommitted, StragglerObserved
from holdfast.protocol.phase_times import Phase
from holdfast.run_dir import RunDir

PROGRAM = Path(__file__).parent / "programs" / "watched_loop.py"
GOAL_STEPS = 40
PATIENCE_S, WARM_UP_STEPS, RECOVERY_STEPS = 600.0, 50, 40
DRILL_STEPS = 120
"""Steps that a drill lasts at most."""


class Named(NamedTuple):
    """A rank that was named."""

    event: StragglerObserved
    steps: int
    """Steps from the injection until it was in the log."""


class Watched:
    """A run, and its log so far."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.seen: list[AnyEvent] = []
        self._events: Iterator[AnyEvent | None] = api.follow(run)

    def until(self, holds: Callable[[AnyEvent], bool], seconds: float = PATIENCE_S) -> AnyEvent | None:
        """Read to an event; None if it does not come in time."""
        deadline = time.monotonic() + seconds
        for event in self._events:
            if event is not None:
                self.seen.append(event)
                if holds(event):
                    return event
            if time.monotonic() > deadline:
                return None
        raise RuntimeError("the run has ended")

    def step(self, at: float = float("inf")) -> int:
        """The last step that had ended at that time."""
        steps = (each for each in self.seen if isinstance(each, StepCommitted) and each.ended <= at)
        return max((each.step for each in steps), default=0)

    def wait_step(self, step: int) -> None:
        """Wait until a step is committed."""
        if self.until(lambda event: isinstance(event, StepCommitted) and event.step >= step) is None:
            raise TimeoutError(f"step {step} has not come")


def named_after(watched: Watched, rank: int, phase: Phase, *, share: float, step_s: float) -> Named | None:
    """Slow a phase of a rank, and wait until a rank is named."""
    at_step = watched.step() + 5
    for_s = DRILL_STEPS * step_s
    api.inject_fault(
        watched.run,
        target=FaultTarget(phase.value),
        index=rank,
        action=FaultAction.SLOW,
        at_step=at_step,
        amount=1 + share,
        for_s=for_s,
    )
    injected = watched.until(lambda event: isinstance(event, FaultInjected))
    found = watched.until(lambda event: isinstance(event, StragglerObserved), for_s)
    assert isinstance(injected, FaultInjected)
    if not isinstance(found, StragglerObserved):
        return None
    return Named(found, watched.step(found.at) - injected.step)


def main() -> int:
    """Measure, print a table, and return nonzero if a goal is missed."""
    parser = argparse.ArgumentParser(prog="bench.straggler", description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--step-s", type=float, default=0.25)
    parser.add_argument("--share", type=float, default=0.10)
    parser.add_argument("--clean", type=float, default=0.0, help="seconds without a fault, instead of rounds")
    options = parser.parse_args()
    headline(f"a straggler of {options.share:.0%} among {options.ranks} ranks: steps until it is named")
    with tempfile.TemporaryDirectory(prefix="straggler-") as base:
        command = (sys.executable, str(PROGRAM), "1000000", str(options.step_s))
        overrides = [f"ranks_per_node={options.ranks // 2}", "name=straggler", "recovery.prewarm=false"]
        job = api.load_job(None, command=command, nodes=2, overrides=overrides)
        watched = Watched(api.start(job, "local", base=Path(base)))
        try:
            watched.wait_step(WARM_UP_STEPS)
            if options.clean:
                return _clean(watched, options.clean)
            return _rounds(watched, options)
        finally:
            end_run(watched.run)


def _rounds(watched: Watched, options: argparse.Namespace) -> int:
    chance = random.Random(options.seed)
    rows: list[tuple[str, ...]] = []
    met = 0
    for number in range(options.rounds):
        rank, phase = chance.randrange(options.ranks), chance.choice(list(Phase))
        named = named_after(watched, rank, phase, share=options.share, step_s=options.step_s)
        right = named is not None and (named.event.rank, named.event.phase) == (rank, phase)
        met += right and named is not None and named.steps <= GOAL_STEPS
        told = "no rank" if named is None else f"rank {named.event.rank}, {named.event.phase}"
        rows.append((f"rank {rank}, {phase}", told, "-" if named is None else str(named.steps)))
        say(f"round {number + 1}: " + ", ".join(rows[-1]))
        watched.wait_step(watched.step() + (0 if named is None else max(0, DRILL_STEPS - named.steps)) + RECOVERY_STEPS)
    say(table(("slowed", "named", "steps"), rows))
    say(f"{met} of {options.rounds} right within {GOAL_STEPS} steps")
    return 0 if met == options.rounds else 1


def _clean(watched: Watched, seconds: float) -> int:
    first, ends = watched.step(), time.monotonic() + seconds
    named: list[StragglerObserved] = []
    while (left_s := ends - time.monotonic()) > 0:
        found = watched.until(lambda event: isinstance(event, StragglerObserved), left_s)
        if isinstance(found, StragglerObserved):
            named.append(found)
            say(f"named: {found.finding.what}; {found.finding.evidence[0]}")
    say(f"{len(named)} named in {seconds:g} s, {watched.step() - first} steps")
    return 1 if named else 0


if __name__ == "__main__":
    sys.exit(main())
