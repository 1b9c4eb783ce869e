"""A rank for tests of launchers: the sum of all ranks, by a library for the launcher, and its environment.

    python launcher_allreduce.py KIND

KIND is one of the functions below. The rank writes its observations to HOLDFAST_CHECKPOINT_PATH, as `rank-RANK.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path


def torch() -> tuple[int, float]:
    """For torchrun, and every launcher that sets torchrun's variables."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    mine = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(mine)
    rank = dist.get_rank()
    dist.destroy_process_group()
    return rank, mine.item()


def megatron() -> tuple[int, float]:
    """Set up like Megatron-LM: torchrun's variables, its own arguments, groups of neighbouring ranks."""
    import torch
    import torch.distributed as dist

    parser = argparse.ArgumentParser()
    parser.add_argument("--tensor-model-parallel-size", type=int)
    arguments, _ = parser.parse_known_args()
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world_size, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    size = arguments.tensor_model_parallel_size
    tensor = [dist.new_group(list(range(first, first + size))) for first in range(0, world_size, size)]
    data = [dist.new_group(list(range(first, world_size, size))) for first in range(size)]
    mine = torch.tensor(float(rank))
    dist.all_reduce(mine, group=tensor[rank // size])
    dist.all_reduce(mine, group=data[rank % size])
    dist.barrier()
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


KINDS: dict[str, Callable[[], tuple[int, float]]] = {
    one.__name__: one for one in (torch, megatron, accelerate, jax, mpi)
}


def main() -> None:
    kind = next(word for word in sys.argv[1:] if word in KINDS)  # DeepSpeed adds --local_rank
    rank, total = KINDS[kind]()
    folder = Path(os.environ["HOLDFAST_CHECKPOINT_PATH"])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"rank-{rank}.json").write_text(json.dumps({"sum": total, "environ": dict(os.environ)}))


if __name__ == "__main__":
    main()
