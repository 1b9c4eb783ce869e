"""Render: how long `holdfast render --on` a cluster takes, compared with xpk's dry run of the same job.

.venv/bin/python -m bench.render [--quick | --rounds N]

xpk is installed into a separate environment, which is deleted when the bench ends.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from bench import result_file
from bench.help import whole_process_s
from bench.paired_stats import OURS, PEER, PEER_AGAIN, compare, headline, interleave, say, table

GOAL = 0.5
ROUNDS, QUICK_ROUNDS = 12, 3
XPK = "xpk==1.16.0"
JOB = """\
name: train
image: registry.example/train:1
command: python train.py
nodes: 2
gpus_per_node: 8
recovery: {max_restarts: 5}
"""
PLACE = """\
kind: kubernetes
queue: train
volume: {claim: checkpoints}
fabric_verified: not here; so that nothing is left to be told
"""


def main() -> None:
    """Measure, and print a line per round and a table."""
    parser = argparse.ArgumentParser(prog="bench.render", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--quick", action="store_true", help=f"only {QUICK_ROUNDS} rounds")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    headline(f"render: `holdfast render --on` a cluster compared with `xpk workload create --dry-run` ({XPK})")
    with tempfile.TemporaryDirectory() as aside:
        peer, ours = _peer(Path(aside)), _ours(Path(aside))
        for command in (peer, ours):
            whole_process_s(command)  # The first run measures the disk.
        rounds = interleave(
            {name: partial(whole_process_s, command) for name, command in zip(SIDES, (peer, ours, peer), strict=True)},
            QUICK_ROUNDS if options.quick else options.rounds,
            unit="s",
        )
    result = compare(rounds)
    row = ("holdfast render --on", f"<= {GOAL}x", f"{result.ratio}x", str(result.floor), result.verdict(GOAL))
    found = result_file.from_rounds("`holdfast render --on` a cluster", rounds, goal=GOAL, unit="s", peer=XPK)
    result_file.save(options.json, "Rendering for a cluster", [found])
    say("")
    say(table(("claim", "goal", "measured", "A/A floor", "met"), [row]))


SIDES = (PEER, OURS, PEER_AGAIN)


def _ours(folder: Path) -> tuple[str, ...]:
    """A job with 20 files of shipped code; xpk ships none for a given image."""
    project = folder / "project"
    (project / ".holdfast" / "targets").mkdir(parents=True)
    (project / ".holdfast" / "targets" / "cluster.yaml").write_text(PLACE)
    (project / "job.yaml").write_text(JOB)
    for number in range(20):
        (project / f"part{number}.py").write_text("pass\n" * 200)
    holdfast = Path(sys.executable).with_name("holdfast")
    return (str(holdfast), "render", str(project / "job.yaml"), "--on", "cluster")


def _peer(folder: Path) -> tuple[str, ...]:
    """The same job for xpk, which contacts no server in a dry run."""
    environment = folder / "xpk"
    uv = str(Path(sys.executable).with_name("uv"))
    subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, environment], check=True)
    subprocess.run([uv, "pip", "install", "--quiet", "--python", environment / "bin" / "python", XPK], check=True)
    os.environ["HOME"] = str(folder)  # its settings directory
    options = {
        "--cluster": "c",
        "--workload": "train",
        "--project": "p",
        "--zone": "us-east5-a",
        "--device-type": "h100-80gb-8",
        "--num-nodes": "2",
        "--docker-image": "registry.example/train:1",
        "--command": "python train.py",
    }
    words = (word for option in options.items() for word in option)
    return (str(environment / "bin" / "xpk"), "workload", "create", "--dry-run", *words)


if __name__ == "__main__":
    main()
