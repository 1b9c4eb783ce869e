"""Ranks that save a model with one sharding and resume with another; torch is imported once for all.

`resharding.py FOLDER SAVING LOADING ...`: each a kind and a number of ranks, such as fsdp:4; `-` leaves one out. The
saved and the loaded state are assembled in FOLDER/N-saved.pt and FOLDER/N-loaded.pt for the Nth pair.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch._dynamo  # an optimizer would import it in every rank
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from holdfast.train import RankConfig, Session
from holdfast.train.checkpoint import train_state


def model_of(way: str, world_size: int) -> torch.nn.Module:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(7, 13), torch.nn.BatchNorm1d(13), torch.nn.Linear(13, 7))
    if way == "ddp":
        return DistributedDataParallel(model)
    if way == "fsdp":
        return fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    if way == "hsdp":
        mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard"))
        return fully_shard(model, mesh=mesh)
    return model


def rank_of(folder: Path, number: int, verb: str, way: str, rank: int, world_size: int) -> None:
    torch.set_num_threads(1)
    if world_size > 1:
        dist.init_process_group("gloo", f"file://{folder}/meet-{number}-{verb}", None, world_size, rank)
    model, average = model_of(way, world_size), model_of(way, world_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    asked: list[object] = []
    train_state.get_state_dict = lambda *given: asked.append(given) or get_state_dict(*given)
    told = RankConfig(rank=rank, world_size=world_size, checkpoint_path=folder / str(number), checkpoint_every_steps=1)
    session = Session(model=model, optimizer=optimizer, state={"average": average}, config=told)
    done = session.step
    if verb == "saved":
        for _ in session.steps(2):
            optimizer.zero_grad()
            model(torch.randn(4, 7)).square().mean().backward()
            optimizer.step()
            with torch.no_grad():
                for mean, latest in zip(average.parameters(), model.parameters(), strict=True):
                    mean.lerp_(latest, 0.5)
            session.commit()
        assert len(asked) == 1, f"get_state_dict ran {len(asked)} times for two saves"
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole = get_state_dict(model, optimizer, options=options)
    mean = get_model_state_dict(average, options=options)
    if rank == 0:
        torch.save((done, *whole, mean), folder / f"{number}-{verb}.pt")
    if verb == "loaded":
        for _ in session.steps(done + 1):
            optimizer.zero_grad()
            model(torch.randn(4, 7)).square().mean().backward()
            optimizer.step()
            session.commit()
    if world_size > 1:
        dist.destroy_process_group()


def ranks_of(folder: Path, number: int, verb: str, ways: str) -> None:
    way, _, world_size = ways.partition(":")
    pids = []
    for rank in range(int(world_size)):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                rank_of(folder, number, verb, way, rank, int(world_size))
                code = 0
            finally:
                sys.stderr.flush()
                os._exit(code)
        pids.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    if any(codes):
        sys.exit(f"{ways} {verb}: {codes}")


if __name__ == "__main__":
    for number, ways in enumerate(zip(sys.argv[2::2], sys.argv[3::2], strict=True)):
        for verb, way in zip(("saved", "loaded"), ways, strict=True):
            if way != "-":
                ranks_of(Path(sys.argv[1]), number, verb, way)
