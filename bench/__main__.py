"""`python -m bench`: runs every bench in turn, in about half an hour; `--quick` only shows that they work.

`--json FOLDER` makes each bench write its results to FOLDER/BENCH.json, in the format of bench/results.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

BENCHES = ("help", "launch", "recovery", "step_time", "scale", "event_log", "data", "checkpoint")


def main() -> int:
    """Run each bench as a separate command, with the given options; return the number that failed."""
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FOLDER", help="write the results of each bench to this folder")
    given, others = parser.parse_known_args()
    failed = 0
    for name in BENCHES:
        words = ["--json", str(given.json / f"{name}.json")] if given.json else []
        failed += subprocess.run([sys.executable, "-m", f"bench.{name}", *others, *words], check=False).returncode != 0
    return failed


if __name__ == "__main__":
    sys.exit(main())
