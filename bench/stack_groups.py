"""How often the stacks of a hang name the right parallel group, and how fast: `python -m bench.stack_groups`.

A hang is generated from what communication waits for, never from the answer. Every rank has a program: a
one-forward-one-backward pipeline whose layers communicate along tp, cp and ep, then the gradients along dp, then a norm
over all ranks. One rank stops before a call, one group's call never completes, or one message between stages is lost.
Every other rank then runs until it waits for a rank that does not arrive, and that is where its stack is taken. Stacks
are text as py-spy writes it, with helper threads and different frames within a call; some ranks have none, and some are
caught elsewhere.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from bench import pipeline_dumps
from holdfast.diagnose.rank_stack import Stack, training_stack
from holdfast.diagnose.stack_groups import StackVerdict, group_stacks
from holdfast.diagnose.stack_rounds import ROUNDS, judge_rounds
from holdfast.job.parallel_layout import Axis, ParallelLayout

MAX_RANKS = 16_384
LAYERS = 2
MAX_MICROBATCHES = 8
MISSING_SHARE = 0.002
"""Share of ranks whose stacks py-spy could not read."""
NOISY_SHARE = 0.1
"""Share of dumps in which a rank is caught outside the call in which it waits."""
SLOW_SHARE = 0.6
"""Share of a slow job's dumps in which others wait for the slow one; in the rest a random rank is last."""

_AXES = (Axis.TP, Axis.CP, Axis.EP, Axis.DP)
Array = Any
"""A numpy array of floats; numpy's own types are not worth their length here."""


@dataclass(frozen=True)
class Op:
    """One call of a rank's program; `kind` is an axis, `all`, or a message to or from a neighbouring stage."""

    kind: str
    microbatch: int
    backward: bool
    steady: bool
    """Whether the pipeline is full, so that a stage sends and receives together."""


@cache
def program(stage: int, stages: int, microbatches: int) -> tuple[Op, ...]:
    """The calls of a rank of one stage, in one step."""
    warmup = min(stages - stage - 1, microbatches)
    order = [(number, False) for number in range(warmup)]
    for number in range(warmup, microbatches):
        order += [(number, False), (number - warmup, True)]
    order += [(number, True) for number in range(microbatches - warmup, microbatches)]
    ops: list[Op] = []
    for place, (number, backward) in enumerate(order):
        steady = warmup <= place < len(order) - warmup
        before = "recv_backward" if backward else "recv_forward"
        after = "send_backward" if backward else "send_forward"
        at_start, at_end = stage == 0, stage == stages - 1
        if not (at_end if backward else at_start):
            ops.append(Op(before, number, backward, steady))
        layer = ("ep", "tp", "cp") if backward else ("cp", "tp", "ep")
        ops += [Op(kind, number, backward, steady) for _ in range(LAYERS) for kind in layer]
        if not (at_start if backward else at_end):
            ops.append(Op(after, number, backward, steady))
    return (*ops, Op("dp", 0, True, False), Op("all", 0, True, False))


