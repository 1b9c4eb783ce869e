"""CPU time that Watch adds to a rank's step with a Session, where single steps with and without it take turns.

.venv/bin/python -m bench.watch_hooks [--rounds N] [--width N]

`bench.watch_overhead` compares whole runs, which on a shared machine differ by more than Watch costs. Here one thread
does the steps of one model: without Watch (A), with it (B), without again (A'), in an order that changes. Watch is
what a Session installs by default: the clock of phases, the sums of gradients, and the judgement of a step's numbers.
Its messages to the agent, every fifth step, are not in it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch

from bench import result_file
from bench.paired_stats import OURS, PEER, PEER_AGAIN, compare, headline, interleave, say, table
from holdfast.train.metrics.gradient_guard import GradientGuard
from holdfast.train.metrics.numeric_watch import NumericWatch
from holdfast.train.metrics.phase_clock import PhaseClock

GOAL = 1.005
ROUNDS, WARM_UP = 400, 20
DEPTH, BATCH = 4, 448


class Steps:
    """One model's steps, with Watch or without."""

    def __init__(self, width: int) -> None:
        layers = [layer for _ in range(DEPTH) for layer in (torch.nn.Linear(width, width), torch.nn.ReLU())]
        self._model = torch.nn.Sequential(*layers, torch.nn.Linear(width, 1))
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01)
        self._inputs = torch.randn(BATCH, width)
        self._count = 0

    def plain_us(self) -> float:
        """Microseconds of the thread's CPU time for a step without Watch."""
        return self._timed_us(lambda _loss: None)

    def watched_us(self) -> float:
        """The same with Watch, whose hooks are installed before and removed afterwards."""
        gradients, phases = GradientGuard(self._model, self._optimizer), PhaseClock(self._model, self._optimizer)
        judge = NumericWatch(rank=0, gradients=gradients)

        def end_step(loss: torch.Tensor) -> None:
            sums = {name: value.item() for name, value in gradients.end_step().items()}
            judge.check(self._count, {"loss": loss.item(), **sums})
            phases.end_step(self._count)

        phases.end_step(self._count)  # the first is not whole
        try:
            return self._timed_us(end_step)
        finally:
            gradients.close()
            phases.close()

    def _timed_us(self, end_step: Callable[[torch.Tensor], None]) -> float:
        self._count += 1
        began = time.thread_time()
        loss = (self._model(self._inputs).squeeze(1) - self._inputs.mean(dim=1)).square().mean()
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        end_step(loss.detach())
        return (time.thread_time() - began) * 1e6


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog="bench.watch_hooks", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--width", type=int, default=640, help="of each of the model's layers")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    headline(f"CPU time of a step with Watch, compared with one without: {DEPTH} layers of {options.width}, one thread")
    steps = Steps(options.width)
    sides = {PEER: steps.plain_us, OURS: steps.watched_us, PEER_AGAIN: steps.plain_us}
    for _ in range(WARM_UP):
        for side in sides.values():
            side()
    rounds = interleave(sides, options.rounds, unit="us")
    one = result_file.from_rounds("CPU time of a step with Watch", rounds, goal=GOAL, unit="us", peer="without Watch")
    result_file.save(options.json, "Cost of Watch within a rank", [one])
    say(table(("claim", "peer", "measured", "A/A floor", "met"), [
        (one.claim, str(one.peer), str(one.ratio), str(one.floor), one.met)
    ]))  # fmt: skip
    say(f"B - A: {compare(rounds)}")


if __name__ == "__main__":
    main()
