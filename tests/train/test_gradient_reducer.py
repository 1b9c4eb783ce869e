"""Gradients that replicas average, and wrappers that would change them afterwards."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch._dynamo  # so that no test waits for it
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from holdfast.errors import HoldfastError
from holdfast.train.checkpoint.train_state import TrainState
from holdfast.train.ft import gradient_reducer
from holdfast.train.ft.gradient_reducer import GradientReducer
from holdfast.train.ft.replica_strategy import ReplicaStrategy, _GatedOptimizer
from holdfast.train.ft.wrappers import UNSUPPORTED, GradientSync, refuse_unsupported

OTHERS = 8.0
"""What the other replica has in each gradient, and in each of the two words that travel behind them."""


class Link:
    """The way to one other replica, whose gradients are all the same."""

    count = 2
    failed = False
    """Whether the current step has failed."""

    def start_allreduce(self, tensor: torch.Tensor) -> None:
        if not self.failed:
            tensor += OTHERS / 2

    def wait_all(self) -> bool:
        return not self.failed

    def fail(self, _: Exception) -> None:
        self.failed = True


@pytest.fixture
def group(tmp_path: Path) -> Generator[None]:
    dist.init_process_group("gloo", f"file://{tmp_path}/meet", None, 1, 0)
    yield
    dist.destroy_process_group()


def model() -> torch.nn.Linear:
    return torch.nn.Linear(2, 1, bias=False)


def backward(wrapper: torch.nn.Module) -> None:
    wrapper(torch.tensor([[1.0, 3.0]])).sum().backward()


@pytest.mark.slow
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


class Layers(torch.nn.Module):
    """Two layers; if it `raises`, a backward pass does so before it has the first one's gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (torch.nn.Linear(2, 2, bias=False) for _ in range(2))
        self.raises = False
        self.first.weight.register_hook(self._raise)

    def _raise(self, _: torch.Tensor) -> None:
        if self.raises:
            raise torch.OutOfMemoryError

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(inputs))


@pytest.mark.parametrize("first_bytes", [1, gradient_reducer.FIRST_BYTES])
@pytest.mark.parametrize("again", [False, True])
def test_backward_pass_that_raises_fails_its_step_and_none_that_follows(
    monkeypatch: pytest.MonkeyPatch, first_bytes: int, again: bool
) -> None:
    monkeypatch.setattr(gradient_reducer, "FIRST_BYTES", first_bytes)  # 1: a bucket is sent before the error
    layers, link = Layers(), Link()
    reducer = GradientReducer(layers, link, ddp_reduces=False)
    layers.raises = True
    with pytest.raises(torch.OutOfMemoryError):
        backward(layers)
    assert not link.failed
    if again:
        layers.raises = False
        backward(layers)
        # A second gradient of a bucket on its way: the other replica must not take the step with a mixture.
        assert link.failed is (first_bytes == 1)
    reducer.fail_if_interrupted()
    assert link.failed
    layers.raises, link.failed = False, False  # the next step
    reducer.fail_if_interrupted()
    for each in layers.parameters():
        each.grad = None
    backward(layers)
    reducer.fail_if_interrupted()
    assert not link.failed
    alone = torch.ones(2)[:, None] * layers.first(torch.tensor([1.0, 3.0])).detach()
    assert torch.equal(layers.second.weight.grad, (alone + OTHERS) / 2)


def test_program_whose_backward_passes_keep_raising_ends_with_a_finding() -> None:
    layers, link = Layers(), Link()
    reducer = GradientReducer(layers, link, ddp_reduces=False)

    def step(*, raises: bool) -> None:
        layers.raises, link.failed = raises, False
        with suppress(torch.OutOfMemoryError):
            backward(layers)
        reducer.fail_if_interrupted()

    for raises in (True, True, False, True, True):
        step(raises=raises)
    with pytest.raises(HoldfastError) as raised:
        step(raises=True)
    assert raised.value.findings[0].code == "backward-interrupted"


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


@pytest.mark.slow
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
