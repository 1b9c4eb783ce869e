"""Step time of a DDP loop on Gloo: supervised by holdfast with each step reported, beside the same under torchrun.

.venv/bin/python -m bench.steady [--quick | --casts N --rounds N] [--block-s S]

All sides are started once and then live side by side, but only one of them at a time: the others are frozen whole
(SIGSTOP to ranks, agents, controller, command). So the sides alternate every few seconds without paying for a start
each time; a few times over, everything is started anew. A block's figure is the median of the steps that began and
ended in it, without its first two. A block during which others used more than a few percent of the machine is taken
again, a few times; how it came out plays no part.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median

from bench import quiet
from bench.pairs import OURS, PEER, PEER_AGAIN, Round, compare, headline, interleave, percentile, say, table
from bench.sides import Running, SideFailed, freeze, holdfast, prefer, thaw, torchrun
from holdfast.host.processes import marked

GOAL = 1.005
CASTS, QUICK_CASTS = 4, 1
"""How often all sides are started: processes of one program differ by a percent for life, as their memory lies."""
ROUNDS, QUICK_ROUNDS = 10, 3
"""In each cast."""
BLOCK_S = 2.0
"""Short enough that no side is away as long as torchrun's agents (15 s) or holdfast's (20 s) wait for each other."""
SETTLING_STEPS = 2
WARM_STEPS = 15
START_S = 120.0
BARE_HOLDFAST, SESSION_ALONE = "C", "D"
COMPARED = (OURS, BARE_HOLDFAST, SESSION_ALONE)
FOREIGN_SHARE = 0.05
"""Share of the machine that others may use during a block."""
TRIES = 2
ROLES = ("holdfast.agent", "holdfast.server", "keeper", "torchrun", "holdfast run")
"""How a supervising process is known by its command line."""


@dataclass(frozen=True, kw_only=True)
class _Block:
    """One side's turn."""

    steps_s: list[float]
    supervisors_s: dict[str, float]
    """CPU seconds of its processes that are not ranks, by role."""
    foreign_share: float


class _Alternating:
    """A side that is frozen but for its turns."""

    def __init__(self, running: Running) -> None:
        self._running = running
        self._log = running.out / "steps"
        if not running.wait_for(lambda: len(_ends(self._log)) >= WARM_STEPS, START_S):
            raise SideFailed(f"no {WARM_STEPS} steps within {START_S:g} s\n{running.last_words()}")
        self._pids = running.pids()
        ranks = set(marked(self._pids, WORLD_SIZE="2"))
        self._roles = {pid: _role(pid) for pid in self._pids if pid not in ranks}
        prefer(self._pids)
        freeze(self._pids)

    def turn(self, block_s: float) -> _Block:
        """Go on for a while, undisturbed if that can be had; the steps that were taken whole in it."""
        block = self._block(block_s)
        for _ in range(TRIES - 1):
            if block.foreign_share <= FOREIGN_SHARE:
                break
            quiet.wait()
            block = self._block(block_s)
        return block

    def _block(self, block_s: float) -> _Block:
        before = {pid: quiet.used_s(pid) for pid in self._pids}
        busy_s, began = quiet.busy_s(), time.time()
        thaw(self._pids)
        time.sleep(block_s)
        freeze(self._pids)
        ended, busy_s = time.time(), quiet.busy_s() - busy_s
        if self._running.ended():
            raise SideFailed(f"a side ended\n{self._running.last_words()}")
        used = {pid: quiet.used_s(pid) - seconds for pid, seconds in before.items()}
        supervisors_s: dict[str, float] = defaultdict(float)
        for pid, role in self._roles.items():
            supervisors_s[role] += used[pid]
        ends = [at for at in _ends(self._log) if began <= at <= ended]
        steps_s = [later - earlier for earlier, later in pairwise(ends)][SETTLING_STEPS:]
        if not steps_s:
            raise SideFailed(f"no step within {block_s:g} s\n{self._running.last_words()}")
        foreign_share = (busy_s - sum(used.values())) / (ended - began) / quiet.CORES
        return _Block(steps_s=steps_s, supervisors_s=supervisors_s, foreign_share=foreign_share)


