"""Gradients that replicas average, and wrappers that would change them afterwards."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest
import torch
import torch._dynamo  # so that no test waits for it
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from holdfast.errors import HoldfastError
from holdfast.train.checkpoint.train_state import TrainState
from holdfast.train.ft.gradient_reducer import GradientReducer
from holdfast.train.ft.replica_strategy import ReplicaStrategy, _GatedOptimizer
from holdfast.train.ft.wrappers import UNSUPPORTED, GradientSync, refuse_unsupported

OTHERS = 8.0
"""What the other replica has in each gradient, and in each of the two words that travel behind them."""


class Link:
    """The way to one other replica, whose gradients are all the same."""

    count = 2

    def start_allreduce(self, tensor: torch.Tensor) -> None:
        tensor += OTHERS / 2

    def wait_all(self) -> bool:
        return True


@pytest.fixture
def group(tmp_path: Path) -> Generator[None]:
    dist.init_process_group("gloo", f"file://{tmp_path}/meet", None, 1, 0)
    yield
    dist.destroy_process_group()


def model() -> torch.nn.Linear:
    return torch.nn.Linear(2, 1, bias=False)


def backward(wrapper: torch.nn.Module) -> None:
    wrapper(torch.tensor([[1.0, 3.0]])).sum().backward()


def test_mean_of_a_plain_model_and_of_compiled_ddp_on_one_rank_is_left_alone(group: None):
    for wrap in (lambda inner: inner, lambda inner: torch.compile(DistributedDataParallel(inner), backend="eager")):
        inner = model()
        wrapper = wrap(inner)
        GradientSync(wrapper).set(enabled=False)
        GradientReducer(wrapper, Link(), ddp_reduces=False)
        for _ in range(2):
            inner.weight.grad = None
            backward(wrapper)
            assert inner.weight.grad.tolist() == [[(1 + OTHERS) / 2, (3 + OTHERS) / 2]]


def test_mean_of_ddp_with_a_static_graph_on_one_rank_is_left_alone_in_its_first_pass_too(group: None):
    inner = model()
    wrapper = DistributedDataParallel(inner, static_graph=True)
    sync = GradientSync(wrapper)
    reducer = GradientReducer(wrapper, Link(), ddp_reduces=sync.has_static_graph)
    for _ in range(2):
        inner.weight.grad = None
        for reducer.armed in (False, True):
            sync.set(enabled=reducer.armed)
            backward(wrapper)
        assert inner.weight.grad.tolist() == [[(2 + OTHERS) / 2, (6 + OTHERS) / 2]]


def test_ddp_that_the_session_is_not_given_is_refused_before_the_optimizer_steps(group: None):
    inner = model()
    wrapper = DistributedDataParallel(inner)
    GradientReducer(inner, Link(), ddp_reduces=False)
    with pytest.raises(HoldfastError) as refused:
        backward(wrapper)
    assert refused.value.findings[0].code == "replicas-gradients-overwritten"


def test_ddp_at_any_depth_is_told_not_to_reduce(group: None):
    one, other = (DistributedDataParallel(model()) for _ in range(2))
    sync = GradientSync(torch.compile(torch.nn.ModuleList([torch.nn.Sequential(one), other]), backend="eager"))
    sync.set(enabled=False)
    assert (one.require_backward_grad_sync, other.require_backward_grad_sync) == (False, False)


def test_single_replica_switches_only_ddp_around_the_model_and_none_inside_it(group: None):
    """A GAN's two DDPs in one ModuleDict: the last micro-batch may skip one, whose gradients would never be reduced."""
    both = torch.nn.ModuleDict(
        {"generator": DistributedDataParallel(model()), "module": DistributedDataParallel(model())}
    )
    ReplicaStrategy(both).before_backward(last=False)
    assert [each.require_backward_grad_sync for each in both.children()] == [True, True]
    wrapped = DistributedDataParallel(model())
    alone = ReplicaStrategy(torch.compile(wrapped, backend="eager"))
    for last in (False, True):
        alone.before_backward(last=last)
        assert wrapped.require_backward_grad_sync is last


def test_wrapper_that_reduces_in_its_own_way_is_refused_at_any_depth():
    class FullyShardedDataParallel(torch.nn.Module):
        pass

    FullyShardedDataParallel.__module__ = "torch.distributed.fsdp.fully_sharded_data_parallel"
    FullyShardedDataParallel.__qualname__ = "FullyShardedDataParallel"

    class Mine(FullyShardedDataParallel):
        pass

    refuse_unsupported(torch.nn.Sequential(model()))
    with pytest.raises(HoldfastError) as refused:
        refuse_unsupported(torch.compile(torch.nn.Sequential(Mine()), backend="eager"))
    (finding,) = refused.value.findings
    assert finding.code == "replicas-wrapper-unsupported"
    assert "fully_shard" in finding.remedy


def test_unsupported_wrappers_that_are_installed_bear_the_names_they_are_known_by():
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torchft.ddp import DistributedDataParallel as Averaged
    from torchft.ddp import PureDistributedDataParallel

    for kind in (FullyShardedDataParallel, Averaged, PureDistributedDataParallel):
        assert f"{kind.__module__}.{kind.__qualname__}" in UNSUPPORTED


def test_optimizer_step_that_was_compiled_before_the_session_is_refused():
    inner = model()
    loop = TrainState(model=inner, optimizer=torch.optim.SGD(inner.parameters(), lr=1.0))
    early = torch.compile(loop.optimizer.step, backend="eager")
    held = _GatedOptimizer(loop.optimizer, lambda: True, loop.post_step_state)
    late = torch.compile(loop.optimizer.step, backend="eager")
    backward(inner)
    was = inner.weight.detach().clone()
    held.open_step()
    with pytest.raises(HoldfastError) as refused:
        early()
    assert refused.value.findings[0].code == "optimizer-step-bypassed"
    assert torch.equal(inner.weight, was)
    late()
    assert not torch.equal(inner.weight, was)
