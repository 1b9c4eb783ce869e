"""Forks the ranks of several replicas once, to train many cases one after the other."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.programs import nccl_like
from tests.train.fork_context import forks
from tests.train.replica_job import answer
from torch.distributed.tensor import DTensor
from torchft.coordination import LighthouseServer

from holdfast.train.session.rank_config import RankConfig

DEADLINE_S = 200.0

Train = Callable[[str, RankConfig, Path], None]
"""Trains the case of this name as one rank."""


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the whole tensor; all ranks of a replica call it."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def leave(session: Any) -> None:
    """End the part of a session that outlives its loop."""
    session._replicas._replica_group.manager.shutdown(wait=False)


def _rank(
    out: Path,
    train: Train,
    configs: dict[str, RankConfig],
    group: str,
    lighthouses: dict[str, str],
    replica: int,
    rank: int,
) -> None:
    """Train all cases that have this rank; first those of one rank, which have no process group."""
    torch.set_num_threads(1)
    with (out / f"{replica}.{rank}.err").open("w") as errors:
        os.dup2(errors.fileno(), sys.stderr.fileno())
        os.dup2(errors.fileno(), sys.stdout.fileno())
    if group == "nccl-like":
        nccl_like.install()
    backend = nccl_like.register() if group == "nccl-like" else "gloo"
    for name in sorted(configs, key=lambda name: configs[name].world_size > 1):
        config = configs[name]
        if replica >= config.replica_count or rank >= config.world_size:
            continue
        if config.world_size > 1 and not dist.is_initialized():
            dist.init_process_group(backend, f"file://{out}/meet.{replica}", None, config.world_size, rank)
        given = {"rank": rank, "replica": replica, "lighthouse": lighthouses[name], "master_addr": "localhost"}
        with (out / f"{name}.{replica}.{rank}.err").open("w") as errors:
            os.dup2(errors.fileno(), sys.stderr.fileno())
        try:
            train(name, RankConfig(**{field: getattr(config, field) for field in config.__slots__} | given), out)
        except Exception:
            (out / f"{name}.{replica}.{rank}.failed").write_text(traceback.format_exc())
    if dist.is_initialized():
        dist.destroy_process_group()


def _lighthouses(asking: Connection, replicas: Mapping[str, int]) -> None:
    """A quorum service for each case and its replicas, so that none waits for a replica of the case before."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    servers = {
        name: LighthouseServer(bind="[::]:0", min_replicas=count, join_timeout_ms=60_000, quorum_tick_ms=10)
        for name, count in replicas.items()
    }
    asking.send({name: server.address() for name, server in servers.items()})
    asking.poll(None)  # until the requester is gone


def run(out: Path, train: Train, configs: dict[str, RankConfig], group: str) -> None:
    """Train each case; a rank that raises leaves its traceback in `NAME.REPLICA.RANK.failed`.

    `group`, which is "gloo" or "nccl-like": what replicas, and the ranks of each, communicate by.
    """
    ours, theirs = forks.Pipe()
    replicas = {name: each.replica_count for name, each in configs.items()}
    quorum = forks.Process(target=_lighthouses, args=(theirs, replicas), daemon=True)
    quorum.start()
    lighthouses = answer(ours, theirs)
    places = [
        (replica, rank)
        for replica in range(max(each.replica_count for each in configs.values()))
        for rank in range(max(each.world_size for each in configs.values()))
    ]
    ranks = [forks.Process(target=_rank, args=(out, train, configs, group, lighthouses, *place)) for place in places]
    try:
        for each in ranks:
            each.start()
        living = [*ranks]
        while living:
            assert wait([each.sentinel for each in living], DEADLINE_S), f"stuck: {sorted(out.iterdir())}"
            living = [each for each in ranks if each.exitcode is None]
    finally:
        for process in (quorum, *ranks):
            if process.pid is not None:
                process.kill()
                process.join()
