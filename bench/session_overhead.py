"""What a Session costs a step: a loop of small steps, each reported to an agent's socket, compared with the bare loop.

.venv/bin/python -m bench.session_overhead [--rounds N] [--steps N]

One process of one thread takes turns: blocks of bare steps (A), of steps with `session.commit(loss=..., tokens=...)`
(B), and of bare ones again (A'), in an order that changes. The figure is the difference of a step's median in B and in
the mean of A and A'; the floor is the difference of A' and A. Both are given as wall time and as the loop's own CPU
time, which other load on the machine changes less. Another process reads the socket with the agent's code.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median

import torch

from bench import result_file
from bench.paired_stats import OURS, PEER, PEER_AGAIN, Round, estimate, headline, interleave, percentile, say, table
from holdfast.train import RankConfig, Session

GOAL_MS = 0.2
ROUNDS, STEPS = 24, 100
WIDTH = 256
COMMITS = 2000
READER = """
import asyncio, pathlib, sys
from holdfast.agent.rank_ipc import RankServer
from holdfast.host.process_limits import schedule_as_batch
schedule_as_batch()
class Reader:
    def on_message(self, rank, message, dropped): pass
    def on_close(self, rank): self.gone.set()
    def on_drop(self, rank, reason, sample): raise AssertionError(reason, sample)
async def read():
    reader = Reader()
    reader.gone = asyncio.Event()
    await RankServer(reader).open(pathlib.Path(sys.argv[1]))
    print("listening", flush=True)
    await reader.gone.wait()
asyncio.run(read())
"""


def main() -> None:
    """Measure, and print a line per round and a table."""
    parser = argparse.ArgumentParser(prog="bench.session_overhead", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--steps", type=int, default=STEPS, help="steps per block")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    headline("session: a step of one rank, its loss and tokens reported, compared with the bare loop")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rank")
        reader = subprocess.Popen([sys.executable, "-c", READER, path], stdout=subprocess.PIPE)
        assert reader.stdout is not None
        assert reader.stdout.readline(), "the reader has failed"
        model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH))
        optimizer = torch.optim.AdamW(model.parameters())
        session = Session(model=model, optimizer=optimizer, config=RankConfig(rank_socket=path))
        batch = torch.randn(16, WIDTH)
        commits_ms: list[float] = []
        busy_ms: list[float] = []
        used_ms: dict[str, list[float]] = {PEER: [], OURS: [], PEER_AGAIN: []}

        def block(side: str, end: Callable[[torch.Tensor], object]) -> Callable[[], float]:
            def one() -> float:
                took_ms, own_ms = _block(model, optimizer, batch, options.steps, end)
                used_ms[side].append(own_ms)
                return took_ms

            return one

        def commit(loss: torch.Tensor) -> None:
            loss.item()
            began, busy = time.perf_counter(), time.thread_time()
            session.commit(loss=loss, tokens=16)
            commits_ms.append(1e3 * (time.perf_counter() - began))
            busy_ms.append(1e3 * (time.thread_time() - busy))

        ends = {PEER: torch.Tensor.item, OURS: commit, PEER_AGAIN: torch.Tensor.item}
        sides = {side: block(side, end) for side, end in ends.items()}
        for warm in sides.values():
            warm()
        for kept in (commits_ms, busy_ms, *used_ms.values()):
            kept.clear()
        rounds = interleave(sides, options.rounds, unit="ms")
        inside_ms = list(commits_ms)
        own = [{side: each[index] for side, each in used_ms.items()} for index in range(options.rounds)]
        between, busy_ms = busy_ms, list[float]()
        for _ in range(COMMITS):
            commit(torch.tensor(1.0))
        reader.kill()
        reader.wait()
    found = [
        result_file.absolute(claim, estimate(_extra(each)).median, "ms", goal=GOAL_MS, decimals=3, peer="the bare step")
        for claim, each in (
            ("a step with a Session, minus the bare step", rounds),
            ("a step with a Session, minus the bare step, in CPU time", own),
        )
    ]
    result_file.save(options.json, "Cost of a Session", found)
    say(
        table(
            ("", "ms", f"goal {GOAL_MS}"),
            (
                *_over("by the clock", rounds),
                *_over("in CPU time of the loop", own),
                ("time in commit(), p50, p99", f"{median(inside_ms):.3f}, {percentile(inside_ms, 99):.3f}", ""),
                ("CPU time in commit(), p50, p99", f"{median(between):.3f}, {percentile(between, 99):.3f}", ""),
                ("the same with no step between, p50", f"{median(busy_ms):.3f}", ""),
                ("the bare step, p50", f"{median(each[PEER] for each in rounds):.3f}", ""),
            ),
        )
    )


def _extra(rounds: Sequence[Round]) -> list[float]:
    return [each[OURS] - (each[PEER] + each[PEER_AGAIN]) / 2 for each in rounds]


def _over(what: str, rounds: list[Round]) -> Iterable[tuple[str, str, str]]:
    """Rows for the overhead of a Session per step, and for its floor."""
    over = estimate(_extra(rounds))
    floor = estimate([each[PEER_AGAIN] - each[PEER] for each in rounds])
    met = "yes" if over.median <= GOAL_MS else "no"
    yield f"step with a Session, beyond the bare one, p50, {what}", str(over), met
    yield "floor: bare again, beyond bare", str(floor), ""


def _block(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: torch.Tensor,
    steps: int,
    end: Callable[[torch.Tensor], object],
) -> tuple[float, float]:
    """The median of a block's steps, in ms, as wall time and as CPU time of this thread."""
    took_ms: list[float] = []
    used_ms: list[float] = []
    for _ in range(steps):
        began, busy = time.perf_counter(), time.thread_time()
        optimizer.zero_grad()
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        optimizer.step()
        end(loss)
        took_ms.append(1e3 * (time.perf_counter() - began))
        used_ms.append(1e3 * (time.thread_time() - busy))
    return median(took_ms), median(used_ms)


if __name__ == "__main__":
    main()
