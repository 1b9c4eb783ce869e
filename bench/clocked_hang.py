"""How soon a hang of a program without a Session ends its ranks, with the default step timeout, `auto`.

.venv/bin/python -m bench.clocked_hang [--rounds N]

Two ranks train with Gloo (tests/programs/step_clock_trainer.py) and hang after a step: one is stopped by a signal, or
enters an all-reduce that no other rank enters. The figure is the time from the last step of the rank that stepped last
until the first process of a rank is gone, less three times the 99th percentile of the steps until then.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from bench import result_file
from bench.paired_stats import headline, percentile, say, table
from holdfast import api
from holdfast.events import AnyEvent, RankExited, RankHung, StepCommitted
from holdfast.job.step_timeouts import AUTO_FACTOR

PROGRAM = Path(__file__).parents[1] / "tests" / "programs" / "step_clock_trainer.py"
GOAL_S = 1.0
ROUNDS, HANGS_AT = 3, 60
KINDS = ("stop", "collective")


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog="bench.clocked_hang", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    headline("hang of a program without a Session: last step until a rank's process is gone, beyond 3 x p99")
    rows: list[tuple[str, ...]] = []
    longest_s = 0.0
    for number in range(options.rounds):
        for kind in KINDS:
            with tempfile.TemporaryDirectory() as base:
                beyond_s, limit_s = _one_round(kind, Path(base))
            longest_s = max(longest_s, beyond_s)
            rows.append((str(number + 1), kind, f"{beyond_s:.3f}", f"{limit_s:.3f}"))
    say(table(("round", "kind", "beyond 3 x p99, s", "3 x p99, s"), rows))
    claim = "hang of an unmodified program, `auto`: last step until a process is gone, beyond 3 x p99, longest"
    result_file.save(
        options.json, "Hangs without a Session", [result_file.absolute(claim, longest_s, "s", goal=GOAL_S)]
    )


def _one_round(kind: str, base: Path) -> tuple[float, float]:
    command = (sys.executable, str(PROGRAM), str(HANGS_AT + 2), kind, str(HANGS_AT))
    job = api.load_job(None, command=command, nodes=2, name="hang", overrides=("recovery.prewarm=false",))
    log: list[AnyEvent] = [event for event in api.follow(api.start(job, "local", base=base)) if event is not None]
    steps = [event for event in log if isinstance(event, StepCommitted) and event.attempt == 0]
    hangs = [event for event in log if isinstance(event, RankHung) and event.attempt == 0]
    gone_at = min(event.at for event in log if isinstance(event, RankExited) and event.attempt == 0)
    durations = [step.ended - step.started for step in steps if step.steps == 1][1:]
    limit_s = AUTO_FACTOR * percentile(durations, 99)
    return gone_at - max(hang.last_step_at for hang in hangs) - limit_s, limit_s


if __name__ == "__main__":
    main()
