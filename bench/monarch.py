"""Two nodes on this machine whose agents Monarch places: launch and recovery, against Monarch alone and without it.

.venv/bin/python -m bench.monarch [--quick | --rounds N]

launch: from the command to the end of the first all-reduce; the peers are Monarch alone (LocalJob, SPMDActor) and the
local target without Monarch. notice: from SIGKILL of a rank to its end in the log; the peer is the error that Monarch
alone raises for a killed process. kill, agent: from SIGKILL of a rank or an agent to the next whole step; the peer is
the local target without Monarch.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from bench import result_file
from bench.paired_stats import headline
from bench.target_runs import TargetRuns, compared, options_of
from holdfast.events import FaultTarget

LAUNCH_GOAL, NOTICE_GOAL, KILL_GOAL, AGENT_GOAL = 1.05, 0.1, 1.1, 1.5
ALONE = Path(__file__).parent / "programs" / "monarch_alone.py"
MONARCH = "orchestrator=monarch"
AGENT = FaultTarget.AGENT
TITLE = "Monarch"


def main() -> None:
    """Measure, and print a table."""
    count, results = options_of("bench.monarch", __doc__)
    headline("Monarch: 2 nodes x 1 rank, processes of this machine")
    with tempfile.TemporaryDirectory() as base:
        runs = TargetRuns(Path(base), {})

        def alone() -> float:
            return runs.all_reduce_s(lambda out: [[sys.executable, str(ALONE), "launch", str(out)]])

        def noticed_alone() -> float:
            word = Path(base) / "noticed"
            argv = [sys.executable, str(ALONE), "kill", str(word)]
            subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            return float(word.read_text())

        def launch() -> float:
            return runs.launch("local", MONARCH)

        alone()  # the first run reads 5 GB of torch
        launch()
        claim = "Monarch: command → first all-reduce, 2 nodes"
        without = "holdfast, local"
        found = [
            compared(claim, count, "Monarch alone", alone, launch, LAUNCH_GOAL),
            compared(claim, count, without, lambda: runs.launch("local"), launch, LAUNCH_GOAL),
            compared(
                "Monarch: SIGKILL of a rank → noticed",
                count,
                "Monarch alone",
                noticed_alone,
                lambda: runs.notice("local", MONARCH),
                NOTICE_GOAL,
            ),
            compared(
                "Monarch: SIGKILL of a rank → next whole step",
                count,
                without,
                lambda: runs.kill("local"),
                lambda: runs.kill("local", MONARCH),
                KILL_GOAL,
            ),
            compared(
                "Monarch: SIGKILL of an agent → next whole step",
                count,
                without,
                lambda: runs.kill("local", what=AGENT),
                lambda: runs.kill("local", MONARCH, what=AGENT),
                AGENT_GOAL,
            ),
        ]
    result_file.save(results, TITLE, found)


if __name__ == "__main__":
    main()
