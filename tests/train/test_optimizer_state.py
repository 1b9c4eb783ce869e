"""Parameters without optimizer state are resumed without it: they end exactly as in training without a checkpoint."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.train.fork_context import forks
from torch.amp.grad_scaler import GradScaler
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from holdfast.agent.state_memory import PEER_CHECKPOINT_MEMFDS
from holdfast.errors import HoldfastError
from holdfast.host.memory_usage import MemoryUsage
from holdfast.train import RankConfig, Session
from holdfast.train.checkpoint.manager import CheckpointManager
from holdfast.train.checkpoint.manifest_file import Manifest
from holdfast.train.checkpoint.retention_policy import RetentionPolicy
from holdfast.train.checkpoint.storage import SharedStorage
from holdfast.train.checkpoint.train_state import TrainState
from holdfast.train.checkpoint.writer_fence import WriterId
from holdfast.train.ft import live_recovery, memory_snapshot
from holdfast.train.ft.memory_snapshot import MEMORY
from holdfast.train.ft.peer_checkpoint import PeerCheckpointer
from holdfast.train.session.control_group import ControlGroup

UNFROZEN = range(2, 4)
"""Steps in which the layer `thawed` is trained."""
FIRST_USE = 5
"""First step with a gradient of the layer `late`."""
STEPS = 7


def model_of() -> torch.nn.ModuleDict:
    torch.manual_seed(0)
    names = ("used", "thawed", "late", "unused")
    return torch.nn.ModuleDict({name: torch.nn.Linear(4, 4) for name in names})


def optimizer_of(model: torch.nn.Module) -> torch.optim.AdamW:
    layers = model.values()
    return torch.optim.AdamW([{"params": [*layer.parameters()], "lr": 0.1 / n} for n, layer in enumerate(layers, 1)])


def loop_of(used: tuple[str, ...] = ("used",), *, steps: int = 0) -> TrainState:
    model = model_of()
    loop = TrainState(model=model, optimizer=optimizer_of(model))
    for _ in range(steps):
        compute(model, used)
        loop.optimizer.step()
        loop.optimizer.zero_grad()
    return loop


def compute(model: Any, used: tuple[str, ...]) -> None:
    sum(model[name](torch.randn(2, 4)).square().sum() for name in used).backward()


def outcome(loop: TrainState) -> dict[str, Any]:
    """Weights and optimizer state by name."""
    names = {each: name for name, each in loop.model.named_parameters()}
    state = {names[each]: values for each, values in loop.optimizer.state.items()}
    return {"weights": {name: each.detach() for name, each in loop.model.named_parameters()}, "state": state}


def assert_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["state"].keys() == other["state"].keys()
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def train(folder: Path | None, until: int) -> dict[str, Any]:
    """Layers get their first gradient, or none any more, in the middle."""
    loop = loop_of()
    model: Any = loop.model
    model["thawed"].requires_grad_(False)
    told = RankConfig(checkpoint_path=folder, checkpoint_every_steps=1)
    session = Session(model=model, optimizer=loop.optimizer, config=told)
    for step in session.steps(until):
        model["thawed"].requires_grad_(step in UNFROZEN)
        used = ("used", "thawed", "late") if step >= FIRST_USE else ("used", "thawed")
        compute(model, used)
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        session.commit()
    return outcome(loop)


def test_layers_that_had_no_gradient_yet_or_get_none_any_more_resume_exactly(tmp_path: Path) -> None:
    unfailed = train(None, STEPS)
    for until in (1, 3, 4, STEPS):
        resumed = train(tmp_path, until)
    assert_equal(resumed, unfailed)
    assert {name.partition(".")[0] for name in resumed["state"]} == {"used", "thawed", "late"}


def train_fp16(folder: Path | None, until: int, *, grads_kept: bool) -> dict[str, Any]:
    """Steps of which the first two overflow, so that the scaler skips them."""
    loop = loop_of()
    scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
    told = RankConfig(checkpoint_path=folder, checkpoint_every_steps=1)
    session = Session(model=loop.model, optimizer=loop.optimizer, config=told)
    for step in session.steps(until):
        loop.optimizer.zero_grad()
        loss = loop.model["used"](torch.randn(2, 4)).square().sum() * (1.0 if step > 2 else float("inf"))
        scaler.scale(loss).backward()
        scaler.step(loop.optimizer)
        scaler.update()
        if not grads_kept:
            loop.optimizer.zero_grad()
        session.commit()
    return outcome(loop)


@pytest.mark.parametrize("grads_kept", [True, False])
def test_checkpoint_before_the_first_step_that_the_scaler_did_not_skip_resumes_exactly(
    tmp_path: Path, grads_kept: bool
) -> None:
    unfailed = train_fp16(None, 4, grads_kept=grads_kept)
    assert not train_fp16(tmp_path, 2, grads_kept=grads_kept)["state"]
    assert_equal(train_fp16(tmp_path, 4, grads_kept=grads_kept), unfailed)
    assert {values["step"].item() for values in unfailed["state"].values()} == {2.0}


def manager_of(folder: Path, loop: TrainState, memory: Path | None = None, **options: Any) -> CheckpointManager:
    storage = SharedStorage(folder, retention=RetentionPolicy(keep=3), ranks=ControlGroup(), writer=WriterId())
    return CheckpointManager(storage, train_state=loop, ranks=ControlGroup(), transfer_memory=memory, **options)


@pytest.fixture
def memories() -> Iterator[list[Path]]:
    pieces = [os.memfd_create("test") for _ in range(PEER_CHECKPOINT_MEMFDS)]
    yield [Path(f"/proc/self/fd/{piece}") for piece in pieces]
    for piece in pieces:
        os.close(piece)


def test_transferred_state_resumes_without_what_it_lacks(tmp_path: Path, memories: list[Path]) -> None:
    first, second = loop_of(steps=2), loop_of()
    assert manager_of(tmp_path, first, memories[0]).transfer_state(2) is None
    assert manager_of(tmp_path, second, memories[0]).restore().step == 2
    assert_equal(outcome(second), outcome(first))


def test_peer_checkpoint_resumes_without_what_it_lacks(tmp_path: Path, memories: list[Path]) -> None:
    def peer_checkpointer(loop: TrainState) -> PeerCheckpointer:
        return PeerCheckpointer(memories, train_state=loop, ranks=ControlGroup(), writer=WriterId(), nodes=1)

    first = loop_of()
    copies = peer_checkpointer(first)
    manager = manager_of(tmp_path, first, peer_checkpointer=copies)
    for step, used in enumerate(((), ("used",), ("used", "late"))):
        if used:
            compute(first.model, used)
            first.optimizer.step()
        copies.start(manager.new_manifest(step))
        assert copies.wait_finished().problem is None
        second = loop_of()
        restored = manager_of(tmp_path, second, peer_checkpointer=peer_checkpointer(second)).restore()
        assert (restored.step, restored.where, restored.saved_world_size) == (step, MEMORY, 1)
        assert_equal(outcome(second), outcome(first))


def test_peer_checkpoint_that_grows_beyond_memory_is_given_up(
    memories: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, seal = loop_of(), Manifest(step=1, world_size=1, files={})
    copies = PeerCheckpointer(memories, train_state=loop, ranks=ControlGroup(), writer=WriterId(), nodes=1)
    full = MemoryUsage(where="/sys/fs/cgroup/pod", used_bytes=1, limit_bytes=1)
    copies.start(seal)
    assert copies.wait_finished().problem is None
    monkeypatch.setattr(memory_snapshot, "memory_usages", lambda _: [full])
    copies.start(seal)
    assert copies.wait_finished().problem is None
    compute(loop.model, ("used",))
    loop.optimizer.step()
    copies.start(seal)
    assert copies.wait_finished().problem.code == "peer-checkpoints-stopped"


def test_older_checkpoint_that_is_restored_instead_of_a_damaged_one_has_its_own_state_alone(tmp_path: Path) -> None:
    first, second = loop_of(steps=1), loop_of()
    manager, before = manager_of(tmp_path, first), copy.deepcopy(outcome(first))
    for step in (1, 2):
        manager.start_save(step)
        assert manager.wait_saved().problem is None
        compute(first.model, ("late",))
        first.optimizer.step()
    (tmp_path / "step-00000002" / "__0_0.distcp").write_bytes(b"")
    assert manager_of(tmp_path, second).restore().step == 1
    assert second.optimizer.state.keys() == {*second.model["used"].parameters()}
    assert_equal(outcome(second), before)


@pytest.mark.parametrize("change", ["another shape", "another layer"])
def test_checkpoint_of_another_model_is_refused_as_before(tmp_path: Path, change: str) -> None:
    manager = manager_of(tmp_path, loop_of(steps=1))
    manager.start_save(1)
    assert manager.wait_saved().problem is None
    model = model_of()
    if change == "another shape":
        model["unused"] = torch.nn.Linear(4, 5)
    else:
        model["new"] = model.pop("unused")
    with pytest.raises(HoldfastError) as refused:
        manager_of(tmp_path, TrainState(model=model, optimizer=optimizer_of(model))).restore()
    assert refused.value.findings[0].code == "checkpoint-incompatible"


@pytest.mark.parametrize("given", [(), ("used",), ("used", "late")])
@pytest.mark.parametrize("had", [(), ("used", "unused")])
def test_replica_that_rejoins_has_the_state_of_its_donor_and_no_other(
    given: tuple[str, ...], had: tuple[str, ...]
) -> None:
    donor, behind = loop_of(given, steps=len(given)), loop_of(had, steps=len(had))
    compute(behind.model, ("used",))
    gradient = behind.model["used"].weight.grad
    live_recovery.import_state(behind, live_recovery.export_state(donor))
    assert_equal(outcome(behind), outcome(donor))
    assert behind.model["used"].weight.grad is gradient
    assert behind.model["late"].weight.grad is None


def flattened_rank(folder: Path) -> None:
    """Saves and restores a model of which legacy FSDP has flattened the parameters into one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def flattened() -> TrainState:
        model = FullyShardedDataParallel(torch.nn.Linear(4, 4), device_id=torch.device("cpu"))
        return TrainState(model=model, optimizer=torch.optim.AdamW(model.parameters()))

    first, second = flattened(), flattened()
    first.model(torch.ones(1, 4)).sum().backward()
    first.optimizer.step()
    manager = manager_of(folder, first)
    manager.start_save(1)
    assert manager.wait_saved().problem is None
    assert manager_of(folder, second).restore().step == 1
    (saved,), (loaded,) = (loop.optimizer.state.values() for loop in (first, second))
    torch.testing.assert_close(loaded, saved, rtol=0, atol=0)
    dist.destroy_process_group()


