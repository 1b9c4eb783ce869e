"""How long a report of a month of 16,384 ranks takes, how much memory, and how large it is.

.venv/bin/python -m bench.run_report [--quick | --nodes N --days D]

The log is that of bench.event_log. The report is written by the command, in its own process.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench import result_file
from bench.event_log import RANKS, long_run_options, make_log
from bench.paired_stats import headline, say, table
from holdfast.run_dir import RunDir

GOAL_S, GOAL_MIB, GOAL_SIZE_MIB = 10.0, 500.0, 1.5


def main() -> None:
    """Make the log, write its report, and print what that took."""
    nodes, days, json_file = long_run_options("bench.run_report", __doc__)
    headline(f"report of {nodes * RANKS:,} ranks for {days:g} days")
    with tempfile.TemporaryDirectory(prefix="report") as home:
        make_log(RunDir(Path(home) / "runs" / "month-abc234"), nodes, days)
        page = Path(home) / "report.html"
        began = time.perf_counter()
        words = [sys.executable, "-m", "holdfast", "report", "month-abc234", "--to", str(page)]
        subprocess.run(words, env=os.environ | {"HOLDFAST_HOME": home}, check=True, capture_output=True)
        took_s = time.perf_counter() - began
        size_mib = page.stat().st_size / 2**20
    peak_mib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    what = f"report of {nodes * RANKS:,} ranks for {days:g} days"
    found = [
        result_file.absolute(what, took_s, "s", goal=GOAL_S),
        result_file.absolute(f"peak memory of the {what}", peak_mib, "MiB", goal=GOAL_MIB),
        result_file.absolute(f"size of the {what}", size_mib, "MiB", goal=GOAL_SIZE_MIB),
    ]
    result_file.save(json_file, "Reports", found)
    say(table(("what", "measured", "goal", "met"), [(one.claim, str(one.figure), one.goal, one.met) for one in found]))


if __name__ == "__main__":
    main()
