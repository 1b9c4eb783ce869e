"""What a fault-tolerant step costs: two replicas under holdfast and under TorchFT's DDP, each compared with plain DDP.

.venv/bin/python -m bench.replica_overhead [--quick | --rounds N] [--step-s S ...]

All sides train the same model in the same two processes, in alternating blocks, so that other load and memory layout
affect all alike. A step computes 3.7 million parameters on the CPU. Before its backward pass it sleeps, as if an
accelerator computed, until a step of plain DDP takes the requested time. The quorum service is TorchFT's own.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

from bench import result_file
from bench.paired_stats import OURS, PEER, PEER_AGAIN, Round, compare, headline, interleave, say, table

TORCHFT = "C"
GOALS = {0.1: 1.02, 1.0: 1.005}
"""Approximate seconds of a step."""
ROUNDS, QUICK_ROUNDS = 15, 4
BLOCK_S = 2.0
SETTLING_STEPS = 2
REPLICAS = 2

Side = Callable[[], None]
"""One step."""


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--step-s", type=float, nargs="+", default=[*GOALS])
    parser.add_argument("--json", type=Path, help="write the results to this file")
    given = parser.parse_args()
    headline("A step of two replicas, of which each may be lost")
    rounds = given.rounds or (QUICK_ROUNDS if given.quick else ROUNDS)
    rows: list[tuple[str, ...]] = []
    found: list[result_file.Result] = []
    for asked_s in given.step_s:
        measured = _measured(asked_s, rounds)
        step_s = median(each[PEER] for each in measured)
        goal = GOALS[min(GOALS, key=lambda about, step_s=step_s: abs(about - step_s))]
        claim = f"a step of {asked_s:g} s with 2 replicas"
        found.append(result_file.from_rounds(claim, measured, goal=goal, unit="s", peer="plain DDP"))
        ours, theirs = compare(measured), compare(measured, ours=TORCHFT)
        rows.append(
            (
                f"{1e3 * step_s:.0f} ms",
                f"{ours.ratio}",
                f"{theirs.ratio}",
                f"{ours.floor}",
                f"{goal}: {ours.verdict(goal)}",
            )
        )
    result_file.save(given.json, "Cost of replicas", found)
    say(table(("plain DDP", "holdfast / DDP", "TorchFT / DDP", "floor", "goal"), rows))


def _measured(step_s: float, rounds: int) -> list[Round]:
    processes = multiprocessing.get_context("spawn")
    pipes = [processes.Pipe() for _ in range(REPLICAS)]
    address = processes.Queue()
    ranks = [
        processes.Process(target=_rank, args=(rank, theirs, address), daemon=True)
        for rank, (_, theirs) in enumerate(pipes)
    ]
    for each in ranks:
        each.start()
    ours = [each for each, _ in pipes]

    device_s = 0.0

    def block(side: str) -> float:
        for each in ours:
            each.send((side, device_s, max(SETTLING_STEPS + 2, round(BLOCK_S / step_s))))
        return median([each.recv() for each in ours])

    try:
        for each in (OURS, TORCHFT, PEER):  # the first step of each side connects
            computed_s = block(each)
        device_s = max(0.0, step_s - computed_s)
        sides = {PEER: PEER, OURS: OURS, PEER_AGAIN: PEER, TORCHFT: TORCHFT}
        return interleave({name: lambda side=side: block(side) for name, side in sides.items()}, rounds, unit="s")
    finally:
        for each in ranks:
            each.kill()
            each.join()


class _Device:
    """Computes for this long, on none of these cores."""

    busy_s = 0.0


def _rank(rank: int, told: Connection, address: Any) -> None:
    import torch

    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # TorchFT logs lines for each step
    if rank == 0:
        from torch.distributed import TCPStore
        from torchft.coordination import LighthouseServer

        lighthouse = LighthouseServer(bind="[::]:0", min_replicas=REPLICAS, quorum_tick_ms=10)
        second = LighthouseServer(bind="[::]:0", min_replicas=REPLICAS, quorum_tick_ms=10)
        store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        for _ in range(REPLICAS - 1):
            address.put((lighthouse.address(), second.address(), store.port))
        given = lighthouse.address(), second.address(), store.port
    else:
        given = address.get(timeout=300)
    ours, theirs, port = given
    device = _Device()
    sides = {
        PEER: _plain(rank, port, device),
        OURS: _holdfast(rank, ours, device),
        TORCHFT: _torchft(rank, theirs, port, device),
    }
    while True:
        name, device.busy_s, steps = told.recv()
        side = sides[name]
        took_s: list[float] = []
        for _ in range(steps):
            began = time.perf_counter()
            side()
            took_s.append(time.perf_counter() - began)
        told.send(median(took_s[SETTLING_STEPS:]))


def _made() -> tuple[Any, Any]:
    import torch

    torch.manual_seed(0)
    layers = [torch.nn.Linear(608, 608) for _ in range(10)]
    batch = torch.randn(256, 608)
    return torch.nn.Sequential(*(part for layer in layers for part in (layer, torch.nn.Tanh()))), batch


def _trained(model: Any, batch: Any, device: _Device) -> Any:
    loss = (model(batch) - batch).square().mean()
    time.sleep(device.busy_s)
    loss.backward()
    return loss


def _plain(rank: int, port: int, device: _Device) -> Side:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    model, batch = _made()
    store = dist.PrefixStore("plain", dist.TCPStore("localhost", port, is_master=False))
    group = dist.ProcessGroup(store, rank, REPLICAS)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    gloo = dist.ProcessGroupGloo(store, rank, REPLICAS, timedelta(seconds=300))
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    model = DistributedDataParallel(model, process_group=group)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        _trained(model, batch, device)
        optimizer.step()

    return step


def _holdfast(rank: int, lighthouse: str, device: _Device) -> Side:
    import torch

    from holdfast.train import RankConfig, Session

    model, batch = _made()
    optimizer = torch.optim.AdamW(model.parameters())
    told = RankConfig(
        replica=rank, replica_count=REPLICAS, min_replicas=2, lighthouse=lighthouse, master_addr="localhost"
    )
    session = Session(model=model, optimizer=optimizer, config=told)
    steps = session.steps(10**9)

    def step() -> None:
        next(steps)
        optimizer.zero_grad()
        loss = _trained(model, batch, device)
        optimizer.step()
        session.commit(loss=loss)

    return step


def _torchft(rank: int, lighthouse: str, port: int, device: _Device) -> Side:
    import torch
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    model, batch = _made()
    optimizer = torch.optim.AdamW(model.parameters())
    manager = Manager(
        pg=ProcessGroupGloo(),
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        min_replica_size=2,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=_store().port,
        lighthouse_addr=lighthouse,
        replica_id=str(rank),
        hostname="localhost",
    )
    wrapped, held = DistributedDataParallel(manager, model), Optimizer(manager, optimizer)

    def step() -> None:
        held.zero_grad()
        _trained(wrapped, batch, device)
        held.step()

    return step


_STORES: list[Any] = []
"""Kept for the lifetime of the process."""


def _store() -> Any:
    from torch.distributed import TCPStore

    _STORES.append(TCPStore("localhost", 0, is_master=True, wait_for_workers=False))
    return _STORES[-1]


if __name__ == "__main__":
    main()
