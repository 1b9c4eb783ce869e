"""The ladder: the same training with one thing more each, on a target with a slow and a fast network, and locally.

.venv/bin/python -m bench.ladder [--steps N] [--json FILE]

`netns` has rungs 1, 3 and 4, with 100 Mbit/s on the first network; `local` has rungs 1 to 3, Monarch included. It needs
root. The floor is what two halves of the first rung differ by.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench import load_gate, result_file
from bench.paired_stats import headline, say, table
from bench.result_file import Figure, Peer, Result, today

EXAMPLES = Path(__file__).parents[1] / "examples" / "ladder"
TARGETS = {
    "netns": "kind: local\nisolation: netns\ninterfaces: {eth0: 100, net1: 10000}\n",
    "plain": "kind: local\n",
}
FAULT_TOLERANCE, GOAL = "3-fault-tolerance", 2.5
TITLE = "The ladder"


def main() -> None:
    """Climb on both targets, and print a table of each."""
    parser = argparse.ArgumentParser(prog="bench.ladder", description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    headline("ladder: a tiny Llama on two nodes of one rank")
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="holdfast-") as folder:
        work = Path(folder) / "ladder"
        shutil.copytree(EXAMPLES, work)
        targets = work / ".holdfast" / "targets"
        targets.mkdir(parents=True)
        for name, text in TARGETS.items():
            (targets / f"{name}.yaml").write_text(text)
        for name in TARGETS:
            load_gate.wait_until_idle()
            rungs = _climb(work, name, options.steps)
            results += [_result(name, rung) for rung in rungs if rung["status"] == "succeeded" and rung.get("ratio")]
    result_file.save(options.json, TITLE, results)


def _climb(work: Path, target: str, steps: int) -> list[dict[str, Any]]:
    holdfast = Path(sys.executable).with_name("holdfast")
    path = f"{holdfast.parent}{os.pathsep}{os.environ['PATH']}"
    environ = {**os.environ, "HOLDFAST_HOME": str(work.parent / "home"), "PATH": path}
    words = [str(holdfast), "accept", "ladder", ".", "--on", target, "--set", f"env.STEPS={steps}", "-o", "json"]
    done = subprocess.run(words, cwd=work, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=False)
    rungs: list[dict[str, Any]] = json.loads(done.stdout)["rungs"]
    shown = ("name", "status", "duration_s", "first_loss", "last_loss", "step_s", "ratio", "floor", "why")
    say("")
    say(f"{target}: {TARGETS[target].splitlines()[-1]}")
    say(table(shown, [tuple(_cell(rung.get(name)) for name in shown) for rung in rungs]))
    return rungs


def _cell(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value or "")


def _result(target: str, rung: dict[str, Any]) -> Result:
    value, _, interval = rung["ratio"].partition(" ")
    low, high = (float(each) for each in interval.strip("[]").split(","))
    floor = [float(each) for each in rung["floor"].split(" to ")]
    goal = GOAL if rung["name"] == FAULT_TOLERANCE else None
    return Result(
        claim=f"ladder, {target}: step of `{rung['name']}`",
        command=result_file.command(),
        date=today(),
        ratio=Figure(value=float(value), low=low, high=high, unit="×", decimals=2),
        floor=Figure(value=1.0, low=floor[0], high=floor[1], unit="×", decimals=2),
        peer=Peer(name="1-torchrun"),
        goal="" if goal is None else f"≤ {goal:g}×",
        met="" if goal is None else ("yes" if float(value) <= goal else "no"),
        details={"loss": f"{rung['first_loss']:.3f} → {rung['last_loss']:.3f}", "step": f"{rung['step_s']:.3f} s"},
    )


if __name__ == "__main__":
    main()
