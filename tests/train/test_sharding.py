from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from holdfast.train.data.sharding import shard_step
from holdfast.train.session.control_group import ControlGroup

worlds = st.integers(1, 40)


def dealt(samples: range, at_once: int, world_size: int):
    return [shard_step(samples, at_once, ControlGroup(rank=rank, world_size=world_size)) for rank in range(world_size)]


@pytest.mark.parametrize("rank", range(4))
def test_where_all_ranks_are_there_each_takes_its_batch_at_once(rank: int):
    (micro,) = dealt(range(96, 128), 8, 4)[rank]
    assert (micro.samples, micro.loss_scale, micro.is_last) == (range(96 + 8 * rank, 104 + 8 * rank), 1.0, True)


@given(first=st.integers(0, 10**9), batch=st.integers(1, 9), full=worlds, world_size=worlds)
def test_each_sample_counts_once_on_one_rank_and_no_rank_computes_too_many_at_once(first, batch, full, world_size):
    world_size = min(full, world_size)
    samples = range(first, first + batch * full)
    ranks = dealt(samples, batch, world_size)
    assert [number for parts in ranks for part in parts if part.loss_scale for number in part.samples] == list(samples)
    assert all(1 <= len(part.samples) <= batch for parts in ranks for part in parts)
    assert len({len(parts) for parts in ranks}) == 1
    assert all([part.is_last for part in parts] == [False] * (len(parts) - 1) + [True] for parts in ranks)
    shares = [sum(len(part.samples) for part in parts if part.loss_scale) for parts in ranks]
    assert max(shares) - min(shares) <= 1
    assert sum(part.loss_scale for parts in ranks for part in parts) == pytest.approx(world_size)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_gradient_of_a_step_is_the_same_on_fewer_ranks(world_size: int):
    inputs = torch.randn(12, 5, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    weights = torch.ones(5, dtype=torch.float64, requires_grad=True)

    def gradient(samples: range, scale: float) -> torch.Tensor:
        loss = (inputs[torch.tensor(samples)] @ weights).square().mean() * scale
        return torch.autograd.grad(loss, weights)[0]

    ranks = dealt(range(12), 3, world_size)
    sums = [sum(gradient(part.samples, part.loss_scale) for part in parts) for parts in ranks]
    assert torch.allclose(sum(sums) / world_size, gradient(range(12), 1.0))
