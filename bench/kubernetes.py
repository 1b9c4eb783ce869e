"""On the lab: from submit to the first rank's first line.

.venv/bin/python -m bench.kubernetes [--quick | --rounds N]

Start: `holdfast run --on`, which ships the code, beside `kubectl apply` of the very manifest that it renders, its
secrets filled in beforehand and its code in the image; and, as what a cluster takes without holdfast, `kubectl apply`
of the same job with `agent: false`.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from bench import cluster, quiet
from bench.pairs import OURS, PEER, PEER_AGAIN, Round, compare, headline, interleave, say, table
from bench.sides import PROGRAMS

START_GOAL = 1.15
ROUNDS, QUICK_ROUNDS = 8, 1
WITHIN_S = 120.0
BARE = "bare"


def main() -> None:
    """Measure, and print a line a round and tables."""
    parser = argparse.ArgumentParser(prog="bench.kubernetes", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--quick", action="store_true", help=f"only {QUICK_ROUNDS} round")
    options = parser.parse_args()
    headline("kubernetes: 2 nodes x 1 rank on the lab")
    with cluster.site() as site:
        shutil.copy(PROGRAMS / "firstline.py", site.folder)
        rounds = _starts(site, QUICK_ROUNDS if options.quick else options.rounds)
    say("")
    say(rounds)


def _starts(site: cluster.Site, rounds: int) -> str:
    sides = {
        PEER: lambda: _first_line_s(site, "lab", applied=True),
        OURS: lambda: _first_line_s(site, "lab", applied=False),
        PEER_AGAIN: lambda: _first_line_s(site, "lab", applied=True),
        BARE: lambda: _first_line_s(site, "bare", applied=True),
    }
    for measure in sides.values():
        measure()  # the first of each reads programs from the disk
    done = interleave(sides, rounds, unit="s")
    result = compare(done)
    return table(
        ("claim", "goal", "measured", "A/A floor", "holdfast", "kubectl", "bare", "met"),
        [
            (
                "submit to the first rank's first line",
                f"<= {START_GOAL}x",
                f"{result.ratio}x",
                str(result.floor),
                f"{_median(done, OURS):.2f} s",
                f"{_median(done, PEER, PEER_AGAIN):.2f} s",
                f"{_median(done, BARE):.2f} s",
                result.verdict(START_GOAL),
            )
        ],
    )


def _first_line_s(site: cluster.Site, profile: str, *, applied: bool) -> float:
    """Seconds from just before the command until the first rank was at its first line."""
    out = site.out()
    program = site.folder / "firstline.py" if applied else Path("firstline.py")
    job = site.job("python", str(program), str(out))
    words, given = (site.applied(), site.manifest(job, profile)) if applied else (site.holdfast(job, profile), None)
    quiet.wait()
    started = time.time()
    with site.command(*words, input=given):
        site.wait_for(lambda: any(out.glob("rank-?")), WITHIN_S)
        took = min(float(word.read_text()) for word in out.glob("rank-?")) - started
    site.clear()
    return took


def _median(rounds: Sequence[Round], *names: str) -> float:
    return median(each[name] for each in rounds for name in names)


if __name__ == "__main__":
    main()