class Job:
    """One layout and how far each rank gets when something in it stops."""

    def __init__(self, layout: ParallelLayout) -> None:
        self.layout = layout
        self.microbatches = min(MAX_MICROBATCHES, 2 * layout.pp)
        self.programs = [program(stage, layout.pp, self.microbatches) for stage in range(layout.pp)]
        self._length = max(map(len, self.programs))
        self._next = {kind: self._table(kind) for kind in ("tp", "cp", "ep", "dp", "all")}
        self._awaits = {kind: self._message_table(kind) for kind in ("forward", "backward")}

    def _table(self, kind: str) -> Array:
        """By stage and twice the position, plus one: the first call of a kind that a rank there does not reach."""
        table = np.full((self.layout.pp, 2 * self._length + 2), np.inf)
        for stage, ops in enumerate(self.programs):
            for place, op in reversed([*enumerate(ops)]):
                if op.kind == kind:
                    table[stage, : 2 * place + 1] = place
        return table

    def _message_table(self, direction: str) -> Array:
        """The same for messages: where the neighbour waits for the first one that is not sent."""
        table = np.full((self.layout.pp, 2 * self._length + 2), np.inf)
        step = 1 if direction == "forward" else -1
        for stage, ops in enumerate(self.programs):
            if not 0 <= stage + step < self.layout.pp:
                continue
            place_of = {
                op.microbatch: at for at, op in enumerate(self.programs[stage + step]) if op.kind == f"recv_{direction}"
            }
            for place, op in reversed([*enumerate(ops)]):
                if op.kind == f"send_{direction}":
                    table[stage, : 2 * place + 1] = place_of[op.microbatch]
        return table

    def stops(self, at: dict[int, float]) -> Array:
        """Where each rank waits, given where some stop; half a place before a call, if they never enter it."""
        layout = self.layout
        stage_size = layout.stage_size
        reached = np.full(layout.world_size, np.inf)
        for rank, place in at.items():
            reached[rank] = place
        stages = np.arange(layout.world_size) // stage_size
        end = 2 * self._length + 1
        shape = {
            "tp": ((-1, layout.tp), 1),
            "cp": ((-1, layout.cp, layout.tp), 1),
            "ep": ((-1, layout.ep, layout.tp), 1),
            "dp": ((-1, layout.dp, layout.tp * layout.cp), 1),
            "all": ((1, -1), 1),
        }
        while True:
            before = reached.copy()
            places = np.minimum(np.nan_to_num(reached * 2 + 1, posinf=end), end).astype(int)
            for kind, table in self._next.items():
                missed = table[stages, places]
                dims, axis = shape[kind]
                grid = missed.reshape(dims)
                lowest = np.broadcast_to(grid.min(axis=axis, keepdims=True), grid.shape).reshape(-1)
                if kind == "all":  # its place differs between stages
                    ends = np.array([len(ops) - 1 for ops in self.programs])[stages]
                    lowest = np.where(np.isfinite(lowest), ends, np.inf)
                reached = np.minimum(reached, lowest)
            forward = self._awaits["forward"][stages, places]
            backward = self._awaits["backward"][stages, places]
            rest = layout.world_size - stage_size
            reached[stage_size:] = np.minimum(reached[stage_size:], forward[:rest])
            reached[:rest] = np.minimum(reached[:rest], backward[stage_size:])
            if np.array_equal(before, reached):
                return reached


@dataclass(frozen=True)
class Fault:
    """What stops, and the ranks that must be named."""

    kind: str
    at: dict[int, float]
    named: tuple[int, ...]


FAULTS = ("rank", "tp", "cp", "ep", "dp", "pp")


def plant(job: Job, kind: str, dice: random.Random) -> Fault | None:
    """A fault of this kind; None if the layout has none, or if it stops all ranks in one call."""
    layout = job.layout
    rank = dice.randrange(layout.world_size)
    ops = job.programs[layout.stage(rank)]
    if kind == "rank":
        place = dice.randrange(len(ops))
        return Fault(kind, {rank: place - 0.5}, (rank,))
    if kind == "pp":
        places = [place for place, op in enumerate(ops) if op.kind.startswith("recv_")]
        if not places:
            return None
        place = dice.choice(places)
        other = rank + layout.stage_size * (1 if ops[place].kind == "recv_backward" else -1)
        return Fault(kind, {rank: place}, layout.smallest_group({rank, other}).ranks)
    group = layout.group(Axis(kind), rank)
    if not 1 < len(group) < layout.world_size:
        return None
    place = dice.choice([place for place, op in enumerate(ops) if op.kind == kind])
    return Fault(kind, dict.fromkeys(group, place), tuple(group))


@cache
def stack_of(op: Op | None, variant: int, named: bool) -> Stack:
    """The stack of a rank in a call, or of one that computes, from a whole dump of py-spy."""
    return training_stack(
        pipeline_dumps.dump(
            op.kind if op else "", op.backward if op else False, op.steady if op else False, variant, named=named
        )
    )


def dumps(job: Job, fault: Fault, dice: random.Random, *, named: bool = True, noise: bool = True) -> dict[int, Stack]:
    """The stack of every rank."""
    reached = job.stops(fault.at)
    elsewhere = dice.randrange(job.layout.world_size) if noise and dice.random() < NOISY_SHARE else None
    found: dict[int, Stack] = {}
    for rank, place in enumerate(reached.tolist()):
        op = None if place != int(place) else job.programs[job.layout.stage(rank)][int(place)]
        variant = dice.randrange(4)
        if noise and dice.random() < MISSING_SHARE:
            found[rank] = ()
        else:
            found[rank] = (
                stack_of(None, 100 + variant % 3, named) if rank == elsewhere else stack_of(op, variant, named)
            )
    return found


