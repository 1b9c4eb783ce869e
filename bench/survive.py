"""From kill -9 of a replica to the survivors' next commit, beyond a step's time; TorchFT's own Lighthouse beside it.

.venv/bin/python -m bench.survive [--quick | --rounds N] [--replicas N] [--only default|tuned]

The same program (tests/programs/holder.py) on both sides, with TorchFT's DDP mended in the same way: what differs is
who says that a replica is gone. The peer's Lighthouse misses its heartbeats, for 5 s as it comes (`default`) or for
250 ms looked at every 10 ms (`tuned`); holdfast is a whole run, killed by signal from outside. A figure is the longest
gap between two commits of the survivors after the kill, less their median gap before it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

from torchft.coordination import LighthouseServer

from bench.pairs import OURS, PEER, PEER_AGAIN, compare, headline, interleave, say, table
from holdfast import api
from holdfast.events import RanksStarted
from holdfast.events.log import read_events

PROGRAM = Path(__file__).parents[1] / "tests" / "programs" / "holder.py"
GOALS = {"default": 0.05, "tuned": 0.5}
HEARTBEATS = {"default": (5000, 100), "tuned": (250, 10)}
"""Milliseconds that the peer's Lighthouse waits for a heartbeat, and between its looks."""
ROUNDS, QUICK_ROUNDS = 10, 1
STEP_S = 0.1
BEFORE = 20
"""Steps together before the kill."""
VICTIM = 1
START_S, STALL_S = 240.0, 60.0


def main() -> None:
    """Measure, and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--only", choices=GOALS)
    options = parser.parse_args()
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    headline(f"kill -9 to the survivors' next commit, {options.replicas} replicas, beyond a step of {STEP_S:g} s")
    rows: list[tuple[str, ...]] = []
    for peer in [options.only] if options.only else GOALS:
        say(f"\nTorchFT's Lighthouse, {peer}")
        theirs = partial(_theirs, peer, options.replicas)
        sides = {PEER: theirs, OURS: partial(_ours, options.replicas), PEER_AGAIN: theirs}
        found = interleave(sides, rounds, unit="s")
        told = compare(found)
        ours = statistics.median(each[OURS] for each in found)
        goal = GOALS[peer]
        rows.append((peer, f"{ours:.3f} s", str(told.ratio), str(told.floor), f"{goal:g}", told.verdict(goal)))
    say("\n" + table(("peer", "holdfast", "ratio", "A/A floor", "goal", "met"), rows))


def _ours(replicas: int) -> float:
    """A whole run; the victim's process is known from its log."""
    with tempfile.TemporaryDirectory() as home:
        os.environ["HOLDFAST_HOME"] = home
        out = Path(home)
        command = (sys.executable, str(PROGRAM), f"{STEP_S}", home)
        overrides = (f"recovery.replicas={replicas}",)
        job = api.load_job(None, command=command, nodes=replicas, name="hold", overrides=overrides)
        run = api.start(job, "local", base=out)

        def victim() -> int:
            started = (event for event in read_events(run.events) if isinstance(event, RanksStarted))
            return next(each.ranks[0].pid for each in started if each.replica == VICTIM)

        try:
            return _stall(out, replicas, victim)
        finally:
            api.cancel(run, force=True)
            for _ in api.follow(run):
                pass


def _theirs(kind: str, replicas: int) -> float:
    """The program as TorchFT's own launcher starts it, and its Lighthouse in this process."""
    heartbeat_ms, tick_ms = HEARTBEATS[kind]
    lighthouse = LighthouseServer(
        bind="127.0.0.1:0",
        min_replicas=1,
        join_timeout_ms=60_000,
        quorum_tick_ms=tick_ms,
        heartbeat_timeout_ms=heartbeat_ms,
    )
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        stack.callback(lighthouse.shutdown)
        address = f"http://127.0.0.1:{lighthouse.address().rpartition(':')[2]}"
        started = [_replica(replica, replicas, address, Path(folder)) for replica in range(replicas)]
        for process in started:
            stack.callback(process.wait)
            stack.callback(process.kill)
        return _stall(Path(folder), replicas, lambda: started[VICTIM].pid)


def _replica(replica: int, replicas: int, lighthouse: str, out: Path) -> subprocess.Popen[bytes]:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    told = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "HOLDFAST_ATTEMPT": "0",
        "HOLDFAST_REPLICA": str(replica),
        "HOLDFAST_REPLICA_COUNT": str(replicas),
        "HOLDFAST_BATCH_WORLD_SIZE": str(replicas),
        "TORCHFT_LIGHTHOUSE": lighthouse,
    }
    command = (sys.executable, str(PROGRAM), f"{STEP_S}", str(out))
    log = (out / f"{replica}.log").open("wb")
    return subprocess.Popen(command, env=os.environ | told, stdout=log, stderr=log)


def _stall(out: Path, replicas: int, victim: Callable[[], int]) -> float:
    """Let them step together, kill one, and see how long the survivors' next commit takes beyond their usual."""
    notes = [out / f"{replica}.0.commits" for replica in range(replicas)]
    _wait_for(lambda: all(len(_commits(note)) >= BEFORE for note in notes), START_S)
    killed_at = time.time()
    os.kill(victim(), signal.SIGKILL)
    survivors = [note for replica, note in enumerate(notes) if replica != VICTIM]
    _wait_for(lambda: all(_commits(note)[-1] > killed_at + 2 * STEP_S for note in survivors), STALL_S)
    return max(_gap(_commits(note), killed_at) for note in survivors)


def _gap(commits: list[float], killed_at: float) -> float:
    gaps = [(later - earlier, later) for earlier, later in pairwise(commits)]
    usual = statistics.median(gap for gap, later in gaps if later <= killed_at)
    return max(0.0, max(gap for gap, later in gaps if later > killed_at) - usual)


def _commits(note: Path) -> list[float]:
    lines = note.read_text().split("\n")[:-1] if note.exists() else []
    return [float(line.split()[1]) for line in lines]


def _wait_for(ready: Callable[[], bool], within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while not ready():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {within_s:g} s")
        time.sleep(0.02)


if __name__ == "__main__":
    main()
