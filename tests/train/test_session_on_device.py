"""A Session whose model is on a device saves, reports and resumes as one on the host does."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.train.fake_accelerator import RunningAccelerator
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from holdfast.protocol.rank_messages import RankStep, RankStepMetrics
from holdfast.train import RankConfig, Session
from holdfast.train.checkpoint.train_state import TrainState
from holdfast.train.session import session as session_module
from holdfast.train.session.rank_coordinator import RankCoordinator

STEPS = 9


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningAccelerator]:
    made = RunningAccelerator()
    find = lambda _: made  # noqa: E731
    monkeypatch.setattr(session_module, "TrainState", partial(TrainState, find_accelerator=find))
    monkeypatch.setattr(session_module, "RankCoordinator", partial(RankCoordinator, find_accelerator=find))
    yield made
    made.stop()


def train(device: RunningAccelerator, until: int, config: RankConfig) -> list[torch.Tensor]:
    """All that the end depends on: the weights, their average and the statistics of BatchNorm."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5))
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    for tensor in (*model.state_dict().values(), *average.state_dict().values()):
        device.place(tensor)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    session = Session(model=model, optimizer=optimizer, state={"average": average}, config=config)
    for _ in session.steps(until):
        optimizer.zero_grad()
        inputs = torch.randn(4, 8)
        loss = (model(inputs) - inputs).square().mean()
        loss.backward()
        optimizer.step()
        average.update_parameters(model)
        session.commit(loss=device.place(loss.detach()))
    return [each.clone() for each in (*model.state_dict().values(), *average.state_dict().values())]


def test_training_resumes_exactly_and_every_loss_is_reported_with_its_step(
    device: RunningAccelerator, agent, tmp_path: Path
) -> None:
    unfailed = train(device, STEPS, RankConfig(checkpoint_path=tmp_path / "unfailed", checkpoint_every_steps=2))
    train(device, 5, RankConfig(checkpoint_path=tmp_path / "failed", checkpoint_every_steps=2))
    told = RankConfig(checkpoint_path=tmp_path / "failed", checkpoint_every_steps=1, rank_socket=agent.path)
    resumed = train(device, STEPS, told)
    assert all(map(torch.equal, resumed, unfailed))
    assert any(name.startswith("holdfast-checkpoint") for name in device.bound)
    line = agent.accept()
    messages = [line.await_(kind) for _ in range(5, STEPS) for kind in (RankStep, RankStepMetrics)]
    assert [each.step for each in messages] == [6, 6, 7, 7, 8, 8, 9, 9]
    assert all("loss" in each.metrics for each in messages[1::2])
    assert all(each.checkpoint_s >= 0 for each in messages[::2])
