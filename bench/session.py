"""What a Session costs a step: a loop of small steps that reports each to an agent's socket, beside the same loop bare.

.venv/bin/python -m bench.session [--rounds N] [--steps N]

One process of one thread takes turns: blocks of bare steps (A), of steps with `session.commit(loss=..., tokens=...)`
(B), and of bare ones again (A'), in an order that changes. The figure is the difference of a step's median in B and in
the mean of A and A'; the floor is what A' and A differ by. Another process reads the socket, as an agent would. Beside
it the CPU time that `commit` takes, which a machine with other work changes less.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from bench.pairs import OURS, PEER, PEER_AGAIN, estimate, headline, interleave, percentile, say, table
from holdfast.train import Environment, Session

GOAL_MS = 0.2
ROUNDS, STEPS = 24, 100
WIDTH = 256
COMMITS = 2000
READER = "import sys\nwhile sys.stdin.buffer.raw.read(65536): pass"


def main() -> None:
    """Measure, and print a line a round and a table."""
    parser = argparse.ArgumentParser(prog="bench.session", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of a block")
    options = parser.parse_args()
    headline("session: a step of one rank, its loss and tokens reported, beside the bare loop")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listening:
        path = Path(folder, "rank")
        listening.bind(os.fspath(path))
        listening.listen()
        model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH))
        optimizer = torch.optim.AdamW(model.parameters())
        session = Session(model=model, optimizer=optimizer, environment=Environment(rank_socket=path))
        agent = listening.accept()[0]
        reader = subprocess.Popen([sys.executable, "-c", READER], stdin=agent.fileno())
        agent.close()
        batch = torch.randn(16, WIDTH)
        commits_ms: list[float] = []
        busy_ms: list[float] = []

        def bare() -> float:
            return _block(model, optimizer, batch, options.steps, lambda loss: loss.item())

        def commit(loss: torch.Tensor) -> None:
            loss.item()
            began, busy = time.perf_counter(), time.thread_time()
            session.commit(loss=loss, tokens=16)
            commits_ms.append(1e3 * (time.perf_counter() - began))
            busy_ms.append(1e3 * (time.thread_time() - busy))

        def ours() -> float:
            return _block(model, optimizer, batch, options.steps, commit)

        for warm in (bare, ours):
            warm()
        commits_ms.clear()
        busy_ms.clear()
        rounds = interleave({PEER: bare, OURS: ours, PEER_AGAIN: bare}, options.rounds, unit="ms")
        inside_ms = list(commits_ms)
        between, busy_ms = busy_ms, list[float]()
        for _ in range(COMMITS):
            commit(torch.tensor(1.0))
        reader.kill()
        reader.wait()
    over = estimate([each[OURS] - (each[PEER] + each[PEER_AGAIN]) / 2 for each in rounds])
    floor = estimate([each[PEER_AGAIN] - each[PEER] for each in rounds])
    say(
        table(
            ("", "ms", f"goal {GOAL_MS}"),
            (
                ("step with a Session, beyond the bare one, p50", str(over), "yes" if over.median <= GOAL_MS else "no"),
                ("floor: bare again, beyond bare", str(floor), ""),
                ("time in commit(), p50, p99", f"{median(inside_ms):.3f}, {percentile(inside_ms, 99):.3f}", ""),
                ("CPU time in commit(), p50, p99", f"{median(between):.3f}, {percentile(between, 99):.3f}", ""),
                ("the same with no step between, p50", f"{median(busy_ms):.3f}", ""),
                ("the bare step, p50", f"{median(each[PEER] for each in rounds):.3f}", ""),
            ),
        )
    )


def _block(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: torch.Tensor,
    steps: int,
    end: Callable[[torch.Tensor], object],
) -> float:
    """The median of a block's steps, in ms."""
    took_ms: list[float] = []
    for _ in range(steps):
        began = time.perf_counter()
        optimizer.zero_grad()
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        optimizer.step()
        end(loss)
        took_ms.append(1e3 * (time.perf_counter() - began))
    return median(took_ms)


if __name__ == "__main__":
    main()