@pytest.mark.slow
def test_parameters_that_legacy_fsdp_has_flattened_resume(tmp_path: Path) -> None:
    run_ranks(flattened_rank, [(tmp_path,)])


def run_ranks(act: Callable[..., None], given: Sequence[tuple[Any, ...]]) -> None:
    """Run ranks in forks, to their ends."""
    ranks = [forks.Process(target=act, args=each) for each in given]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(100.0)
    assert [rank.exitcode for rank in ranks] == [0] * len(given)


def shard(model: torch.nn.ModuleDict, world_size: int) -> torch.nn.ModuleDict:
    mesh = init_device_mesh("cpu", (world_size,))
    for layer in model.values():
        fully_shard(layer, mesh=mesh)
    return model


def sharded_rank(folder: Path, number: int, rank: int, world_size: int, until: int) -> None:
    """The same training with its layers sharded; a replica that rejoins at the end has the outcome."""
    torch.set_num_threads(1)
    model = model_of()
    if world_size > 1:
        dist.init_process_group("gloo", f"file://{folder}/meet-{number}", None, world_size, rank)
        shard(model, world_size)
    model["thawed"].requires_grad_(False)
    loop = TrainState(model=model, optimizer=optimizer_of(model))
    told = RankConfig(rank=rank, world_size=world_size, checkpoint_path=folder / "kept", checkpoint_every_steps=1)
    session = Session(model=model, optimizer=loop.optimizer, config=told)
    for step in session.steps(until):
        torch.manual_seed(step)
        model["thawed"].requires_grad_(step in UNFROZEN)
        names = ("used", "thawed", "late") if step >= FIRST_USE else ("used", "thawed")
        compute(model, names)
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        session.commit()
    if world_size > 1:
        again = shard(model_of(), world_size)
        behind = TrainState(model=again, optimizer=optimizer_of(again))
        again["late"].weight.grad = torch.zeros_like(again["late"].weight)
        live_recovery.import_state(behind, live_recovery.export_state(loop))
        loop = behind
    whole = get_state_dict(loop.model, loop.optimizer, options=StateDictOptions(full_state_dict=True))
    if rank == 0:
        torch.save(whole, folder / f"{number}.pt")
    if world_size > 1:
        dist.destroy_process_group()


@pytest.mark.slow
def test_other_numbers_of_ranks_resume_exactly(tmp_path: Path) -> None:
    for number, (folder, world_size, until) in enumerate(
        (("unfailed", 1, STEPS), ("failed", 2, 2), ("failed", 1, 4), ("failed", 2, STEPS))
    ):
        (tmp_path / folder).mkdir(exist_ok=True)
        given = [(tmp_path / folder, number, rank, world_size, until) for rank in range(world_size)]
        run_ranks(sharded_rank, given)
    unfailed, resumed = torch.load(tmp_path / "unfailed" / "0.pt"), torch.load(tmp_path / "failed" / "3.pt")
    assert resumed[1]["state"].keys() == unfailed[1]["state"].keys()
    assert {name.partition(".")[0] for name in resumed[1]["state"]} == {"used", "thawed", "late"}
    for each in (resumed, unfailed):
        del each[1]["param_groups"]
    torch.testing.assert_close(resumed, unfailed, rtol=0, atol=0)