def _role(pid: int) -> str:
    words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return next((role for role in ROLES if role in words), "other")


def main() -> None:
    """Measure, and print a line a round and tables."""
    parser = argparse.ArgumentParser(prog="bench.steady", description=__doc__)
    parser.add_argument("--casts", type=int, default=CASTS, help="how often all sides are started anew")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="rounds of each cast")
    parser.add_argument("--block-s", type=float, default=BLOCK_S)
    parser.add_argument("--quick", action="store_true", help=f"one cast of {QUICK_ROUNDS} rounds")
    options = parser.parse_args()
    headline("steady: DDP step, Gloo, 2 nodes x 1 rank x 1 thread")
    say("A torchrun, B holdfast with each step reported, C holdfast without session, D torchrun with session alone")
    sides = {
        PEER: lambda: torchrun("loop.py"),
        OURS: lambda: holdfast("loop.py", "session"),
        PEER_AGAIN: lambda: torchrun("loop.py"),
        BARE_HOLDFAST: lambda: holdfast("loop.py"),
        SESSION_ALONE: lambda: torchrun("loop.py", "session"),
    }
    blocks: dict[str, list[_Block]] = defaultdict(list)

    def measure(name: str, side: _Alternating) -> float:
        block = side.turn(options.block_s)
        blocks[name].append(block)
        return median(block.steps_s) * 1e3

    casts: list[list[Round]] = []
    for _ in range(QUICK_CASTS if options.quick else options.casts):
        with contextlib.ExitStack() as stack:
            live = {name: _Alternating(stack.enter_context(start())) for name, start in sides.items()}
            for side in live.values():
                side.turn(options.block_s)
            casts.append(
                interleave(
                    {name: partial(measure, name, side) for name, side in live.items()},
                    QUICK_ROUNDS if options.quick else options.rounds,
                    unit="ms",
                )
            )
    _print_tables(casts, blocks)


def _print_tables(casts: list[list[Round]], blocks: dict[str, list[_Block]]) -> None:
    rounds = [each for cast in casts for each in cast]
    slow = [
        {name: percentile(each[index].steps_s, 90) for name, each in blocks.items()} for index in range(len(rounds))
    ]
    rows: list[tuple[str, ...]] = []
    for claim, measured, ours in (
        ("B: median step, supervised", rounds, OURS),
        ("B: p90 step, supervised", slow, OURS),
        ("C: median step, holdfast without session", rounds, BARE_HOLDFAST),
        ("D: median step, torchrun with session alone", rounds, SESSION_ALONE),
    ):
        result = compare(measured, ours=ours)
        rows.append(
            (claim, f"<= {GOAL}x", f"{result.ratio}x", str(result.floor), str(len(measured)), result.verdict(GOAL))
        )
    say("")
    say(table(("claim", "goal", "measured", "A/A floor", "rounds", "met"), rows))
    say("")
    each_cast = [
        (f"cast {index}", *(f"{compare(cast, ours=name).ratio.median:.3f}" for name in COMPARED), _floor(cast))
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


def _floor(cast: list[Round]) -> str:
    return f"{compare(cast).floor.median:.3f}"


def _cpu_ms_a_step(blocks: list[_Block]) -> str:
    steps = sum(len(block.steps_s) + SETTLING_STEPS for block in blocks)
    roles = sorted({role for block in blocks for role in block.supervisors_s})
    each = {role: sum(block.supervisors_s.get(role, 0.0) for block in blocks) / steps * 1e3 for role in roles}
    return f"{sum(each.values()):.2f} ({', '.join(f'{role} {ms:.2f}' for role, ms in each.items())})"


def _ends(log: Path) -> list[float]:
    text = log.read_text() if log.exists() else ""
    return [float(line) for line in text[: text.rfind("\n") + 1].splitlines()]


if __name__ == "__main__":
    main()
