"""A loop in fp16 resumes with the scale that it had, and a discarded step leaves no trace in it."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.amp.grad_scaler import GradScaler

from holdfast.train import RankConfig, Session
from holdfast.train.checkpoint.train_state import TrainState
from holdfast.train.ft.replica_strategy import _GatedOptimizer

STEPS = 12


def scaler_of() -> GradScaler:
    return GradScaler("cpu", init_scale=2.0**14, growth_interval=2)


def train(folder: Path, until: int) -> dict[str, Any]:
    """Steps of which some overflow: returns all that the rest of the training depends on."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8))
    optimizer, scaler = torch.optim.AdamW(model.parameters(), lr=0.01), scaler_of()
    told = RankConfig(checkpoint_path=folder, checkpoint_every_steps=3)
    session = Session(model=model, optimizer=optimizer, state={"scaler": scaler}, config=told)
    scales = list[float]()
    for step in session.steps(until):
        inputs = torch.randn(4, 8)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = (model(inputs) - inputs).square().mean() * (1 + step % 3)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        session.commit(loss=loss)
        scales.append(scaler.get_scale())
    return {"weights": [each.detach() for each in model.parameters()], "scaler": scaler.state_dict(), "scales": scales}


def test_loop_in_fp16_resumes_exactly(tmp_path: Path) -> None:
    unfailed = train(tmp_path / "unfailed", STEPS)
    assert min(unfailed["scales"]) < max(unfailed["scales"])
    train(tmp_path / "failed", 5)
    resumed = train(tmp_path / "failed", STEPS)
    assert resumed["scaler"] == unfailed["scaler"]
    assert resumed["scales"] == unfailed["scales"][5:]
    assert all(map(torch.equal, resumed["weights"], unfailed["weights"]))


def one_of(value: float) -> TrainState:
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, value)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return TrainState(model=model, optimizer=optimizer, state={"scaler": scaler_of()})


def step(loop: TrainState, factor: float) -> None:
    scaler = loop.state["scaler"]
    loop.optimizer.zero_grad()
    scaler.scale(loop.model(torch.full((1, 1), factor)).sum()).backward()
    scaler.step(loop.optimizer)
    scaler.update()


def test_replica_that_rejoins_takes_the_scale_of_the_others() -> None:
    giving, taking = one_of(1.0), one_of(1.0)
    for _ in range(5):
        step(giving, 1.0)
    taking.load_per_rank_state(io.BytesIO(giving.per_rank_state()()))
    assert taking.state["scaler"].state_dict() == giving.state["scaler"].state_dict()
    assert taking.state["scaler"].get_scale() == 2.0**16


@pytest.mark.parametrize("factor", [1.0, float("inf")], ids=["sound", "overflow"])
@pytest.mark.parametrize("counts", [True, False])
def test_step_that_is_discarded_leaves_the_scale_as_it_was(factor: float, counts: bool) -> None:
    loop = one_of(1.0)
    step(loop, 1.0)
    before, weight = loop.state["scaler"].state_dict(), loop.model.weight.item()
    gate = _GatedOptimizer(loop.optimizer, lambda: counts, loop.post_step_state)
    gate.decide_before_step_of(loop.state["scaler"])
    gate.open_step()
    step(loop, factor)
    assert loop.state["scaler"].state_dict() != before
    beside = gate.close_step()
    assert (beside is None) == counts
    if beside is not None:
        loop.load_post_step_state(beside)
        assert loop.state["scaler"].state_dict() == before
        assert loop.model.weight.item() == weight
