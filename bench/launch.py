"""From the command to the end of the first all-reduce, two nodes of one rank: holdfast and two torchrun agents.

.venv/bin/python -m bench.launch [--quick | --rounds N]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median

from bench import load_gate, result_file
from bench.contenders import Contender, ContenderFailed, Running, holdfast, torchrun
from bench.paired_stats import OURS, PEER, PEER_AGAIN, compare, headline, interleave, say, table

GOAL = 0.7
ROUNDS, QUICK_ROUNDS = 15, 2
WITHIN_S = 90.0


def main() -> None:
    """Measure, and print a line per round and a table."""
    parser = argparse.ArgumentParser(prog="bench.launch", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--quick", action="store_true", help=f"only {QUICK_ROUNDS} rounds")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    headline("launch: command to the end of the first all-reduce, 2 nodes x 1 rank, Gloo")
    for side in (torchrun, holdfast):
        first_all_reduce_s(side)  # The first run reads 5 GB of torch and measures the disk.
    rounds = interleave(
        {
            PEER: lambda: first_all_reduce_s(torchrun),
            OURS: lambda: first_all_reduce_s(holdfast),
            PEER_AGAIN: lambda: first_all_reduce_s(torchrun),
        },
        QUICK_ROUNDS if options.quick else options.rounds,
        unit="s",
    )
    result = compare(rounds)
    peer = median(each[name] for each in rounds for name in (PEER, PEER_AGAIN))
    ours = median(each[OURS] for each in rounds)
    claim = "launch → first all-reduce, 2 nodes"
    found = result_file.from_rounds(claim, rounds, goal=GOAL, unit="s", peer="torchrun")
    result_file.save(options.json, "Launch", [found])
    say("")
    say(
        table(
            ("claim", "goal", "measured", "A/A floor", "holdfast, median", "torchrun, median", "rounds", "met"),
            [
                (
                    "launch to first all-reduce",
                    f"<= {GOAL}x",
                    f"{result.ratio}x",
                    str(result.floor),
                    f"{ours:.2f} s",
                    f"{peer:.2f} s",
                    str(len(rounds)),
                    result.verdict(GOAL),
                )
            ],
        )
    )


def first_all_reduce_s(side: Contender) -> float:
    """Seconds from just before the first command started until the last rank had its sum."""
    load_gate.wait_until_idle()
    with side("allreduce.py") as running:
        words = [running.out / f"rank-{rank}" for rank in range(2)]
        if not running.wait_for(lambda: all(word.exists() for word in words), WITHIN_S):
            raise ContenderFailed(f"no all-reduce within {WITHIN_S:g} s: {running.last_words()}")
        at = max(float(word.read_text()) for word in words)
        _check_ending(running)
        return at - running.started


def _check_ending(running: Running) -> None:
    for command in running.commands:
        if command.wait(WITHIN_S) != 0:
            raise ContenderFailed(f"exit code {command.returncode}: {running.last_words()}")


if __name__ == "__main__":
    main()
