"""What peer checkpoints (every rank's state in another node's memory) cost a step, compared with steps without them.

.venv/bin/python -m bench.peer_checkpoints [--quick | --rounds N] [--state-mib N ...] [--block-s S]

The same program (bench/programs/peer_checkpoint_loop.py) over two nodes of one rank, all on this machine: without
copies (A, and A' again), with a copy as soon as the last is complete (B, `recovery.peer_checkpoints: auto`), and with
one every twenty steps (C). A step is a tenth of a second of a device's work, which leaves the cores idle, or about as
much CPU work, and then AdamW over the whole state. All sides run in parallel and take turns (bench/interleave.py). A
block's figure is the mean of its steps, for a copy affects few of them. Each state size starts all sides again.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence
from functools import partial
from statistics import fmean, median

from bench.contenders import Running, holdfast
from bench.interleave import Interleaved
from bench.paired_stats import OURS, PEER, PEER_AGAIN, compare, headline, interleave, say, table
from holdfast.events import StepCommitted
from holdfast.events.log import read_events

STATES_MIB = (12, 96, 240)
WORK = ("device", "cores")
SELDOM, SELDOM_STEPS = "C", 20
ROUNDS, QUICK_ROUNDS = 8, 1
BLOCK_S = 4.0
SIDES = {PEER: 0, OURS: "auto", SELDOM: SELDOM_STEPS, PEER_AGAIN: 0}
"""The value of `recovery.peer_checkpoints` on each side."""


def main() -> None:
    """Measure, and print a line per round and a table."""
    parser = argparse.ArgumentParser(prog="bench.peer_checkpoints", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="rounds of each state size and kind of step")
    parser.add_argument(
        "--state-mib", type=int, nargs="+", default=STATES_MIB, help="MiB of state per rank, a multiple of 12"
    )
    parser.add_argument("--block-s", type=float, default=BLOCK_S)
    parser.add_argument("--quick", action="store_true", help="one round of the smallest state")
    options = parser.parse_args()
    rounds, states = (QUICK_ROUNDS, STATES_MIB[:1]) if options.quick else (options.rounds, options.state_mib)
    headline("peercopies: a step with copies in another node's memory over one without, 2 nodes x 1 rank")
    rows = [row for by in WORK for state_mib in states for row in _measured(by, state_mib, rounds, options.block_s)]
    head = ("step's work", "state a rank", "copies", "with / without", "A/A floor", "step without", "a copy takes")
    say("")
    say(table(head, rows))


def _measured(by: str, state_mib: int, rounds: int, block_s: float) -> Sequence[tuple[str, ...]]:
    with contextlib.ExitStack() as stack:
        running = {name: stack.enter_context(_side(by, state_mib, copies)) for name, copies in SIDES.items()}
        live = {name: Interleaved(each) for name, each in running.items()}
        for side in live.values():
            side.run_block(block_s)

        def step_ms(side: Interleaved) -> float:
            return fmean(side.run_block(block_s).steps_s) * 1e3

        say(f"\n{state_mib} MiB a rank, work: {by}")
        measured = interleave({name: partial(step_ms, side) for name, side in live.items()}, rounds, unit="ms")
        took_s = {name: _copy_s(each) for name, each in running.items()}
    without = f"{median(each[PEER] for each in measured):.1f} ms"
    return [
        (by, f"{state_mib} MiB", words, f"{result.ratio}x", str(result.floor), without, f"{took_s[name]:.2f} s")
        for name, words in ((OURS, "auto"), (SELDOM, f"every {SELDOM_STEPS} steps"))
        for result in (compare(measured, ours=name),)
    ]


def _side(by: str, state_mib: int, copies: int | str) -> contextlib.AbstractContextManager[Running]:
    settings = (f"recovery.peer_checkpoints={copies}", "recovery.prewarm=false", "checkpoint.every_steps=1000000")
    return holdfast("peer_checkpoint_loop.py", str(state_mib), by, settings=settings)


def _copy_s(running: Running) -> float:
    """Seconds from the start of a copy until it is complete on both nodes, from the step reports."""
    logs = running.folder.glob("home/runs/*/events.jsonl")
    steps = [event for log in logs for event in read_events(log) if isinstance(event, StepCommitted)]
    return median([step.metrics["peer_checkpoint_s"] for step in steps if "peer_checkpoint_s" in step.metrics] or [0.0])


if __name__ == "__main__":
    main()
