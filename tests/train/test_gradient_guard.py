"""Which of a rank's gradients, weights and optimizer state are not finite, seen before ranks exchange anything."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from tests.train.fork_context import forks
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from holdfast.train.metrics.gradient_guard import SUM, GradientGuard, is_sound

DEADLINE_S = 200.0


class Loop:
    """Two layers in two groups, and a third one that is frozen."""

    def __init__(self, optimizer: Callable[[list[Any]], Optimizer] = torch.optim.AdamW) -> None:
        torch.manual_seed(0)
        self.body, self.head, frozen = nn.Linear(3, 3), nn.Linear(3, 1), nn.Linear(1, 1)
        frozen.requires_grad_(False)
        self.model = nn.Sequential(self.body, self.head, frozen)
        groups = [{"params": [*self.body.parameters()]}, {"params": [*self.head.parameters(), *frozen.parameters()]}]
        self.optimizer = optimizer(groups)
        self.guard = GradientGuard(self.model, self.optimizer)

    def backward(self, factor: float = 1.0) -> None:
        (self.model(torch.ones(2, 3)).sum() * factor).backward()

    def step(self, factor: float = 1.0) -> float:
        self.optimizer.zero_grad()
        self.backward(factor)
        self.optimizer.step()
        return float(self.guard.end_step()[SUM])


def nan_in(parameter: torch.Tensor) -> None:
    """Damage the gradient of the next backward pass."""

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        handle.remove()
        return gradient * math.nan

    handle: Any = cast("Any", parameter).register_hook(hook)


def test_gradient_is_named_with_its_group_and_parameter_and_only_for_its_step() -> None:
    loop = Loop()
    assert is_sound(loop.step())
    assert loop.guard.gradient() is None
    nan_in(loop.head.bias)
    assert not is_sound(loop.step())
    place = loop.guard.gradient()
    assert place is not None
    assert (place.group, place.name, str(place)) == (1, "1.bias", "1 (1.bias)")
    loop.optimizer.zero_grad()
    loop.guard.end_step()
    assert loop.guard.gradient() is None


def test_first_in_the_order_of_the_optimizer_is_named_where_several_are_not_finite() -> None:
    loop = Loop()
    loop.step(math.inf)
    assert str(loop.guard.gradient()) == "0 (0.weight)"


@pytest.mark.parametrize("which", ["weights", "optimizer"])
def test_damage_is_that_of_weights_or_of_the_optimizers_state(which: str) -> None:
    loop = Loop()
    loop.step()
    assert loop.guard.damage() is None
    with torch.no_grad():
        damaged = loop.head.weight if which == "weights" else loop.optimizer.state[loop.head.weight]["exp_avg_sq"]
        damaged[0, 1] = math.inf
    damage = loop.guard.damage()
    assert damage is not None
    assert (damage[0], str(damage[1])) == (which, "1 (1.weight)")


@pytest.mark.parametrize(
    "optimizer",
    [
        partial(torch.optim.AdamW, foreach=True),
        partial(torch.optim.AdamW, fused=True),
        partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        partial(torch.optim.SGD, lr=0.1),
    ],
    ids=["foreach", "fused", "momentum", "no state"],
)
def test_every_kind_of_optimizer_is_watched(optimizer: Callable[[list[Any]], Optimizer]) -> None:
    loop = Loop(optimizer)
    assert is_sound(loop.step())
    assert loop.guard.damage() is None
    nan_in(loop.body.bias)
    assert not is_sound(loop.step())
    assert loop.guard.damage() is not None


def test_gradient_of_any_micro_batch_counts() -> None:
    for bad in range(3):
        loop = Loop()
        for number in range(3):
            if number == bad:
                nan_in(loop.head.weight)
            loop.backward()
        assert not is_sound(float(loop.guard.end_step()[SUM]))
        assert str(loop.guard.gradient()) == "1 (1.weight)"


def test_update_that_loss_scaling_skips_damages_nothing() -> None:
    loop, scaler = Loop(), GradScaler("cpu", init_scale=4.0)
    loop.step()
    nan_in(loop.head.weight)
    loop.optimizer.zero_grad()
    scaler.scale(loop.model(torch.ones(2, 3)).sum()).backward()
    scaler.step(loop.optimizer)
    scaler.update()
    assert not is_sound(float(loop.guard.end_step()[SUM]))
    assert str(loop.guard.gradient()) == "1 (1.weight)"
    assert loop.guard.damage() is None
    assert scaler.get_scale() == 2.0


def test_large_gradients_of_half_precision_are_sound_and_scalars_and_sparse_ones_are_summed() -> None:
    scalar = nn.Parameter(torch.tensor(2.0))
    half = nn.Parameter(torch.full((4096,), 1.0, dtype=torch.float16))
    table = nn.Embedding(8, 2, sparse=True)
    complex_one = nn.Parameter(torch.ones(1, dtype=torch.complex64))
    optimizer = torch.optim.SGD([scalar, half, table.weight, complex_one], lr=0.0)
    guard = GradientGuard(table, optimizer)
    (scalar * 3.0 + half.float().sum() * 60_000.0 + table(torch.tensor([1, 1])).sum()).backward()
    assert float(guard.end_step()[SUM]) == pytest.approx(3.0 + 4096 * 60_000.0 + 4.0)
    (table(torch.tensor([3])) * math.nan).sum().backward()
    guard.end_step()
    assert str(guard.gradient()) == "0 (weight)"


def test_step_without_gradients_and_model_without_trained_parameters_are_sound() -> None:
    loop = Loop()
    assert float(loop.guard.end_step()[SUM]) == 0.0
    frozen = nn.Linear(1, 1).requires_grad_(False)
    guard = GradientGuard(frozen, torch.optim.SGD(frozen.parameters(), lr=0.1))
    assert guard.end_step() == {}
    assert guard.gradient() is None
    assert guard.damage() is None


def test_guard_holds_no_parameter_that_its_program_no_longer_has() -> None:
    loop = Loop()
    loop.step()
    gone = weakref.ref(loop.body.weight)
    del loop
    gc.collect()
    assert gone() is None


def test_closed_guard_sees_no_more() -> None:
    loop = Loop()
    loop.guard.close()
    nan_in(loop.head.bias)
    assert is_sound(loop.step())


# Several ranks

CASES = ("ddp", "bucket views", "static graph", "no_sync", "each micro-batch", "tied", "fsdp")


def _to_nan(_module: nn.Module, _given: Any, output: torch.Tensor) -> torch.Tensor:
    return output * math.nan


def _of_rank(rank: int, case: str) -> tuple[str, bool, str]:
    """Train two steps, in the second of which rank 1 has a NaN; what each rank's guard says of it."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    if case == "tied":
        model[2].weight = model[0].weight
    bad = model[2]
    if case == "fsdp":
        model = cast("Any", fully_shard(model))
    else:
        model = DistributedDataParallel(
            model, gradient_as_bucket_view=case == "bucket views", static_graph=case == "static graph"
        )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    guard = GradientGuard(model, optimizer)
    batches = 2 if case in ("no_sync", "each micro-batch") else 1
    for step in (1, 2):
        optimizer.zero_grad()
        for batch in range(batches):
            if step == 2 and rank == 1 and batch == batches - 1:
                if case == "fsdp":
                    model.register_forward_hook(_to_nan)
                else:
                    nan_in(bad.bias)
            waits = case == "no_sync" and batch < batches - 1
            with model.no_sync() if waits else torch.enable_grad():
                model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        total = float(guard.end_step()[SUM])
        assert step == 2 or is_sound(total), total
    damage = guard.damage()
    return str(guard.gradient()), guard.sees_own_gradients, damage[0] if damage else ""


def _rank(rank: int, meet: Path, answers: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{meet}", None, 2, rank)
    answers.send({case: _of_rank(rank, case) for case in CASES})
    dist.destroy_process_group()


@pytest.mark.slow
def test_rank_with_the_nan_is_the_only_one_that_sees_it_before_ranks_exchange_gradients(tmp_path: Path) -> None:
    pipes = [forks.Pipe() for _ in range(2)]
    ranks = [forks.Process(target=_rank, args=(rank, tmp_path / "meet", pipes[rank][1])) for rank in range(2)]
    try:
        for rank in ranks:
            rank.start()
        for _, theirs in pipes:
            theirs.close()
        assert all(ours.poll(DEADLINE_S) for ours, _ in pipes)
        first, second = (ours.recv() for ours, _ in pipes)
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
    for case in CASES:
        if case == "fsdp":  # it sees shards only, which have been reduced, and knows it
            assert [one[case][1:] for one in (first, second)] == [(False, "weights")] * 2
        else:
            assert (first[case], second[case]) == (("None", True, "weights"), ("0 (2.bias)", True, "weights")), case
