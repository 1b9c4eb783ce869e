"""From kill -9 of a rank to the end of the first step by a full set of ranks; compared with torchrun.

.venv/bin/python -m bench.recovery [--quick | --rounds N] [--kills N] [--only pairs|ddp|stock|kills]

The same script on both sides checkpoints every step to the same disk. Each two kills hit both ranks, in random order
and at random moments within two steps (the same draw for every side of a round). More than two in a row of one rank
would be a crash loop to holdfast, because this script reports no steps. Four parts: pairs against torchrun with a store
for each attempt; a few more with DDP and torch.optim, whose import of torch._dynamo both sides pay; torchrun with its
defaults, measured only by its share of recoveries; and one long run of holdfast with many kills.

In pairs all sides start once and run in parallel, frozen (SIGSTOP to all their processes) except the one whose turn it
is: thawed, stepped, killed, watched until it has recovered, frozen again.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import random
import signal
import statistics
import time
from collections import defaultdict
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench import load_gate, result_file
from bench.contenders import Contender, ContenderFailed, Running, freeze, holdfast, thaw, torchrun, torchrun_fixed
from bench.paired_stats import OURS, PEER, PEER_AGAIN, compare, headline, interleave, percentile, say, table
from holdfast.events import (
    AnyEvent,
    AttemptStarted,
    RankExited,
    RanksPrewarmed,
    RanksStarted,
    RanksStopped,
    RecoveryDecided,
)
from holdfast.events.log import read_events

GOAL = 0.8
WARM_GOAL = 0.25
PARTS = ("pairs", "ddp", "warm", "stock", "kills")
RANKS = 2
ROUNDS, QUICK_ROUNDS = 20, 2
DDP_ROUNDS = 6
WARM_ROUNDS = 12
WARM_S = 180.0
"""Longest time for the imports of a next start, while ranks are running."""
KILLS, QUICK_KILLS = 100, 3
STOCK_TRIES, QUICK_STOCK_TRIES = 8, 1
START_S = 90.0
RECOVER_S = 30.0
"""A side without a step by then has not recovered."""
STEP_S = 0.06
SETTLED_STEPS = 3
"""Steps of an attempt before its kill."""

Phases = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """One kill and its recovery, in seconds."""

    victim: int
    total_s: float
    """Kill to the end of the first step of a full set of new ranks."""
    redone: int
    """Steps that a full set had finished before the kill and that were recomputed."""
    redone_s: float
    """Seconds of those steps the second time, except the first of the attempt, which is in `total_s`."""
    phases: Phases


@dataclass(frozen=True, kw_only=True)
class _Incarnation:
    """One process of a rank: when it reached each mark."""

    pid: int
    marks: dict[str, float]
    steps: dict[int, float]


class _Ranks:
    """The records of a run's ranks."""

    def __init__(self, out: Path) -> None:
        self._paths = [out / f"rank-{rank}" for rank in range(RANKS)]

    def newest(self) -> list[_Incarnation] | None:
        """The newest process of every rank; None while a rank has none."""
        lives = [_incarnations(path) for path in self._paths]
        return [each[-1] for each in lives] if all(lives) else None

    def whole_steps(self, excluded: frozenset[int] = frozenset()) -> dict[int, float]:
        """Steps that all newest processes have finished, with the end of each; none while one is in `excluded`."""
        newest = self.newest()
        if newest is None or any(life.pid in excluded for life in newest):
            return {}
        return {step: max(life.steps[step] for life in newest) for step in _common(newest)}


