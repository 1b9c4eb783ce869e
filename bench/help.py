"""Help: how long `holdfast --help` takes, compared with `python -c "import torch"`.

.venv/bin/python -m bench.help [--quick | --rounds N]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from bench import result_file
from bench.paired_stats import OURS, PEER, PEER_AGAIN, compare, headline, interleave, say, table

GOAL = 0.3
ROUNDS, QUICK_ROUNDS = 12, 3
HELP = (str(Path(sys.executable).with_name("holdfast")), "--help")
IMPORT = (sys.executable, "-c", "import torch")


def main() -> None:
    """Measure, and print a line per round and a table."""
    parser = argparse.ArgumentParser(prog="bench.help", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--quick", action="store_true", help=f"only {QUICK_ROUNDS} rounds")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    headline('help: `holdfast --help` compared with `python -c "import torch"`')
    for command in (IMPORT, HELP):
        whole_process_s(command)  # The first run measures the disk.
    sides = {PEER: IMPORT, OURS: HELP, PEER_AGAIN: IMPORT}
    rounds = interleave(
        {name: partial(whole_process_s, command) for name, command in sides.items()},
        QUICK_ROUNDS if options.quick else options.rounds,
        unit="s",
    )
    result = compare(rounds)
    row = ("holdfast --help", f"<= {GOAL}x", f"{result.ratio}x", str(result.floor), result.verdict(GOAL))
    peer = '`python -c "import torch"`'
    found = result_file.from_rounds("`holdfast --help`", rounds, goal=GOAL, unit="s", peer=peer)
    result_file.save(options.json, "Start of the command line", [found])
    say("")
    say(table(("claim", "goal", "measured", "A/A floor", "met"), [row]))


def whole_process_s(command: tuple[str, ...]) -> float:
    """Seconds from the start of a command to its end."""
    began = time.monotonic()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return time.monotonic() - began


if __name__ == "__main__":
    main()
