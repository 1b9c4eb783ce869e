"""Probes the devices of a node and the links between nodes.

Start it once per rank with torchrun's variables: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and
MASTER_PORT. It prints JSON lines (holdfast/events/probe_results.py), and exits with 0 if all probes passed, 1 if they
name a suspect, 3 if they are incomplete.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from threading import Lock, Timer
from typing import NoReturn

import msgspec
import torch

from holdfast.events.probe_results import ProbeLine, ProbeOutcome, ProbeResult, ProbeStage
from holdfast.train.probe.data_parallel import data_parallel_rates
from holdfast.train.probe.pairing import Gates
from holdfast.train.probe.process_groups import ConnectTorch, StoreAddress, prepare_nccl
from holdfast.train.probe.rank_probe import RankPlace, RankProbe
from holdfast.train.probe.stages import SHARES, Schedule

EXIT_CODES = {ProbeOutcome.PASSED: 0, ProbeOutcome.FAILED: 1, ProbeOutcome.INCOMPLETE: 3}
USAGE = 2
USE_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""`True`: the agent hosts the store, as torchrun's and holdfast's do; otherwise rank 0 does."""

_lock = Lock()


def main(arguments: Sequence[str] | None = None, env: Mapping[str, str] = os.environ) -> int:
    """Run all probes of this rank; returns the exit code."""
    began = time.monotonic()
    options = _parser().parse_args(arguments)
    place, address = _place(env), StoreAddress(env["MASTER_ADDR"], int(env["MASTER_PORT"]))
    device = _device(options.backend, place)
    if device.type == "cuda":
        prepare_nccl(options.deadline_s * SHARES[ProbeStage.ALL_REDUCE])
    overdue = Timer(options.deadline_s, _give_up, (place.rank, options.deadline_s))
    overdue.daemon = True
    overdue.start()
    arrive_s = options.deadline_s * SHARES[ProbeStage.ARRIVE]
    hosts = place.rank == 0 and env.get(USE_AGENT_STORE) != "True"
    try:
        store = address.host_store() if hosts else address.client(arrive_s)
    except RuntimeError as error:
        problem = f"the store at {address.host}:{address.port} did not answer within {arrive_s:.3g} s"
        return _end(_incomplete(place.rank, began, f"{problem} ({str(error).partition(chr(10))[0][:200]})"))
    steps = 1 + round(options.burn_in_s)
    probe = RankProbe(
        place=place,
        device=device,
        store=store,
        connect=ConnectTorch(address, device),
        emit=emit,
        burn_in_s=options.burn_in_s,
        most_bytes=options.most_bytes,
        began=began,
        data_parallel=None if device.type == "cuda" else partial(data_parallel_rates, address, steps),
        folder=options.storage,
    )
    try:
        return _end(_run(probe, options, arrive_s))
    except RuntimeError as error:  # of the store: everything else is in a report
        return _end(_incomplete(place.rank, began, f"the store failed: {str(error).partition(chr(10))[0][:200]}"))


def _run(probe: RankProbe, options: argparse.Namespace, arrive_s: float) -> ProbeResult:
    place = probe.place
    if place.rank:
        return probe.follow(arrive_s)
    schedule = Schedule(
        nodes=place.world_size // place.local_world_size,
        ranks_per_node=place.local_world_size,
        deadline_s=options.deadline_s,
        gates=Gates(share_of_median=options.share_of_median, least_gb_s=options.least_gb_s),
        storage=options.storage is not None,
    )
    return probe.coordinate(schedule)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m holdfast.train.probe", description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--backend", choices=("auto", "gloo", "nccl"), default="auto", help="auto: NCCL if there are GPUs")
    add("--deadline-s", type=_positive, default=120.0, help="seconds after which the probes end (default: 120)")
    add("--burn-in-s", type=_positive, default=3.0, help="seconds of matrix products, at most (default: 3)")
    add("--most-bytes", type=int, default=1 << 30, help="size of the largest all-reduce (default: 1 GiB)")
    add(
        "--share-of-median",
        type=_positive,
        default=Gates().share_of_median,
        help="a device or pair is slow below this share of the median of the others (default: 0.6)",
    )
    add("--least-gb-s", type=_positive, help="a pair is slow below this rate (default: compare with the others only)")
    add("--storage", type=Path, metavar="FOLDER", help="measure this folder's file system from all nodes together")
    return parser


def _positive(text: str) -> float:
    if not 0.0 < (value := float(text)) < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def _place(env: Mapping[str, str]) -> RankPlace:
    try:
        rank, world_size, local_rank, local_world_size = (
            int(env[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        )
        _ = env["MASTER_ADDR"], int(env["MASTER_PORT"])
    except (KeyError, ValueError) as error:
        _refuse(f"missing or invalid variable of torchrun: {error}")
    place = RankPlace(rank=rank, world_size=world_size, local_world_size=local_world_size)
    if not 0 <= rank < world_size or world_size % local_world_size or place.local_rank != local_rank:
        _refuse(
            f"rank {rank} of {world_size} is not local rank {local_rank} of {local_world_size}: "
            "ranks are numbered node by node, with as many on each node"
        )
    return place


def _device(backend: str, place: RankPlace) -> torch.device:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if backend == "gloo" or (backend == "auto" and not gpus):
        return torch.device("cpu")
    if place.local_rank >= gpus:
        _refuse(f"local rank {place.local_rank} has no GPU: torch sees {gpus}")
    return torch.device("cuda", place.local_rank)


def _refuse(problem: str) -> NoReturn:
    sys.stderr.write(f"probe: {problem}\n")
    sys.exit(USAGE)


def emit(line: ProbeLine) -> None:
    """Print a line."""
    with _lock:
        sys.stdout.write(msgspec.json.encode(line).decode() + "\n")
        sys.stdout.flush()


def _incomplete(rank: int, began: float, problem: str) -> ProbeResult:
    elapsed_s = time.monotonic() - began
    return ProbeResult(rank=rank, outcome=ProbeOutcome.INCOMPLETE, elapsed_s=elapsed_s, problem=problem)


def _end(result: ProbeResult) -> int:
    emit(result)
    return EXIT_CODES[result.outcome]


def _give_up(rank: int, deadline_s: float) -> None:
    """End this process at its deadline, whatever its other threads wait for."""
    problem = f"not done within {deadline_s:g} s"
    code = _end(ProbeResult(rank=rank, outcome=ProbeOutcome.INCOMPLETE, elapsed_s=deadline_s, problem=problem))
    os._exit(code)


if __name__ == "__main__":
    # Abandoned threads may hold locks of torch that an orderly exit would wait for.
    os._exit(main())
