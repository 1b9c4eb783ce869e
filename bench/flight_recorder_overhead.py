"""What a flight recorder costs a collective: an all-reduce loop over Gloo, with and without one.

.venv/bin/python -m bench.flight_recorder_overhead [--rounds N] [--collectives N] [--ranks N]

Three groups of ranks take turns with blocks of all-reduces of 256 numbers, in an order that changes: without a recorder
(A), with one as runs have it (B), and without one again (A'). One rank, the default, has no network whose noise hides
the cost. Each block gives the median of a collective on rank 0 and the CPU time per collective of its process. The
figure is the difference of B and the mean of A and A'; the floor is the difference of A' and A.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from bench import result_file
from bench.paired_stats import OURS, PEER, PEER_AGAIN, Round, estimate, headline, interleave, say, table
from holdfast.launch.rank_env import FLIGHT_RECORDER_ENTRIES
from holdfast.protocol.flight_recorder_files import ENTRIES

GOAL_US = 5.0
"""At most: 200 collectives of a step of one second cost 0.1 % of it."""
ROUNDS, COLLECTIVES = 24, 2000
NUMBERS = 256

forks = get_context("forkserver")
forks.set_forkserver_preload([__name__])


def main() -> None:
    """Measure, and print a line per round and a table."""
    parser = argparse.ArgumentParser(prog="bench.flight_recorder_overhead", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--collectives", type=int, default=COLLECTIVES, help="collectives per block")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    headline("flight recorder: an all-reduce over Gloo with a recorder, compared with one without")
    cpu_us: dict[str, list[float]] = {PEER: [], OURS: [], PEER_AGAIN: []}
    with tempfile.TemporaryDirectory() as folder:
        links = {
            side: _start_group(Path(folder, str(number)), options.ranks, FLIGHT_RECORDER_ENTRIES if side == OURS else 0)
            for number, side in enumerate(cpu_us)
        }

        def block(side: str) -> Callable[[], float]:
            def one() -> float:
                for link in links[side]:
                    link.send(options.collectives)
                (took_us, used_us), *_ = (link.recv() for link in links[side])
                cpu_us[side].append(used_us)
                return took_us

            return one

        sides = {side: block(side) for side in cpu_us}
        for warm in sides.values():
            warm()
        for kept in cpu_us.values():
            kept.clear()
        by_clock = interleave(sides, options.rounds, unit="us")
        for group in links.values():
            for link in group:
                link.close()
    by_cpu = [{side: each[index] for side, each in cpu_us.items()} for index in range(options.rounds)]
    measured = (("by the clock", by_clock), ("in CPU time of the rank", by_cpu))
    found = [
        result_file.absolute(
            f"a collective with a flight recorder, minus one without, {how}",
            estimate(_extra(rounds)).median,
            "us",
            goal=GOAL_US,
            decimals=1,
            peer="no recorder",
        )
        for how, rounds in measured
    ]
    result_file.save(options.json, "Cost of a flight recorder", found)
    rows = [
        row
        for how, rounds in measured
        for row in (
            (f"with a recorder, beyond without, {how}", str(estimate(_extra(rounds))), ""),
            (
                "floor: without again, beyond without",
                str(estimate([each[PEER_AGAIN] - each[PEER] for each in rounds])),
                "",
            ),
            ("without, p50", f"{statistics.median(each[PEER] for each in rounds):.1f}", ""),
        )
    ]
    say(table(("", "us", ""), rows))


def _extra(rounds: Sequence[Round]) -> list[float]:
    return [each[OURS] - (each[PEER] + each[PEER_AGAIN]) / 2 for each in rounds]


def _start_group(folder: Path, ranks: int, entries: int) -> list[Connection]:
    folder.mkdir()
    links: list[Connection] = []
    for rank in range(ranks):
        ours, theirs = forks.Pipe()
        forks.Process(target=_run, args=(rank, ranks, folder, entries, theirs), daemon=True).start()
        theirs.close()
        links.append(ours)
    return links


def _run(rank: int, ranks: int, folder: Path, entries: int, link: Connection) -> None:
    """All-reduce as often as requested; send the median and the CPU time of one, in microseconds."""
    os.environ[ENTRIES] = str(entries)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", ranks), rank=rank, world_size=ranks)
    total = torch.ones(NUMBERS)
    while True:
        try:
            count = link.recv()
        except EOFError:
            os._exit(0)
        took: list[float] = []
        busy = time.process_time()
        for _ in range(count):
            began = time.perf_counter()
            dist.all_reduce(total)
            took.append(time.perf_counter() - began)
        link.send((1e6 * statistics.median(took), 1e6 * (time.process_time() - busy) / count))


if __name__ == "__main__":
    main()
