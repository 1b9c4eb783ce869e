"""What the step clock costs a program: an optimizer's step, and the start of Python, with it and without it.

.venv/bin/python -m bench.step_clock [--rounds N] [--steps N] [--starts N]

A real optimizer of torch takes turns with blocks of steps, in an order that changes: without the clock (A), with it
(B), and without it again (A'). Another process reads the steps as an agent does. The figure is the difference of B and
the mean of A and A'; the floor is the difference of A' and A. Python starts with an empty program, in the same order;
its CPU time counts.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from bench import result_file
from bench.paired_stats import OURS, PEER, PEER_AGAIN, Round, estimate, headline, interleave, say, table
from holdfast.agent.step_clock import STEP_CLOCK_DIR, StepClockReader

GOAL_US = 20.0
GOAL_START_MS = 1.0
ROUNDS, STEPS, STARTS = 24, 2000, 24
STARTS_PER_ROUND = 3
"""The least CPU time of so many counts: a start takes longer when other programs have just used the caches."""


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog="bench.step_clock", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--steps", type=int, default=STEPS, help="optimizer steps per block")
    parser.add_argument("--starts", type=int, default=STARTS, help="rounds of starting Python")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    headline("step clock: an optimizer's step and Python's start with it, compared with those without")
    with tempfile.TemporaryDirectory() as folder:
        steps = interleave(_step_sides(Path(folder, "s"), options.steps), options.rounds, unit="us")
    starts = interleave(_start_sides(), options.starts, unit="ms")
    claims = (
        ("an optimizer's step with the step clock, minus one without", steps, "us", GOAL_US),
        ("the start of Python with the step clock, minus one without", starts, "ms", GOAL_START_MS),
    )
    found = [
        result_file.absolute(claim, estimate(_extra(rounds)).median, unit, goal=goal, decimals=2, peer="no step clock")
        for claim, rounds, unit, goal in claims
    ]
    result_file.save(options.json, "Cost of the step clock", found)
    rows = [
        row
        for claim, rounds, unit, _ in claims
        for row in (
            (claim, str(estimate(_extra(rounds))), unit),
            ("floor: without again, minus without", str(estimate(_floor(rounds))), unit),
            ("without, p50", f"{statistics.median(each[PEER] for each in rounds):.1f}", unit),
        )
    ]
    say(table(("", "", ""), rows))


def _extra(rounds: Sequence[Round]) -> list[float]:
    return [each[OURS] - (each[PEER] + each[PEER_AGAIN]) / 2 for each in rounds]


def _floor(rounds: Sequence[Round]) -> list[float]:
    return [each[PEER_AGAIN] - each[PEER] for each in rounds]


def _step_sides(path: Path, count: int) -> dict[str, Callable[[], float]]:
    """Blocks of steps of one optimizer; the reader's process ends with this one."""
    ready = get_context("spawn").Event()
    get_context("spawn").Process(target=_read_steps, args=(path, ready), daemon=True).start()
    ready.wait()
    os.environ |= {"HOLDFAST_RANK_SOCKET": str(path), "RANK": "0"}
    hook = _clock().after_step
    weight = torch.nn.Parameter(torch.ones(64))
    weight.grad = torch.ones(64)
    optimizer = torch.optim.AdamW([weight])

    def block(*, clocked: bool) -> Callable[[], float]:
        def one() -> float:
            handle = register_optimizer_step_post_hook(hook) if clocked else None
            took: list[float] = []
            for _ in range(count):
                began = time.perf_counter()
                optimizer.step()
                took.append(time.perf_counter() - began)
            if handle is not None:
                handle.remove()
            return 1e6 * statistics.median(took)

        return one

    sides = {PEER: block(clocked=False), OURS: block(clocked=True), PEER_AGAIN: block(clocked=False)}
    for warm in sides.values():
        warm()
    return sides


def _clock() -> Any:
    """The clock, as sitecustomize.py loads it."""
    spec = importlib.util.spec_from_file_location("holdfast_step_clock", STEP_CLOCK_DIR / "holdfast_step_clock.py")
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.torch = torch
    return module.clock


def _read_steps(path: Path, ready: Any) -> None:
    """Accept one rank, and read its steps until this process is ended."""

    async def read() -> None:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
            server.listen()
            ready.set()
            link, _ = await asyncio.to_thread(server.accept)
        with link:
            await asyncio.to_thread(link.recv, 1024)
            StepClockReader(lambda _rank, _step, _ended: None).add_rank(0, path)
            await asyncio.Event().wait()

    asyncio.run(read())


def _start_sides() -> dict[str, Callable[[], float]]:
    def start(**variables: str) -> Callable[[], float]:
        def one() -> float:
            return 1e3 * min(_cpu_s(variables) for _ in range(STARTS_PER_ROUND))

        return one

    sides = {PEER: start(), OURS: start(PYTHONPATH=str(STEP_CLOCK_DIR)), PEER_AGAIN: start()}
    for warm in sides.values():
        warm()
    return sides


def _cpu_s(variables: dict[str, str]) -> float:
    """CPU seconds of Python with an empty program."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", "pass"], env=variables, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
