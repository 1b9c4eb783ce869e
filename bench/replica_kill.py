"""From kill -9 of a replica to the survivors' next commit, and to the killed one's; compared with TorchFT's Lighthouse.

.venv/bin/python -m bench.replica_kill [--quick | --rounds N] [--replicas N] [--only default|tuned | --nccl-like]

Both sides run the same program (tests/programs/replica_trainer.py), with the same fix for TorchFT's DDP. They differ in
what detects the loss of a replica, and what restarts it. The peer's Lighthouse waits for missing heartbeats, for 5 s by
default (`default`) or for 250 ms checked every 10 ms (`tuned`), and its replica restarts, cold, as soon as it has died.
holdfast is a whole run, killed by a signal from outside, at a random moment within a step (the same for every side of a
round), once the next start of every rank is prewarmed.

With --nccl-like holdfast alone is measured, on a group that fails like NCCL (tests/programs/nccl_like.py): no call
reports a loss, and only the agent's notice ends the survivors' wait.

Two figures: the longest gap between two commits of the survivors after the kill, less their median gap before it; and
full strength, from the kill to the first commit of the killed replica.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torchft.coordination import LighthouseServer

from bench import result_file
from bench.paired_stats import OURS, PEER, PEER_AGAIN, Round, compare, headline, interleave, say, table
from bench.replica_program import START_S, STEP_S, RunningReplicas, under_holdfast, under_torchft, wait_for
from holdfast.events import RanksPrewarmed, RanksStarted
from holdfast.events.log import read_events

GOALS = {"default": 0.05, "tuned": 0.5}
"""Seconds of the survivors' gap, by the peer's Lighthouse."""
PEERS = {"default": "TorchFT", "tuned": "TorchFT, heartbeat 250 ms"}
STRENGTH_GOAL = 0.3
HEARTBEATS = {"default": (5000, 100), "tuned": (250, 10)}
"""Milliseconds that the peer's Lighthouse waits for a heartbeat, and between its checks."""
ROUNDS, QUICK_ROUNDS = 10, 1
NCCL_LIKE_GOAL_S = STEP_S + 0.2
"""The step in flight is lost, and the loss is known and the survivors are connected again within 0.2 s."""
VICTIM = 1
BACK_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Turn:
    """The cost of one kill."""

    gap_s: float
    strength_s: float


