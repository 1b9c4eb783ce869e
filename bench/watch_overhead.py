"""Cost of all of Watch for a step: monitors, step clock and detectors on, off, and torchrun, in the same rounds.

.venv/bin/python -m bench.watch_overhead [--quick | --rounds N] [--only session] [--block-s S]

The program is the same DDP loop over Gloo, unmodified or with a Session. The sides of a group start once and then take
turns (bench/interleave.py). A block's figures are the median of its steps by the clock, and the CPU time of its ranks
for a step, which other work on the machine disturbs less. Two torchrun sides give the floor: what the machine cannot
tell apart.
"""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from statistics import median

from bench import result_file
from bench.contenders import Running, holdfast, torchrun
from bench.interleave import Block, Interleaved
from bench.paired_stats import OURS, PEER, PEER_AGAIN, Round, headline, interleave, say, table
from holdfast.job.spec import Watch
from holdfast.protocol.watch_levels import WatchLevel

GOAL = 1.005
ROUNDS, QUICK_ROUNDS = 12, 3
BLOCK_S = 2.0
OFF = "C off"
WATCH_OFF = tuple(
    f"watch.{name}={WatchLevel.OFF.value if isinstance(field.default, WatchLevel) else 'false'}"
    for name, field in Watch.model_fields.items()
    if isinstance(field.default, WatchLevel | bool)
)
"""Settings that turn every part off."""
GROUPS = {"unmodified": (), "session": ("session",)}
"""Arguments of the program in each group; torchrun's has none."""


def main() -> None:
    """Measure, and print a line per round and a table."""
    parser = argparse.ArgumentParser(prog="bench.watch_overhead", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--only", choices=GROUPS, help="only this program")
    parser.add_argument("--block-s", type=float, default=BLOCK_S)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ROUNDS} rounds")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    headline("cost of Watch: DDP step, Gloo, 2 nodes x 1 rank x 1 thread")
    say(f"A torchrun, B holdfast, C holdfast with {', '.join(WATCH_OFF)}")
    found: list[result_file.Result] = []
    for group, words in GROUPS.items():
        if options.only in (None, group):
            say(f"\n{group}")
            rounds = QUICK_ROUNDS if options.quick else options.rounds
            found += _results(group, *_measure(words, rounds, options.block_s))
    say("")
    say(table(("claim", "peer", "measured", "A/A floor", "met"), [
        (one.claim, str(one.peer), f"{one.ratio}", str(one.floor), one.met) for one in found
    ]))  # fmt: skip
    result_file.save(options.json, "Cost of Watch", found)


def _measure(words: tuple[str, ...], rounds: int, block_s: float) -> tuple[list[Round], list[Round]]:
    """Step times and CPU times of the sides of a group, in milliseconds."""
    sides: dict[str, Callable[[], AbstractContextManager[Running]]] = {
        PEER: lambda: torchrun("ddp_loop.py"),
        OURS: lambda: holdfast("ddp_loop.py", *words),
        PEER_AGAIN: lambda: torchrun("ddp_loop.py"),
        OFF: lambda: holdfast("ddp_loop.py", *words, settings=WATCH_OFF),
    }
    blocks: dict[str, list[Block]] = {name: [] for name in sides}

    def step_ms(name: str, side: Interleaved) -> float:
        blocks[name].append(side.run_block(block_s))
        return median(blocks[name][-1].steps_s) * 1e3

    with contextlib.ExitStack() as stack:
        live = {name: Interleaved(stack.enter_context(start())) for name, start in sides.items()}
        for side in live.values():
            side.run_block(block_s)
        timed = interleave({name: partial(step_ms, name, side) for name, side in live.items()}, rounds, unit="ms")
    return timed, [{name: each[index].ranks_ms_a_step for name, each in blocks.items()} for index in range(rounds)]


def _results(group: str, timed: Sequence[Round], used: Sequence[Round]) -> list[result_file.Result]:
    """The results of a group: by the clock and in CPU time, compared with the same without Watch and with torchrun."""
    program = "an unmodified DDP loop" if group == "unmodified" else "a DDP loop with a Session"
    found: list[result_file.Result] = []
    for what, rounds in (("step", timed), ("CPU of a step", used)):
        found.append(_result(f"{what} of {program}, all of Watch", rounds, OFF, "Watch off"))
        if group == "unmodified":
            found.append(_result(f"{what} of {program}, all of Watch", rounds, PEER, "torchrun"))
    return found


def _result(claim: str, rounds: Sequence[Round], other: str, peer: str) -> result_file.Result:
    """The result compared with another side; the floor is that of the two torchrun sides."""
    against: list[Round] = []
    for each in rounds:
        theirs = math.sqrt(each[PEER] * each[PEER_AGAIN]) if other == PEER else each[other]
        noise = math.sqrt(each[PEER_AGAIN] / each[PEER])
        against.append({OURS: each[OURS], PEER: theirs / noise, PEER_AGAIN: theirs * noise})
    return result_file.from_rounds(claim, against, goal=GOAL, unit="ms", peer=peer)


if __name__ == "__main__":
    main()
