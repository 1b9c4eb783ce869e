"""What exactness costs a batch: ElasticData compared with torch's DataLoader and torchdata's StatefulDataLoader.

.venv/bin/python -m bench.data [--quick | --rounds N]

Windows of 2048 tokens of one file, eight per batch, shuffled, collated, read as fast as possible. Each side keeps its
loader for all rounds. The figure is the CPU time of the rank's process without its workers: the cost for the loop,
whatever else runs on the machine. Then the first batch after a restart
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count, islice
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from bench import result_file
from bench.paired_stats import OURS, PEER, PEER_AGAIN, Round, estimate, headline, interleave, say, table
from holdfast.train import Data, Text
from holdfast.train.data.prefetcher import Prefetcher
from holdfast.train.data.sharding import ShardPlan

GOAL_MS = 0.2
"""Longest time beyond the peer's for a batch."""
ROUNDS, QUICK_ROUNDS = 18, 3
TURN_S = 0.15
"""CPU seconds."""
LENGTH, BATCH, WINDOWS = 2048, 8, 20_000
LONG = 10_000_000
RESUME_ROUNDS = 6


class Stream(IterableDataset[torch.Tensor]):
    """The windows of a text in order, repeated."""

    def __init__(self, text: Text) -> None:
        self._text = text

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (self._text[number] for number in range(len(self._text)))


def ours(dataset: Any, workers: int, *, first: int = 0, batch: int = BATCH) -> Iterator[Any]:
    """The batches of `Session.batches`, step after step."""
    supply, data = Prefetcher(lambda _: None), Data(dataset, batch_size=batch, num_workers=workers)
    plan = ShardPlan(global_batch=batch, micro_batch_size=batch, rank=0, world_size=1)
    return (supply.load(part, data, plan, begin).data for begin in count(first, batch) for part in plan.step(begin))


def over_and_over(loader: Any) -> Iterator[Any]:
    """Epoch after epoch."""
    while True:
        yield from loader


def plain(dataset: Any, workers: int) -> Iterator[Any]:
    """The same from a DataLoader."""
    shuffled = not isinstance(dataset, IterableDataset)
    return over_and_over(DataLoader(dataset, batch_size=BATCH, shuffle=shuffled, num_workers=workers, drop_last=True))


def stateful(dataset: Any, workers: int) -> Iterator[Any]:
    """The same from a StatefulDataLoader."""
    shuffled = not isinstance(dataset, IterableDataset)
    loader: Any = StatefulDataLoader(
        dataset, batch_size=BATCH, shuffle=shuffled, num_workers=workers, drop_last=True, snapshot_every_n_steps=100
    )
    return over_and_over(loader)


def turn(batches: Iterator[Any]) -> Callable[[], float]:
    """CPU milliseconds per batch over a turn."""

    def measure() -> float:
        for _ in islice(batches, 20):
            pass
        taken, began = 0, time.process_time()
        while time.process_time() - began < TURN_S:
            next(batches)
            taken += 1
        return (time.process_time() - began) / taken * 1000

    return measure


def resumed(first: int) -> Callable[[], float]:
    """CPU milliseconds to the batch that begins with this sample of a long dataset."""

    def measure() -> float:
        began = time.process_time()
        next(ours(range(LONG), 0, first=first))
        return (time.process_time() - began) * 1000

    return measure


def resumed_stateful(state: dict[str, Any]) -> Callable[[], float]:
    """The same from a StatefulDataLoader that resumes from this state."""

    def measure() -> float:
        began = time.process_time()
        loader: Any = StatefulDataLoader(range(LONG), batch_size=BATCH, shuffle=True)
        loader.load_state_dict(state)
        next(iter(loader))
        return (time.process_time() - began) * 1000

    return measure


def stood_at(batches: int) -> dict[str, Any]:
    """The state of a StatefulDataLoader after this many batches."""
    loader: Any = StatefulDataLoader(range(LONG), batch_size=BATCH, shuffle=True)
    for _ in islice(loader, batches):
        pass
    return loader.state_dict()


def main() -> None:
    """Measure all cases, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    told = parser.parse_args()
    rounds = told.rounds or (QUICK_ROUNDS if told.quick else ROUNDS)
    headline("data: what a batch costs")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "text"
        file.write_bytes(os.urandom(LENGTH * WINDOWS))
        text = Text([file], length=LENGTH, cache=folder)
        rows: list[tuple[str, ...]] = []
        found: list[result_file.Result] = []
        peers = {"DataLoader": plain, "StatefulDataLoader": stateful}
        cases = [("numbered", text, 0), ("numbered", text, 2), ("stream", Stream(text), 0), ("stream", Stream(text), 1)]
        for kind, dataset, workers in cases:
            for name, peer in peers.items():
                say(f"\n## {kind}, {workers} workers, compared with {name}")
                sides = {PEER: peer(dataset, workers), OURS: ours(dataset, workers), PEER_AGAIN: peer(dataset, workers)}
                done = interleave({side: turn(batches) for side, batches in sides.items()}, rounds, unit="ms")
                case = f"{kind}, {workers} workers, compared with {name}"
                rows.append(row(case, done, GOAL_MS))
                where = "own process" if workers == 0 else f"{workers} worker{'s' if workers > 1 else ''}"
                claim = f"extra CPU per batch, {'dataset' if kind == 'numbered' else kind}, {where}"
                extra_ms = median(each[OURS] - (each[PEER] + each[PEER_AGAIN]) / 2 for each in done)
                found.append(result_file.absolute(claim, extra_ms, "ms", goal=GOAL_MS, decimals=3, peer=name))
        say(f"\n## first batch in the middle of {LONG:,} samples")
        state = stood_at(LONG // BATCH // 2)
        again = resumed_stateful(state)
        sides = {PEER: again, OURS: resumed(LONG // 2), PEER_AGAIN: resumed_stateful(state)}
        done = interleave(sides, min(rounds, RESUME_ROUNDS), unit="ms")
        rows.append(row("first batch after a restart, compared with StatefulDataLoader", done, 0.0))
    result_file.save(told.json, "Cost of exact data loading", found)
    say("\n" + table(("what", "goal", "more a batch", "A/A floor", "holdfast", "peer", "met"), rows))


def row(name: str, rounds: Sequence[Round], goal_ms: float) -> tuple[str, ...]:
    """Table row of a case: how much more a batch takes, and how much the peer differs from itself."""
    more = estimate([each[OURS] - (each[PEER] + each[PEER_AGAIN]) / 2 for each in rounds])
    floor = estimate([each[PEER_AGAIN] - each[PEER] for each in rounds])
    mine, theirs = (median(each[side] for each in rounds) for side in (OURS, PEER))
    met = "yes" if more.median <= goal_ms else "no"
    return (name, f"≤ {goal_ms} ms", f"{more} ms", f"{floor} ms", f"{mine:.3f} ms", f"{theirs:.3f} ms", met)


if __name__ == "__main__":
    main()
