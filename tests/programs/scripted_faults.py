"""Runs a script and injects faults into its ranks after given steps: `scripted_faults.py FAULTS SCRIPT [ARGUMENT...]`.

FAULTS is a JSON list of `{"after": STEP, "fault": FAULT, "rank": RANK, "once": FILE}`. `rank` limits a fault to one
rank; `once` limits it to the time before FILE exists, which the fault creates. Faults of a rank that has just reported
the step:

- `dies`: the rank gets SIGKILL.
- `told`: the rank gets SIGTERM.
- `launcher-told`: the process that started it gets SIGTERM.
- `waits`: it waits for a request, from a signal or its agent.
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
    """Arm all faults in this process; all ranks carry out a request to one rank after the following step."""
    control_group.CONSENSUS_EVERY_S = 0.0
    report = RankCoordinator.report_step

    def report_and_inject(self: RankCoordinator, step: int, **given: Any) -> None:
        report(self, step, **given)
        for fault in faults:
            if fault["after"] == step and fault.get("rank", self.ranks.rank) == self.ranks.rank and _first(fault):
                _inject(self, fault["fault"])

    RankCoordinator.report_step = report_and_inject


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


def _inject(coordinator: RankCoordinator, fault: str) -> None:
    match fault:
        case "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        case "told":
            os.kill(os.getpid(), signal.SIGTERM)
        case "launcher-told":
            os.kill(os.getppid(), signal.SIGTERM)
        case "waits":
            _wait(coordinator)
        case _:
            raise ValueError(fault)


def _wait(coordinator: RankCoordinator) -> None:
    deadline = time.monotonic() + ASKED_WITHIN_S
    link = coordinator.fileno()
    while not (coordinator._requested or coordinator._terminated):
        if time.monotonic() > deadline:
            raise TimeoutError(f"no request within {ASKED_WITHIN_S:g} s")
        select.select([] if link is None else [link], [], [], LOOK_S)
        coordinator._process_messages()


if __name__ == "__main__":
    install_faults(json.loads(sys.argv[1]))
    run(*sys.argv[2:])
