"""A rank for tests of launchers: the sum of all ranks, by a library of the launcher's kind, and its environment.

    python summing.py KIND

KIND is one of the functions below. What a rank has seen goes into HOLDFAST_CHECKPOINT_PATH, as `rank-RANK.json`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path


def torch() -> tuple[int, float]:
    """For torchrun, and every launcher that sets what torchrun sets."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    mine = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(mine)
    rank = dist.get_rank()
    dist.destroy_process_group()
    return rank, mine.item()


def accelerate() -> tuple[int, float]:
    import torch
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    total = accelerator.reduce(torch.tensor(float(accelerator.process_index)))
    accelerator.end_training()
    return accelerator.process_index, float(total)


def jax() -> tuple[int, float]:
    import jax
    from jax.experimental.multihost_utils import process_allgather

    jax.distributed.initialize(num_processes=int(os.environ["WORLD_SIZE"]), process_id=int(os.environ["RANK"]))
    rank = jax.process_index()
    total = process_allgather(jax.numpy.array(float(rank))).sum()
    jax.distributed.shutdown()
    return rank, float(total)


def mpi() -> tuple[int, float]:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    return world.Get_rank(), float(world.allreduce(world.Get_rank()))


KINDS: dict[str, Callable[[], tuple[int, float]]] = {one.__name__: one for one in (torch, accelerate, jax, mpi)}


def main() -> None:
    kind = next(word for word in sys.argv[1:] if word in KINDS)  # DeepSpeed adds --local_rank
    rank, total = KINDS[kind]()
    folder = Path(os.environ["HOLDFAST_CHECKPOINT_PATH"])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"rank-{rank}.json").write_text(json.dumps({"sum": total, "environ": dict(os.environ)}))


if __name__ == "__main__":
    main()