def main() -> None:
    """Measure the selected parts, and print a line per kill and tables."""
    parser = argparse.ArgumentParser(prog="bench.recovery", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--kills", type=int, default=KILLS, help="kills in the one long run of holdfast")
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--quick", action="store_true", help="a few kills of each part")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    headline("recovery: kill -9 of a rank to the end of the first step by a full set, 2 nodes x 1 rank, Gloo")
    parts = (options.only,) if options.only else PARTS
    tables: list[str] = []
    found: list[result_file.Result] = []
    if "pairs" in parts:
        tables.append(_pairs(found, QUICK_ROUNDS if options.quick else options.rounds))
    if "ddp" in parts:
        tables.append(_pairs(found, QUICK_ROUNDS if options.quick else DDP_ROUNDS, "ddp"))
    if "warm" in parts:
        tables.append(_pairs(found, QUICK_ROUNDS if options.quick else WARM_ROUNDS, "ddp", goal=WARM_GOAL))
    if "stock" in parts:
        tables.append(_stock(QUICK_STOCK_TRIES if options.quick else STOCK_TRIES))
    if "kills" in parts:
        tables.append(_many(QUICK_KILLS if options.quick else options.kills))
    result_file.save(options.json, "Recovery from a killed rank", found)
    for each in tables:
        say("")
        say(each)


# Parts


def _pairs(found: list[result_file.Result], rounds: int, *words: str, goal: float = GOAL) -> str:
    """Compare holdfast and torchrun with a store for each attempt: one kill of each in every round.

    Where the goal is that of prewarmed starts, no rank is killed before its next start is prewarmed.
    """
    taken: dict[str, list[Recovery]] = defaultdict(list)

    def measure(name: str, side: _Interleaved) -> float:
        taken[name].append(side.turn())
        return taken[name][-1].total_s

    warm = goal == WARM_GOAL
    with contextlib.ExitStack() as stack:
        live: dict[str, _Interleaved] = {}
        for name, side in ((PEER, torchrun_fixed), (OURS, holdfast), (PEER_AGAIN, torchrun_fixed)):
            live[name] = _Interleaved(stack.enter_context(side("resumable_loop.py", *words)), name, warm=warm)
        done = interleave({name: partial(measure, name, side) for name, side in live.items()}, rounds, unit="s")
    result = compare(done)
    ours, peer = taken[OURS], [*taken[PEER], *taken[PEER_AGAIN]]
    claim = f"`kill -9` of a {'DDP ' if words else ''}rank{', prewarmed' if warm else ''} → first complete step"
    found.append(result_file.from_rounds(claim, done, goal=goal, unit="s", peer="torchrun"))
    rows = [
        (
            claim,
            f"<= {goal}x",
            f"{result.ratio}x",
            str(result.floor),
            f"{_median(ours):.2f} s",
            f"{_median(peer):.2f} s",
            f"{len(ours)} / {len(peer)}",
            result.verdict(goal),
        )
    ]
    head = ("claim", "goal", "measured", "A/A floor", "holdfast, median", "torchrun, median", "kills", "met")
    return "\n\n".join((table(head, rows), _redone(ours, peer), _breakdown(ours, peer)))


def _stock(tries: int) -> str:
    """Run torchrun with its defaults: how often it recovers."""
    recovered: list[Recovery] = []
    draw = random.Random(0)
    failed = 0
    while len(recovered) + failed < tries:
        try:
            for recovery in _each_kill(torchrun, tries - len(recovered) - failed, draw, "stock"):
                recovered.append(recovery)
        except ContenderFailed as error:
            failed += 1
            say(f"  stock  not recovered: {str(error).splitlines()[0]}")
    share = f"{len(recovered)}/{tries}"
    median = f"{_median(recovered):.2f} s" if recovered else "-"
    return table(("torchrun, default", "recovered", "median of those"), [("kill -9 of a rank", share, median)])


def _many(kills: int) -> str:
    """One long run of holdfast, killed repeatedly."""
    recovered: list[Recovery] = []
    story = ""
    try:
        for recovery in _each_kill(holdfast, kills, random.Random(1), "long"):
            recovered.append(recovery)
    except ContenderFailed as error:
        story = f"\n\nIt ended there: {error}"
    totals = [recovery.total_s for recovery in recovered]
    head = ("one run of holdfast", "recovered", "median", "p99", "longest", "redone steps, median")
    row = (
        f"{kills} kills",
        f"{len(recovered)}/{kills}",
        f"{statistics.median(totals):.2f} s" if totals else "-",
        f"{percentile(totals, 99):.2f} s" if totals else "-",
        f"{max(totals):.2f} s" if totals else "-",
        f"{statistics.median(recovery.redone for recovery in recovered):g}" if totals else "-",
    )
    return table(head, [row]) + story


# Kills


class _Interleaved:
    """A side that is frozen except during its turns."""

    def __init__(self, running: Running, name: str, *, warm: bool) -> None:
        self._running = running
        self._name = name
        self._ranks = _Ranks(running.out)
        self._draw = random.Random(0)
        self._victims = _victims(self._draw)
        _settle(running, self._ranks)
        if warm and _events(running):
            _wait_until_warm(running)
        freeze(running.pids())

    def turn(self) -> Recovery:
        """Run, lose a rank, recover."""
        load_gate.wait_until_idle()
        thaw(self._running.pids())
        recovery = _kill(self._running, self._ranks, next(self._victims), self._draw)
        _settle(self._running, self._ranks)
        freeze(self._running.pids())
        _tell(self._name, recovery)
        return recovery


def _each_kill(side: Contender, count: int, draw: random.Random, name: str) -> Generator[Recovery]:
    """Kill a rank of one run `count` times, each time after it has recovered; raise when it does not."""
    with side("resumable_loop.py") as running:
        yield from kill_each(running, name, count, draw)


def kill_each(
    running: Running, name: str, count: int = RANKS, draw: random.Random | None = None, within_s: float = RECOVER_S
) -> Generator[Recovery]:
    """Kill ranks in a random order, each after the previous recovery; raise when one does not recover."""
    ranks, draw = _Ranks(running.out), draw or random.Random(0)
    for index, victim in zip(range(count), _victims(draw), strict=False):
        _settle(running, ranks, max(START_S, within_s))
        recovery = _kill(running, ranks, victim, draw, within_s)
        _tell(f"{name} {index + 1}/{count}", recovery)
        yield recovery


def _settle(running: Running, ranks: _Ranks, within_s: float = START_S) -> None:
    """Wait until the ranks have finished a few steps."""
    if not running.wait_for(lambda: len(ranks.whole_steps()) >= SETTLED_STEPS, within_s):
        raise ContenderFailed(f"no {SETTLED_STEPS} steps within {within_s:g} s\n{running.last_words()}")


def _wait_until_warm(running: Running) -> None:
    """Wait until the imports for the next start of every rank are done."""

    def warm() -> bool:
        return len([event for event in _events(running) if isinstance(event, RanksPrewarmed)]) >= RANKS

    if not running.wait_for(warm, WARM_S):
        raise ContenderFailed(f"not prewarmed within {WARM_S:g} s\n{running.last_words()}")


def _tell(who: str, recovery: Recovery) -> None:
    phases = "  ".join(f"{phase} {seconds:.3f}" for phase, seconds in recovery.phases.items())
    say(f"  {who:12s} rank {recovery.victim}  {recovery.total_s:.3f} s  recomputed {recovery.redone}  {phases}")


def _victims(draw: random.Random) -> Iterator[int]:
    """Ranks to kill: all of them in a random order, repeatedly."""
    while True:
        yield from draw.sample(range(RANKS), RANKS)


def _kill(running: Running, ranks: _Ranks, victim: int, draw: random.Random, within_s: float = RECOVER_S) -> Recovery:
    before = ranks.newest()
    assert before is not None
    seen = len(ranks.whole_steps())
    running.wait_for(lambda: len(ranks.whole_steps()) > seen, START_S)
    time.sleep(draw.uniform(0.0, 2 * STEP_S))
    killed_at = time.time()
    os.kill(before[victim].pid, signal.SIGKILL)
    old = frozenset(life.pid for life in before)
    if not running.wait_for(lambda: bool(ranks.whole_steps(old)), within_s):
        raise ContenderFailed(f"no step within {within_s:g} s of a kill\n{running.last_words()}")
    # Steps finished before the kill, read now that no more are written.
    last = max(_common(_of(running.out, old)), default=0)
    running.wait_for(lambda: max(ranks.whole_steps(old), default=0) > last, within_s)
    steps = ranks.whole_steps(old)
    first = min(steps)
    newest = ranks.newest()
    assert newest is not None
    again = [step for step in steps if step <= last]
    return Recovery(
        victim=victim,
        total_s=steps[first] - killed_at,
        redone=len(again),
        redone_s=steps[max(again)] - steps[first] if again else 0.0,
        phases=_phases(running, killed_at, newest, steps[first]),
    )


def _common(lives: Sequence[_Incarnation]) -> list[int]:
    """Steps that all of these have finished."""
    return [step for step in sorted(lives[0].steps) if all(step in life.steps for life in lives)]


def _of(out: Path, pids: frozenset[int]) -> list[_Incarnation]:
    lives = [life for rank in range(RANKS) for life in _incarnations(out / f"rank-{rank}")]
    return [life for life in lives if life.pid in pids]


def _incarnations(path: Path) -> list[_Incarnation]:
    """A rank's processes, oldest first, from its complete lines."""
    lives: list[_Incarnation] = []
    text = path.read_text() if path.exists() else ""
    for line in text[: text.rfind("\n") + 1].splitlines():
        pid, what, step, at = line.split()
        if not lives or lives[-1].pid != int(pid):
            lives.append(_Incarnation(pid=int(pid), marks={}, steps={}))
        if what == "step":
            lives[-1].steps[int(step)] = float(at)
        else:
            lives[-1].marks[what] = float(at)
    return lives


# Breakdown


def _phases(running: Running, killed_at: float, lives: Sequence[_Incarnation], stepped_at: float) -> Phases:
    """Seconds between marks; a mark is reached when the last rank has reached it."""
    passed = {what: max(life.marks[what] for life in lives) for what in ("born", "imported", "met", "loaded")}
    boundaries = {**_decisions(running, killed_at), "python": passed["born"]}
    boundaries |= {"import": passed["imported"], "meet": passed["met"], "load": passed["loaded"], "step": stepped_at}
    phases: Phases = {}
    since = killed_at
    for name, at in boundaries.items():
        phases[name] = at - since
        since = at
    return phases


def _decisions(running: Running, killed_at: float) -> dict[str, float]:
    """When holdfast saw the death, had stopped the rest, and had restarted all, by its log; nothing for torchrun."""
    events = [event for event in _events(running) if event.at >= killed_at]
    if not events:
        return {}
    detected = min(event.at for event in events if isinstance(event, RankExited))
    stopped = max(event.at for event in events if isinstance(event, RanksStopped))
    started = max(event.at for event in events if isinstance(event, RanksStarted))
    decided = [event.at for event in events if isinstance(event, RecoveryDecided | AttemptStarted)]
    assert decided, "a recovery was decided"
    return {"detect": detected, "stop": stopped, "start": started}


def _events(running: Running) -> list[AnyEvent]:
    """The log of holdfast; nothing for torchrun."""
    logs = list((running.folder / "home" / "runs").glob("*/events.jsonl"))
    return read_events(logs[0]) if logs else []


def _breakdown(ours: Sequence[Recovery], peer: Sequence[Recovery]) -> str:
    """Medians of each phase; torchrun's phases up to the start of the ranks are one."""
    supervisor = ("detect", "stop", "start", "python")
    rows = [(name, _phase(ours, (name,)), "") for name in supervisor]
    rows.append(("kill to the first line of both new ranks", _phase(ours, supervisor), _phase(peer, supervisor)))
    rows.extend((name, _phase(ours, (name,)), _phase(peer, (name,))) for name in ("import", "meet", "load", "step"))
    return table(("phase, median", "holdfast", "torchrun"), rows)


def _phase(recoveries: Sequence[Recovery], names: Sequence[str]) -> str:
    sums = [sum(recovery.phases.get(name, 0.0) for name in names) for recovery in recoveries]
    return f"{statistics.median(sums):.3f} s"


def _redone(ours: Sequence[Recovery], peer: Sequence[Recovery]) -> str:
    rows: list[tuple[str, ...]] = []
    for name, each in (("holdfast", ours), ("torchrun", peer)):
        steps, seconds = (one.redone for one in each), (one.redone_s for one in each)
        rows.append((name, f"{statistics.mean(steps):.2f}", f"{statistics.mean(seconds):.3f} s"))
    return table(("redone work, apart", "steps a kill, mean", "seconds after the first step, mean"), rows)


def _median(recoveries: Sequence[Recovery]) -> float:
    return statistics.median(recovery.total_s for recovery in recoveries) if recoveries else math.nan


if __name__ == "__main__":
    main()
