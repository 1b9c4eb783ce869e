"""Step time of a DDP loop on Gloo: supervised by holdfast with each step reported, compared with torchrun.

.venv/bin/python -m bench.step_time [--quick | --casts N --rounds N] [--block-s S]

All sides start once and then take turns (bench/interleave.py); this repeats a few times with new processes. A block's
figure is the median of the steps that began and ended in it, without its first two.
"""

from __future__ import annotations

import argparse
import contextlib
from collections import defaultdict
from functools import partial
from pathlib import Path
from statistics import median

from bench import result_file
from bench.contenders import holdfast, torchrun
from bench.interleave import FOREIGN_SHARE, SETTLING_STEPS, Block, Interleaved
from bench.paired_stats import OURS, PEER, PEER_AGAIN, Round, compare, headline, interleave, percentile, say, table

GOAL = 1.005
STARTS, QUICK_STARTS = 4, 1
"""Starts of all sides: processes of one program differ by a percent for their lifetime, by their memory layout."""
ROUNDS, QUICK_ROUNDS = 10, 3
"""Rounds of each start."""
BLOCK_S = 2.0
"""Short enough that no side is frozen as long as torchrun's agents (15 s) or holdfast's (20 s) wait for each other."""
BARE_HOLDFAST, SESSION_ALONE = "C", "D"
COMPARED = (OURS, BARE_HOLDFAST, SESSION_ALONE)


def main() -> None:
    """Measure, and print a line per round and tables."""
    parser = argparse.ArgumentParser(prog="bench.step_time", description=__doc__)
    parser.add_argument("--casts", type=int, default=STARTS, help="how often all sides start again")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="rounds of each start")
    parser.add_argument("--block-s", type=float, default=BLOCK_S)
    parser.add_argument("--quick", action="store_true", help=f"one start of {QUICK_ROUNDS} rounds")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    headline("steady: DDP step, Gloo, 2 nodes x 1 rank x 1 thread")
    say("A torchrun, B holdfast with each step reported, C holdfast without session, D torchrun with session alone")
    sides = {
        PEER: lambda: torchrun("ddp_loop.py"),
        OURS: lambda: holdfast("ddp_loop.py", "session"),
        PEER_AGAIN: lambda: torchrun("ddp_loop.py"),
        BARE_HOLDFAST: lambda: holdfast("ddp_loop.py"),
        SESSION_ALONE: lambda: torchrun("ddp_loop.py", "session"),
    }
    blocks: dict[str, list[Block]] = defaultdict(list)

    def measure(name: str, side: Interleaved) -> float:
        block = side.run_block(options.block_s)
        blocks[name].append(block)
        return median(block.steps_s) * 1e3

    casts: list[list[Round]] = []
    for _ in range(QUICK_STARTS if options.quick else options.casts):
        with contextlib.ExitStack() as stack:
            live = {name: Interleaved(stack.enter_context(start())) for name, start in sides.items()}
            for side in live.values():
                side.run_block(options.block_s)
            casts.append(
                interleave(
                    {name: partial(measure, name, side) for name, side in live.items()},
                    QUICK_ROUNDS if options.quick else options.rounds,
                    unit="ms",
                )
            )
    result_file.save(options.json, "Cost of supervision", _print_tables(casts, blocks))


def _print_tables(casts: list[list[Round]], blocks: dict[str, list[Block]]) -> list[result_file.Result]:
    rounds = [each for cast in casts for each in cast]
    slow = [
        {name: percentile(each[index].steps_s, 90) for name, each in blocks.items()} for index in range(len(rounds))
    ]
    rows: list[tuple[str, ...]] = []
    found: list[result_file.Result] = []
    for claim, measured, ours in (
        ("step of a DDP loop, each step reported", rounds, OURS),
        ("step of a DDP loop, each step reported, p90", slow, OURS),
        ("step of a DDP loop without a Session", rounds, BARE_HOLDFAST),
        ("step of a DDP loop under torchrun with only the Session", rounds, SESSION_ALONE),
    ):
        result = compare(measured, ours=ours)
        found.append(result_file.from_rounds(claim, measured, goal=GOAL, unit="ms", peer="torchrun", ours=ours))
        rows.append(
            (claim, f"<= {GOAL}x", f"{result.ratio}x", str(result.floor), str(len(measured)), result.verdict(GOAL))
        )
    say("")
    say(table(("claim", "goal", "measured", "A/A floor", "rounds", "met"), rows))
    say("")
    each_cast = [
        (f"start {index}", *(f"{compare(cast, ours=name).ratio.median:.3f}" for name in COMPARED), _floor(cast))
        for index, cast in enumerate(casts, 1)
    ]
    say(table(("median step over A", *COMPARED, PEER_AGAIN), each_cast))
    say("")
    own: list[tuple[str, ...]] = []
    for name, what in (
        (PEER, "torchrun"),
        (PEER_AGAIN, "torchrun again"),
        (OURS, "holdfast, steps reported"),
        (BARE_HOLDFAST, "holdfast, no session"),
        (SESSION_ALONE, "torchrun, session alone"),
    ):
        steps_ms = [step_s * 1e3 for block in blocks[name] for step_s in block.steps_s]
        disturbed = sum(block.foreign_share > FOREIGN_SHARE for block in blocks[name])
        row = (what, f"{median(steps_ms):.2f}", _cpu_ms_a_step(blocks[name]), str(len(steps_ms)), str(disturbed))
        own.append(row)
    head = ("side", "step, median ms", "CPU of its supervisors, ms a step", "steps", "blocks disturbed all the same")
    say(table(head, own))
    return found


def _floor(cast: list[Round]) -> str:
    return f"{compare(cast).floor.median:.3f}"


def _cpu_ms_a_step(blocks: list[Block]) -> str:
    steps = sum(len(block.steps_s) + SETTLING_STEPS for block in blocks)
    roles = sorted({role for block in blocks for role in block.supervisors_s})
    each = {role: sum(block.supervisors_s.get(role, 0.0) for block in blocks) / steps * 1e3 for role in roles}
    return f"{sum(each.values()):.2f} ({', '.join(f'{role} {ms:.2f}' for role, ms in each.items())})"


if __name__ == "__main__":
    main()