def main() -> None:
    """Measure, and print the ratios."""
    parser = argparse.ArgumentParser(
        prog="bench.replica_kill", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--only", choices=GOALS)
    parser.add_argument("--nccl-like", action="store_true")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    headline(f"kill -9 of one of {options.replicas} replicas, steps of {STEP_S:g} s")
    if options.nccl_like:
        result_file.save(options.json, "Loss of a replica", _measure_nccl_like(options.replicas, rounds))
        return
    found: list[result_file.Result] = []
    for peer in [options.only] if options.only else GOALS:
        say(f"\nTorchFT's Lighthouse, {peer}: the survivors' gap, beyond a step")
        theirs = partial(_theirs, peer, options.replicas)
        sides = {PEER: theirs, OURS: partial(_ours, options.replicas), PEER_AGAIN: theirs}
        gaps, strengths = _measured(sides, rounds)
        figures = (("survivors' gap", gaps, GOALS[peer]), ("full strength", strengths, STRENGTH_GOAL))
        rows = [_row(what, turns, goal) for what, turns, goal in figures]
        killed, name = f"one of {options.replicas} replicas killed", PEERS[peer]
        found += [
            result_file.from_rounds(f"{killed} → the others' next commit", gaps, goal=GOALS[peer], unit="s", peer=name),
            result_file.from_rounds(
                f"{killed} → full strength, prewarmed", strengths, goal=STRENGTH_GOAL, unit="s", peer=name
            ),
        ]
        say("\n" + table((peer, "holdfast", "TorchFT", "ratio", "A/A floor", "goal", "met"), rows))
    result_file.save(options.json, "Loss of a replica", found)


def _measure_nccl_like(replicas: int, rounds: int) -> list[result_file.Result]:
    """Measure the survivors' gap on the group that fails like NCCL, and print it."""
    draw = random.Random(0)
    turns: list[Turn] = []
    for number in range(rounds):
        turns.append(_ours(replicas, draw.uniform(0, STEP_S), nccl_like=True))
        say(f"round {number + 1}: gap {turns[-1].gap_s:.3f} s, full strength {turns[-1].strength_s:.3f} s")
    longest = max(turn.gap_s for turn in turns)
    claim = f"one of {replicas} replicas killed, on a group that fails like NCCL → the others' next commit, longest"
    result = result_file.absolute(claim, longest, "s", goal=NCCL_LIKE_GOAL_S, decimals=3)
    gaps, strengths = (statistics.median(each) for each in zip(*((t.gap_s, t.strength_s) for t in turns), strict=True))
    say(f"survivors' gap beyond a step: median {gaps:.3f} s, longest {longest:.3f} s")
    say(f"goal: {result.goal} (one step and 0.2 s), met: {result.met}; full strength: median {strengths:.3f} s")
    return [result]


def _measured(sides: Mapping[str, Callable[[float], Turn]], rounds: int) -> tuple[list[Round], list[Round]]:
    """The survivors' gaps and the times to full strength."""
    strengths: dict[str, list[float]] = defaultdict(list)

    def side(name: str) -> Callable[[], float]:
        draw = random.Random(0)

        def turn() -> float:
            told = sides[name](draw.uniform(0, STEP_S))
            strengths[name].append(told.strength_s)
            return told.gap_s

        return turn

    gaps = interleave({name: side(name) for name in sides}, rounds, unit="s")
    return gaps, [dict(zip(strengths, each, strict=True)) for each in zip(*strengths.values(), strict=True)]


def _row(what: str, found: list[Round], goal: float) -> tuple[str, ...]:
    ours, theirs = (statistics.median(each[side] for each in found) for side in (OURS, PEER))
    told = compare(found)
    return what, f"{ours:.3f} s", f"{theirs:.3f} s", str(told.ratio), str(told.floor), f"{goal:g}", told.verdict(goal)


def _ours(replicas: int, delay_s: float, *, nccl_like: bool = False) -> Turn:
    """A whole run; the log gives the victim's process."""
    with (
        tempfile.TemporaryDirectory() as folder,
        under_holdfast(Path(folder), replicas, nccl_like=nccl_like) as (holders, run),
    ):

        def is_warm() -> bool:
            return sum(isinstance(event, RanksPrewarmed) for event in read_events(run.events)) >= replicas

        def kill() -> None:
            started = (event for event in read_events(run.events) if isinstance(event, RanksStarted))
            os.kill(next(each.ranks[0].pid for each in started if each.replica == VICTIM), signal.SIGKILL)

        wait_for(is_warm, START_S)
        return _turn(holders, delay_s, kill)


def _theirs(kind: str, replicas: int, delay_s: float) -> Turn:
    """The program alone, and its Lighthouse in this process."""
    heartbeat_ms, tick_ms = HEARTBEATS[kind]
    lighthouse = LighthouseServer(
        bind="127.0.0.1:0",
        min_replicas=1,
        join_timeout_ms=60_000,
        quorum_tick_ms=tick_ms,
        heartbeat_timeout_ms=heartbeat_ms,
    )
    address = f"http://127.0.0.1:{lighthouse.address().rpartition(':')[2]}"
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            under_torchft(Path(folder), replicas, address) as (holders, start),
        ):
            started = [start(replica, 0) for replica in range(replicas)]

            def kill() -> None:
                started[VICTIM].kill()
                started[VICTIM].wait()
                start(VICTIM, 1)

            return _turn(holders, delay_s, kill)
    finally:
        lighthouse.shutdown()


def _turn(holders: RunningReplicas, delay_s: float, kill: Callable[[], None]) -> Turn:
    """Let the replicas step together, kill one, and measure the survivors' gap and the victim's next commit."""
    holders.settle()
    time.sleep(delay_s)
    killed_at = time.time()
    kill()
    gap_s = max(holders.gap_s(each, killed_at) for each in range(holders.replicas) if each != VICTIM)
    wait_for(lambda: bool(holders.commits(VICTIM, 1)), BACK_S)
    return Turn(gap_s=gap_s, strength_s=holders.commits(VICTIM, 1)[0] - killed_at)


if __name__ == "__main__":
    main()
