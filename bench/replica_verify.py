"""What it costs two replicas to compare their states: the digest on the device, and its exchange.

.venv/bin/python -m bench.replica_verify [--quick] [--json FILE]

Two processes on the CPU, one thread each, train 50 million parameters with AdamW and compare their states before every
step. A job compares them every 100 steps (`recovery.verify_every_steps`).
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

from bench import result_file
from bench.paired_stats import headline, say, table

REPLICAS = 2
LAYERS, WIDTH = 12, 2048
STEPS, QUICK_STEPS = 12, 3
EVERY_STEPS, STEP_S = 100, 1.0
"""The default interval, and the step time of the goal."""
GOAL_PERCENT = 0.1


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    given = parser.parse_args()
    headline("Comparing the states of two replicas")
    parameters, digest_s, verify_s = _measured(QUICK_STEPS if given.quick else STEPS)
    percent = 100 * verify_s / (EVERY_STEPS * STEP_S)
    claim = f"share of comparing 2 replicas every {EVERY_STEPS} steps of {STEP_S:g} s"
    result_file.save(
        given.json,
        "Cost of comparing replicas",
        [result_file.absolute(claim, percent, "%", goal=GOAL_PERCENT, decimals=3)],
    )
    row = (f"{parameters / 1e6:.0f} M", f"{1e3 * digest_s:.1f} ms", f"{1e3 * verify_s:.1f} ms", f"{percent:.3f} %")
    say(table(("parameters", "digest", "digest and exchange", f"of {EVERY_STEPS} steps of {STEP_S:g} s"), [row]))


def _measured(steps: int) -> tuple[int, float, float]:
    """Parameters, and the median seconds of a digest and of a comparison, each of the slower replica."""
    from torchft.coordination import LighthouseServer

    processes = multiprocessing.get_context("spawn")
    pipes = [processes.Pipe() for _ in range(REPLICAS)]
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=REPLICAS, quorum_tick_ms=10)
    ranks = [
        processes.Process(target=_rank, args=(replica, theirs, lighthouse.address(), steps), daemon=True)
        for replica, (_, theirs) in enumerate(pipes)
    ]
    try:
        for each in ranks:
            each.start()
        found = [each.recv() for each, _ in pipes]
        return found[0][0], max(each[1] for each in found), max(each[2] for each in found)
    finally:
        for each in ranks:
            each.kill()
            each.join()


def _rank(replica: int, told: Connection, where: str, steps: int) -> None:
    import torch

    from holdfast.train import Session
    from holdfast.train.ft.state_digest import StateDigest
    from holdfast.train.ft.state_verifier import StateVerifier
    from holdfast.train.session.rank_config import RankConfig

    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # TorchFT logs lines for each step
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters())
    config = RankConfig(
        replica=replica,
        replica_count=REPLICAS,
        min_replicas=REPLICAS,
        lighthouse=where,
        master_addr="localhost",
        verify_every_steps=1,
    )
    digests, comparisons = _timed(StateDigest, "compute"), _timed(StateVerifier, "verify")
    session = Session(model=model, optimizer=optimizer, config=config)
    for _ in session.steps(steps):
        model(torch.ones(1, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        session.commit()
    told.send((sum(each.numel() for each in model.parameters()), median(digests), median(comparisons[1:])))
    told.poll(None)  # until the other replica has ended as well


def _timed(kind: type, name: str) -> list[float]:
    """The seconds of each further call of a method."""
    seconds: list[float] = []
    method = getattr(kind, name)

    def timed(*given: Any, **named: Any) -> Any:
        began = time.perf_counter()
        try:
            return method(*given, **named)
        finally:
            seconds.append(time.perf_counter() - began)

    setattr(kind, name, timed)
    return seconds


if __name__ == "__main__":
    main()