def layouts(dice: random.Random, largest: int) -> Iterator[ParallelLayout]:
    """Layouts of 8 to `largest` ranks, any order of magnitude as often as any other."""
    while True:
        world = 2 ** dice.randint(3, largest.bit_length() - 1)
        tp, cp, pp = 2 ** dice.randint(0, 3), 2 ** dice.choice((0, 0, 0, 1, 2)), 2 ** dice.randint(0, 4)
        if world % (tp * cp * pp):
            continue
        dp = world // (tp * cp * pp)
        ep = 2 ** dice.randint(0, min(5, (cp * dp).bit_length() - 1))
        yield ParallelLayout(tp=tp, cp=cp, ep=ep, dp=dp, pp=pp)


def is_right(verdict: StackVerdict, fault: Fault) -> bool:
    """Whether exactly the planted group is named."""
    return verdict.origin is not None and verdict.origin.ranks == fault.named


def hangs(count: int, largest: int, seed: int, *, named: bool) -> dict[str, Any]:
    """Right answers over generated hangs, by kind."""
    dice = random.Random(seed)
    right, total, wrong = Counter[str](), Counter[str](), list[str]()
    by_dominant = 0
    source = layouts(dice, largest)
    while total.total() < count:
        job = Job(next(source))
        kind = FAULTS[total.total() % len(FAULTS)]
        if (fault := plant(job, kind, dice)) is None:
            continue
        verdict = group_stacks(dumps(job, fault, dice, named=named), job.layout)
        total[kind] += 1
        right[kind] += is_right(verdict, fault)
        dominant = set(verdict.groups[0].ranks)
        by_dominant += not dominant & set(fault.at)
        if not is_right(verdict, fault):
            place, name = next(iter(fault.at.values())), verdict.origin.name if verdict.origin else None
            wrong.append(f"{job.layout} {kind} {fault.named[:4]} at call {place}: {name}")
    return {
        "right": right.total(),
        "of": total.total(),
        "by kind": {kind: f"{right[kind]}/{total[kind]}" for kind in FAULTS},
        "dominant group without a culprit": by_dominant,
        "wrong": wrong,
    }


def slow_jobs(count: int, largest: int, seed: int) -> dict[str, Any]:
    """Right answers over slow jobs: five dumps each, in some of which another rank happens to be last."""
    dice = random.Random(seed)
    source, right, alone = layouts(dice, largest), 0, 0
    for number in range(count):
        while (fault := plant(job := Job(next(source)), FAULTS[number % 5], dice)) is None:
            pass
        rounds: list[StackVerdict] = []
        for _ in range(ROUNDS):
            other = plant(job, "rank", dice)
            assert other is not None
            last = fault if dice.random() < SLOW_SHARE else other
            rounds.append(group_stacks(dumps(job, last, dice), job.layout))
        right += is_right(judge_rounds(rounds, job.layout).verdict, fault)
        alone += is_right(rounds[0], fault)
    return {"right": right, "of": count, "right by the first dump alone": alone}


def durations(seed: int) -> dict[str, Any]:
    """Seconds for one verdict over 16,384 ranks."""
    dice = random.Random(seed)
    layout = ParallelLayout(tp=8, cp=2, ep=8, dp=64, pp=16)
    job, seconds, cpu = Job(layout), list[float](), list[float]()
    for kind in FAULTS:
        fault = plant(job, kind, dice)
        assert fault is not None
        stacks = dumps(job, fault, dice)
        began, worked = time.perf_counter(), time.process_time()
        group_stacks(stacks, layout)
        seconds.append(time.perf_counter() - began)
        cpu.append(time.process_time() - worked)
    return {
        "ranks": layout.world_size,
        "median s": statistics.median(seconds),
        "longest s": max(seconds),
        "longest CPU s": max(cpu),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layouts", type=int, default=1000)
    parser.add_argument("--unnamed", type=int, default=200, help="hangs of programs whose functions name no group")
    parser.add_argument("--slow", type=int, default=100)
    parser.add_argument("--largest", type=int, default=MAX_RANKS)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(arguments)
    result = {
        "hangs": hangs(chosen.layouts, chosen.largest, chosen.seed, named=True),
        "hangs, unnamed groups": hangs(chosen.unnamed, min(chosen.largest, 1024), chosen.seed, named=False),
        "slow jobs": slow_jobs(chosen.slow, min(chosen.largest, 1024), chosen.seed),
        "time": durations(chosen.seed),
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
