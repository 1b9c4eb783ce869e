"""Runs a script to whose ranks something happens after a step: `scripted_faults.py FAULTS SCRIPT [ARGUMENT...]`.

FAULTS is a list in JSON of `{"after": STEP, "fault": FAULT, "rank": RANK, "once": FILE}`: of one rank where one is named;
with a file, which it makes, only while that is not there. What befalls a rank that has just reported the step:

- `dies`: of SIGKILL.
- `told`: gets SIGTERM.
- `launcher-told`: the process that started it gets SIGTERM.
- `waits`: until it is asked for something, by a signal or by its agent.
"""

from __future__ import annotations

import json
import os
import runpy
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

from holdfast.train.session import control_group
from holdfast.train.session.rank_coordinator import RankCoordinator

ASKED_WITHIN_S = 200.0
LOOK_S = 0.02


def install_faults(faults: list[dict[str, Any]]) -> None:
    """Have all of it befall this process, later; what one rank is asked for, all do after the step that follows."""
    control_group.CONSENSUS_EVERY_S = 0.0
    report = RankCoordinator.report_step

    def fated(self: RankCoordinator, step: int, **given: Any) -> None:
        report(self, step, **given)
        for fault in faults:
            if fault["after"] == step and fault.get("rank", self.ranks.rank) == self.ranks.rank and _first(fault):
                _befall(self, fault["fault"])

    RankCoordinator.report_step = fated


def run(script: str, *arguments: str) -> None:
    """Run a script as Python would."""
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


def _first(fault: dict[str, Any]) -> bool:
    if "once" not in fault:
        return True
    file = Path(fault["once"])
    first = not file.exists()
    file.touch()
    return first


def _befall(liaison: RankCoordinator, fault: str) -> None:
    match fault:
        case "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        case "told":
            os.kill(os.getpid(), signal.SIGTERM)
        case "launcher-told":
            os.kill(os.getppid(), signal.SIGTERM)
        case "waits":
            _wait(liaison)
        case _:
            raise ValueError(fault)


def _wait(liaison: RankCoordinator) -> None:
    deadline = time.monotonic() + ASKED_WITHIN_S
    link = liaison.fileno()
    while not (liaison._requested or liaison._terminated):
        if time.monotonic() > deadline:
            raise TimeoutError(f"nobody has asked for anything within {ASKED_WITHIN_S:g} s")
        select.select([] if link is None else [link], [], [], LOOK_S)
        liaison._receive()


if __name__ == "__main__":
    install_faults(json.loads(sys.argv[1]))
    run(*sys.argv[2:])
