"""kill -9 of quorum service, controller, and both: how long replicas pause, compared with TorchFT's Lighthouse.

.venv/bin/python -m bench.control_plane_loss [--quick | --rounds N]

Two replicas (tests/programs/replica_trainer.py). A figure is the longest gap between two commits of any replica after
the kill, less the median gap before it; no replica may restart meanwhile. The peer's Lighthouse is a separate process,
tuned (heartbeat 250 ms, tick 10 ms). A second one with its imports done takes the port immediately, and its replicas
retry ten times a second, as holdfast's do; with TorchFT's defaults they die. A pause of more than a minute counts as
`inf`.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from bench.paired_stats import estimate, headline, say, table
from bench.replica_program import STEP_S, RunningReplicas, free_port, under_holdfast, under_torchft
from holdfast import api
from holdfast.cli.event_text import event_line
from holdfast.events import FaultAction, FaultTarget
from holdfast.run_dir import RunDir

GOAL_S = 1.0
ROUNDS, QUICK_ROUNDS = 6, 1
REPLICAS = 2
WATCHED_S = 3.0
"""After a kill: a replica that needs no quorum takes another step or two before it asks."""
SHOWN = 40
"""Log lines that are shown for a run that does not resume."""
QUORUM, CONTROLLER, BOTH, LIGHTHOUSE = "quorum service", "controller", "both", "TorchFT's Lighthouse"


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(
        prog="bench.control_plane_loss", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int)
    options = parser.parse_args()
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    headline(f"kill -9 of who keeps the quorum: the replicas' pause, beyond a step of {STEP_S:g} s")
    draw = random.Random(0)
    sides: dict[str, Callable[[float], float]] = {
        QUORUM: partial(_ours, (FaultTarget.LIGHTHOUSE,)),
        CONTROLLER: partial(_ours, (FaultTarget.CONTROLLER,)),
        BOTH: partial(_ours, (FaultTarget.LIGHTHOUSE, FaultTarget.CONTROLLER)),
        LIGHTHOUSE: _theirs,
    }
    found: dict[str, list[float]] = {name: [] for name in sides}
    for index in range(rounds):
        delay_s = draw.uniform(0, STEP_S)
        for name in draw.sample(list(sides), len(sides)):
            found[name].append(sides[name](delay_s))
        say(f"{index + 1:3d}/{rounds}  " + "  ".join(f"{name} {gaps[-1]:.3f}" for name, gaps in found.items()) + " s")
    rows = [(name, str(estimate(gaps)), f"{max(gaps):.3f}", _verdict(name, gaps)) for name, gaps in found.items()]
    say("\n" + table(("killed", "pause, s", "longest", f"<= {GOAL_S:g} s"), rows))


def _verdict(name: str, gaps: list[float]) -> str:
    return "" if name == LIGHTHOUSE else "yes" if statistics.median(gaps) <= GOAL_S else "no"


def _ours(targets: tuple[FaultTarget, ...], delay_s: float) -> float:
    with tempfile.TemporaryDirectory() as folder, under_holdfast(Path(folder), REPLICAS) as (holders, run):
        try:
            return _pause(holders, delay_s, lambda: _drill(run, targets))
        except TimeoutError:
            say("\n".join(map(event_line, api.events(run)[-SHOWN:])))
            raise


def _drill(run: RunDir, targets: tuple[FaultTarget, ...]) -> None:
    for target in targets:
        api.inject_fault(run, target=target, index=0, action=FaultAction.KILL)


def _theirs(delay_s: float) -> float:
    port = free_port()
    keeping, next_one = (_lighthouse(port) for _ in range(2))
    _tell(keeping)

    def kill() -> None:
        keeping.kill()
        keeping.wait()
        _tell(next_one)

    env = {"TORCHFT_QUORUM_RETRIES": "6048000", "TORCHFT_QUORUM_TIMEOUT_SEC": "604800"}
    try:
        address = f"http://127.0.0.1:{port}"
        with tempfile.TemporaryDirectory() as out, under_torchft(Path(out), REPLICAS, address, env) as (holders, start):
            for replica in range(REPLICAS):
                start(replica, 0)
            return _pause(holders, delay_s, kill)
    except TimeoutError:
        return math.inf
    finally:
        for each in (keeping, next_one):
            each.kill()
            each.wait()


def _lighthouse(port: int) -> subprocess.Popen[bytes]:
    """A Lighthouse with its imports done, which listens once it receives a message."""
    given = f"bind='127.0.0.1:{port}', min_replicas=1, join_timeout_ms=60000, quorum_tick_ms=10"
    program = f"""
import sys, threading
from torchft.coordination import LighthouseServer
sys.stdin.readline()
kept = LighthouseServer({given}, heartbeat_timeout_ms=250)
threading.Event().wait()
"""
    return subprocess.Popen((sys.executable, "-c", program), stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)


def _tell(lighthouse: subprocess.Popen[bytes]) -> None:
    assert lighthouse.stdin is not None
    lighthouse.stdin.write(b"\n")
    lighthouse.stdin.flush()


def _pause(holders: RunningReplicas, delay_s: float, kill: Callable[[], None]) -> float:
    holders.settle()
    time.sleep(delay_s)
    killed_at = time.time()
    kill()
    pause_s = max(holders.gap_s(each, killed_at, WATCHED_S) for each in range(REPLICAS))
    if again := [each for each in range(REPLICAS) if holders.commits(each, 1)]:
        raise RuntimeError(f"replicas {again} restarted")
    return pause_s


if __name__ == "__main__":
    main()
