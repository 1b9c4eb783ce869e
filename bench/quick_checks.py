"""How long the checks before a start take, and how much later a start is with them.

.venv/bin/python -m bench.quick_checks [--quick | --rounds N] [--part two|fleet|start ...]

`two`: `holdfast check --nodes 2`, the whole command. `fleet`: a controller and 64 simulated agents, each of which runs
the real checks of this machine, from the controller's start until the attempt starts. `start`: how much later the
ranks of two nodes start after both have joined, with `checks: quick` and without; their imports begin only then.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from statistics import median

import msgspec

from bench import result_file
from bench.contenders import BIN, ContenderFailed
from bench.paired_stats import OURS, PEER, PEER_AGAIN, estimate, headline, orders, say
from bench.result_file import Figure, Result, today
from bench.simulated_run import SimulatedRun
from holdfast.events import AgentConnected, AttemptStarted, NodeChecked
from holdfast.events.log import EventReader
from holdfast.job.spec import CheckLevel, Checks
from holdfast.run_dir import RunDir

PARTS = ("two", "fleet", "start")
ROUNDS, QUICK_ROUNDS = 9, 2
CHECKS, QUICK_CHECKS = 5, 1
FLEET = 64
GOAL_S, ADDED_GOAL_S = 10.0, 1.0
WITHIN_S = 120.0


def main() -> None:
    """Measure each part, and print its figures."""
    parser = argparse.ArgumentParser(prog="bench.quick_checks", description=__doc__)
    parser.add_argument("--part", action="append", choices=PARTS, help="only this one")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--quick", action="store_true", help=f"only {QUICK_ROUNDS} rounds")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    headline("quick checks: how long they take")
    parts: Collection[str] = options.part or PARTS
    times = QUICK_CHECKS if options.quick else CHECKS
    found: list[Result] = []
    if "two" in parts:
        found.append(_typical("`holdfast check --nodes 2`, the whole command", [_command_s() for _ in range(times)]))
    if "fleet" in parts:
        found.append(
            _typical(f"{FLEET} simulated nodes checked: controller started → attempt starts", _fleets_s(times))
        )
    if "start" in parts:
        found.append(_added(QUICK_ROUNDS if options.quick else options.rounds))
    result_file.save(options.json, "Quick checks", found)


def _typical(claim: str, seconds: Sequence[float]) -> Result:
    say(f"{claim}: median {median(seconds):.2f} s, longest {max(seconds):.2f} s of {len(seconds)}")
    found = result_file.absolute(f"{claim}, median", median(seconds), "s", goal=GOAL_S, decimals=1)
    return msgspec.structs.replace(
        found, conditions=f"{len(seconds)} times", details={"longest": f"{max(seconds):.2f} s"}
    )


def _command_s() -> float:
    with tempfile.TemporaryDirectory(prefix="holdfast-") as folder:
        began = time.monotonic()
        done = subprocess.run(
            [BIN / "holdfast", "check", "--nodes", "2"],
            cwd=folder,
            env=os.environ | {"HOLDFAST_HOME": folder},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise ContenderFailed(done.stdout + done.stderr)
        return time.monotonic() - began


def _fleets_s(times: int) -> list[float]:
    return [_fleet_s() for _ in range(times)]


def _fleet_s() -> float:
    """Seconds until the attempt of 64 checked nodes starts."""
    checks = Checks(before_start=CheckLevel.QUICK)
    with tempfile.TemporaryDirectory(prefix="holdfast-") as folder:
        with SimulatedRun(Path(folder, "run"), FLEET, checks=checks) as run:
            run.wait_until(lambda events: any(isinstance(each, AttemptStarted) for each in events), WITHIN_S)
            joined = [each.at for each in run.events if isinstance(each, AgentConnected)]
            checked = [each for each in run.events if isinstance(each, NodeChecked)]
            started = next(each.at for each in run.events if isinstance(each, AttemptStarted))
            whole_s = started - run.started_at
        longest_s = max(each.took_s for each in checked)
        say(
            f"{FLEET} nodes: {whole_s:.2f} s; joined after {max(joined) - run.started_at:.2f} s, checks of a node "
            f"up to {longest_s:.2f} s"
        )
        return whole_s


def _added(rounds: int) -> Result:
    """How much later an attempt starts after the last of two nodes has joined."""
    levels = {PEER: "off", OURS: "quick", PEER_AGAIN: "off"}
    order_of = orders(tuple(levels))
    measured = [{name: _waits_s(levels[name]) for name in order_of(index)} for index in range(rounds)]
    added = estimate([each[OURS] - (each[PEER] + each[PEER_AGAIN]) / 2 for each in measured])
    floor = estimate([each[PEER_AGAIN] - each[PEER] for each in measured])
    say(f"the checks add {added} s; without them twice: {floor} s")
    return Result(
        claim="2 nodes joined → their ranks start: `checks: quick` adds",
        command=result_file.command(),
        date=today(),
        figure=Figure(value=median(each[OURS] for each in measured), unit="s", decimals=2),
        difference=Figure(value=added.median, low=added.low, high=added.high, unit="s", decimals=2),
        floor=Figure(value=floor.median, low=floor.low, high=floor.high, unit="s", decimals=2),
        peer=result_file.Peer(
            name="`checks: off`", figure=Figure(value=median(each[PEER] for each in measured), unit="s", decimals=3)
        ),
        goal=f"≤ {ADDED_GOAL_S:g} s",
        met="yes" if added.median <= ADDED_GOAL_S else "no",
        conditions=f"{rounds} rounds; by the run's log",
    )


def _waits_s(checks: str) -> float:
    """Seconds from the last node's joining until the attempt starts, in a run of Python on two nodes."""
    with tempfile.TemporaryDirectory(prefix="holdfast-") as folder:
        done = subprocess.run(
            [BIN / "holdfast", "run", "--nodes", "2", "--set", f"checks={checks}", "--", sys.executable, "-c", "pass"],
            cwd=folder,
            env=os.environ | {"HOLDFAST_HOME": folder},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise ContenderFailed(done.stdout + done.stderr)
        [run] = Path(folder, "runs").iterdir()
        events = list(EventReader(RunDir(run).events).read())
    joined = max(each.at for each in events if isinstance(each, AgentConnected))
    return next(each.at for each in events if isinstance(each, AttemptStarted)) - joined


if __name__ == "__main__":
    main()
