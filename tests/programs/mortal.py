"""Runs a script that dies once: `mortal.py FILE RANK:STEP SCRIPT [ARGUMENT...]`.

Rank RANK is killed by SIGKILL as soon as it has reported step STEP, unless FILE is there already, which it makes.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from pathlib import Path

from holdfast.train.liaison import Liaison


def arm(file: Path, rank: int, step: int) -> None:
    """Have the process die so, later."""
    report = Liaison.report

    def dying(self: Liaison, reported: int, **given: object) -> None:
        report(self, reported, **given)
        if reported == step and self.ranks.rank == rank and not file.exists():
            file.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    Liaison.report = dying


def run(script: str, *arguments: str) -> None:
    """Run a script as Python would."""
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    file, where, script, *arguments = sys.argv[1:]
    rank, step = map(int, where.split(":"))
    arm(Path(file), rank, step)
    run(script, *arguments)
