"""What a model's forward pass changes itself, and how it comes from one replica to another."""

from __future__ import annotations

import pytest
import torch

from holdfast.errors import HoldfastError
from holdfast.train.checkpoint.train_state import TrainState
from holdfast.train.ft import live_recovery
from holdfast.train.ft.replica_strategy import _BufferSnapshot, _GatedOptimizer


def training() -> TrainState:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    return TrainState(model=model, optimizer=torch.optim.AdamW(model.parameters()))


def step(loop: TrainState) -> None:
    loop.optimizer.zero_grad()
    loop.model(torch.randn(8, 4)).square().sum().backward()
    loop.optimizer.step()


def buffers(loop: TrainState) -> list[torch.Tensor]:
    return [buffer.clone() for buffer in loop.model.buffers()]


def same(ones: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))


def test_replica_that_catches_up_has_the_buffers_of_the_moment_they_were_lent():
    donor, behind = training(), training()
    for _ in range(3):
        step(donor)
    lent, was = live_recovery.export_state(donor), buffers(donor)
    donor.model(torch.randn(8, 4))
    live_recovery.import_state(behind, lent)
    assert not same(was, buffers(donor))
    assert same(was, buffers(behind))


class Counting(torch.nn.Linear):
    """A layer with state that is no tensor."""

    count = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"count": self.count}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def test_replica_that_catches_up_has_the_extra_state_of_modules():
    models = Counting(2, 2), Counting(2, 2)
    donor, behind = (TrainState(model=each, optimizer=torch.optim.SGD(each.parameters())) for each in models)
    donor.model.count = 3
    live_recovery.import_state(behind, live_recovery.export_state(donor))
    assert behind.model.count == 3
    assert same([*donor.model.parameters()], [*behind.model.parameters()])


def test_step_that_does_not_count_leaves_the_buffers_as_they_were():
    loop = training()
    kept = _BufferSnapshot(loop.model)
    for _ in range(2):
        step(loop)
        kept.save()
        was = buffers(loop)
        for _ in range(2):
            step(loop)
            assert not same(was, buffers(loop))
            kept.restore()
            assert same(was, buffers(loop))


def test_closure_is_refused_before_anything_is_changed():
    loop = training()
    held = _GatedOptimizer(loop.optimizer, lambda: True, loop.post_step_state)
    held.open_step()
    step(loop)
    was = [parameter.detach().clone() for parameter in loop.model.parameters()]
    for given, named in (((lambda: 0.0,), {}), ((), {"closure": lambda: 0.0})):
        with pytest.raises(HoldfastError) as refused:
            loop.optimizer.step(*given, **named)
        assert refused.value.findings[0].code == "optimizer-closure"
    assert same(was, [*loop.model.parameters()])
    loop.optimizer.step(closure=None)
