"""Runs the ranks of `holdfast.train.probe` as forks of this process, so that they do not each import torch."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from holdfast.events.probe_results import ProbeResult
from holdfast.train.probe import __main__ as probe

END_S = 30.0
"""Seconds that the ranks have beyond the probe's own deadline."""
_forks = multiprocessing.get_context("fork")


def run_ranks(
    arguments: Sequence[str],
    *,
    nodes: int,
    ranks_per_node: int,
    master: tuple[str, int],
    folder: Path,
    deadline_s: float,
    prepare: Callable[[int], None],
) -> ProbeResult:
    """The result of rank 0, which has those of all; `prepare` is called in each rank's process, with its number."""
    every = {
        "WORLD_SIZE": str(nodes * ranks_per_node),
        "LOCAL_WORLD_SIZE": str(ranks_per_node),
        "MASTER_ADDR": master[0],
        "MASTER_PORT": str(master[1]),
    }

    def run(rank: int) -> None:
        prepare(rank)
        with (folder / f"{rank}.jsonl").open("w") as lines, (folder / f"{rank}.err").open("w") as errors:
            os.dup2(lines.fileno(), 1)
            os.dup2(errors.fileno(), 2)
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank % ranks_per_node)}
        os._exit(probe.main((*arguments, f"--deadline-s={deadline_s:g}"), every | own))

    ranks = [_forks.Process(target=run, args=(rank,)) for rank in range(nodes * ranks_per_node)]
    for each in ranks:
        each.start()
    try:
        for each in ranks:
            each.join(deadline_s + END_S)
    finally:
        for each in ranks:
            each.kill()
            each.join()
    lines = (folder / "0.jsonl").read_text().splitlines()
    if not lines:
        raise RuntimeError(f"the probe printed nothing: {(folder / '0.err').read_text()[-1000:]}")
    return msgspec.json.decode(lines[-1], type=ProbeResult)
