"""Compares two sides on a machine with other load: interleaved, by ratios, with a noise floor.

A round measures the peer (A), holdfast (B) and the peer again (A'), in an order that changes from round to round, so
that drift and other load affect all of them alike. The claim is the median over rounds of B over the mean of A and A'.
The floor is the same for A' over A, two measurements of one thing.
"""

from __future__ import annotations

import itertools
import math
import os
import platform
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

PEER, OURS, PEER_AGAIN = "A", "B", "A'"
RESAMPLES = 5000
CONFIDENCE = 0.95

Round = Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A median and the interval that contains 95 of 100 bootstrap resamples of it."""

    median: float
    low: float
    high: float
    count: int

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The result of the rounds: the ratio, the floor, and whether a goal is met."""

    ratio: Estimate
    floor: Estimate

    def verdict(self, goal: float) -> str:
        """Whether the goal is met, or missed by no more than the noise of this machine."""
        if self.ratio.median <= goal:
            return "yes"
        unseen = self.ratio.low <= goal and self.floor.low <= self.ratio.median <= self.floor.high
        return "inside the floor" if unseen else "no"


def estimate(values: Sequence[float]) -> Estimate:
    """The median of values with its bootstrap interval; the same values give the same interval."""
    chance = random.Random(0)
    medians = sorted(statistics.median(chance.choices(values, k=len(values))) for _ in range(RESAMPLES))
    tail = (1 - CONFIDENCE) / 2
    return Estimate(
        median=statistics.median(values),
        low=medians[int(tail * RESAMPLES)],
        high=medians[int((1 - tail) * RESAMPLES) - 1],
        count=len(values),
    )


def compare(rounds: Sequence[Round], *, ours: str = OURS) -> Comparison:
    """Fold rounds into one ratio and its floor."""
    ratios = [each[ours] / math.sqrt(each[PEER] * each[PEER_AGAIN]) for each in rounds]
    floors = [each[PEER_AGAIN] / each[PEER] for each in rounds]
    return Comparison(ratio=estimate(ratios), floor=estimate(floors))


def orders(names: Sequence[str]) -> Callable[[int], tuple[str, ...]]:
    """The order of a round: every permutation in turn, shuffled once, so that no side has a fixed position."""
    every = list(itertools.permutations(names))
    random.Random(0).shuffle(every)
    return lambda index: every[index % len(every)]


def interleave(sides: Mapping[str, Callable[[], float]], rounds: int, *, unit: str) -> list[Round]:
    """Measure every side once per round and print a line for each round."""
    order_of = orders(tuple(sides))
    done: list[Round] = []
    for index in range(rounds):
        order = order_of(index)
        measured = {name: sides[name]() for name in order}
        done.append(measured)
        ratio = measured[OURS] / math.sqrt(measured[PEER] * measured[PEER_AGAIN])
        values = "  ".join(f"{name} {measured[name]:.3f}" for name in sorted(measured))
        floor = measured[PEER_AGAIN] / measured[PEER]
        say(f"{index + 1:3d}/{rounds}  {values} {unit}   B/A {ratio:.3f}   A'/A {floor:.3f}   order {' '.join(order)}")
    return done


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that `percent` of the values do not exceed."""
    ranked = sorted(values)
    return ranked[max(0, math.ceil(percent / 100 * len(ranked)) - 1)]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def machine() -> str:
    """One line about the hardware; nothing in it names the machine."""
    info = Path("/proc/cpuinfo").read_text()
    model = next((line.partition(":")[2].strip() for line in info.splitlines() if line.startswith("model name")), "")
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    cores = len(os.sched_getaffinity(0))
    load = ", ".join(f"{value:.2f}" for value in os.getloadavg())
    return f"{cores} cores of {model or platform.machine()}, {pages / 2**30:.0f} GiB, load {load} before"


def versions() -> str:
    """One line of the relevant versions."""
    python = ".".join(map(str, sys.version_info[:3]))
    return f"holdfast {version('holdfast')}, torch {version('torch')}, Python {python}, Linux {platform.release()}"


def headline(title: str) -> None:
    """Print the measurement, machine and time; from here on SIGTERM (from `timeout`) and SIGHUP also clean up."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    say(f"# {title}")
    say(f"{machine()}; {versions()}; {time.strftime('%Y-%m-%d %H:%M', time.gmtime())} UTC")


def say(words: str) -> None:
    """Print a line and flush it, since people watch a bench."""
    print(words, flush=True)
