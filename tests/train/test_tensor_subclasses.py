"""Tensors that wrap others, as torchao's Float8 tensors do, are staged, saved, handed over and loaded to the bit.

TwoTensor is torch's own wrapper for tests. torchao is no dependency of the tests, as its import alone takes 4 s. The
Float8 weights of its version 0.18.0 under FSDP2 were saved and loaded to the bit by hand, on a CPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.serialization import add_safe_globals, clear_safe_globals, get_safe_globals
from torch.testing._internal.two_tensor import TwoTensor

from holdfast.train.checkpoint import dcp_io, pytree
from holdfast.train.checkpoint.manager import CheckpointManager
from holdfast.train.checkpoint.manifest_file import Manifest
from holdfast.train.checkpoint.retention_policy import RetentionPolicy
from holdfast.train.checkpoint.staging import StagingBuffer
from holdfast.train.checkpoint.storage import SharedStorage
from holdfast.train.checkpoint.train_state import TrainState
from holdfast.train.checkpoint.writer_fence import WriterId
from holdfast.train.ft import memory_snapshot
from holdfast.train.ft.memory_snapshot import MemorySnapshot
from holdfast.train.session.control_group import ControlGroup
from holdfast.train.torch_private import local_part


@pytest.fixture
def _registered() -> Iterator[None]:
    before = get_safe_globals()
    add_safe_globals([TwoTensor])
    yield
    clear_safe_globals()
    add_safe_globals(before)
    dcp_io._SAFE_TENSOR_TYPES.discard(TwoTensor)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield DeviceMesh("cpu", [0])
    dist.destroy_process_group()


def two(first: float) -> TwoTensor:
    return TwoTensor(torch.full((4, 3), first), torch.full((4, 3), first + 0.5))


class Wrapped(torch.nn.Module):
    """A parameter that is a wrapper, and a plain one."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight)
        self.bias = torch.nn.Parameter(torch.zeros(3))


def plainly(first: float, _: DeviceMesh) -> torch.Tensor:
    return two(first)


def sharded(first: float, mesh: DeviceMesh) -> torch.Tensor:
    return DTensor.from_local(two(first), mesh, [Shard(0)])


def loop(weight: torch.Tensor) -> TrainState:
    model = Wrapped(weight)
    return TrainState(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5))


def values(loop: TrainState) -> list[float]:
    return [part.flatten()[0].item() for part in map(local_part, pytree.iter_tensors(loop.model.state_dict()))]


def step(loop: TrainState) -> None:
    for each in loop.model.parameters():
        each.grad = torch.ones_like(each)
    loop.optimizer.step()


KINDS = pytest.mark.parametrize("make", [plainly, sharded])


@KINDS
def test_wrapper_is_staged_as_it_was_and_keeps_its_type(make: Callable[..., Any], mesh: DeviceMesh) -> None:
    state = loop(make(1.0, mesh))
    buffer = StagingBuffer(state)
    for expected in ([1.0, 1.5, 0.0], [0.5, 1.0, -0.5]):
        staged = buffer.start_copy()
        assert buffer.finish_copy()
        weight = staged["model"]["weight"]
        assert type(weight) is type(state.model.weight)
        assert type(local_part(weight)) is TwoTensor
        step(state)
        assert [each.flatten()[0].item() for each in map(local_part, pytree.iter_tensors(staged["model"]))] == expected


@KINDS
def test_change_of_a_wrapper_meanwhile_is_noticed(make: Callable[..., Any], mesh: DeviceMesh) -> None:
    state = loop(make(1.0, mesh))
    buffer = StagingBuffer(state)
    buffer.start_copy()
    with torch.no_grad():
        state.model.weight.mul_(2)
    assert not buffer.finish_copy()


def checkpoints(folder: Path, state: TrainState) -> CheckpointManager:
    ranks = ControlGroup()
    storage = SharedStorage(folder, retention=RetentionPolicy(keep=3), ranks=ranks, writer=WriterId())
    return CheckpointManager(storage, train_state=state, ranks=ranks)


@KINDS
@pytest.mark.usefixtures("_registered")
def test_checkpoint_with_wrappers_is_loaded_to_the_bit(make, mesh: DeviceMesh, tmp_path: Path) -> None:
    saved, loaded = loop(make(1.0, mesh)), loop(make(7.0, mesh))
    step(saved)
    saving = checkpoints(tmp_path, saved)
    saving.start_save(1)
    assert saving.wait_saved().problem is None
    assert checkpoints(tmp_path, loaded).restore().step == 1
    assert values(loaded) == values(saved) == [0.5, 1.0, -0.5]
    assert type(local_part(loaded.model.weight)) is TwoTensor


def test_wrapper_that_nobody_has_allowed_fails_the_save_and_is_named(tmp_path: Path) -> None:
    saving = checkpoints(tmp_path, loop(two(1.0)))
    saving.start_save(1)
    problem = saving.wait_saved().problem
    assert (problem.code, problem.where) == ("checkpoint-state-unsafe", "model.weight")
    assert problem.evidence == ("torch.testing._internal.two_tensor.TwoTensor",)


@KINDS
def test_wrapper_is_handed_over_in_memory(make: Callable[..., Any], mesh: DeviceMesh) -> None:
    piece = os.memfd_create("test")
    memory = Path(f"/proc/self/fd/{piece}")
    saved, loaded = loop(make(1.0, mesh)), loop(make(7.0, mesh))
    memory_snapshot.write(memory, WriterId(), 0, Manifest(step=1, world_size=1, files={}), saved.tensors(), b"")
    snapshot = MemorySnapshot.load(memory)
    assert snapshot is not None
    assert snapshot.find_damage() is None
    snapshot.copy_into(loaded.tensors())
    assert values(loaded) == values(saved)
    os.close(piece)


class Opaque(torch.Tensor):
    """A subclass that does not say what it consists of."""


def test_subclass_that_does_not_tell_its_parts_is_copied_by_its_own_methods_and_not_handed_over(tmp_path: Path) -> None:
    state = loop(torch.ones(4, 3).as_subclass(Opaque))
    buffer = StagingBuffer(state)
    staged = buffer.start_copy()
    assert buffer.finish_copy()
    assert type(staged["model"]["weight"]) is Opaque
    memory = tmp_path / "memory"
    memory.touch()
    with pytest.raises(RuntimeError, match="Opaque"):
        memory_snapshot.write(memory, WriterId(), 0, Manifest(step=1, world_size=1, files={}), state.tensors(), b"")
