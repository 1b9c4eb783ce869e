"""A loop never waits for a loss that is on a device, except where a checkpoint depends on it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from tests.train.conftest import Line
from tests.train.fake_accelerator import FakeAccelerator

from holdfast.errors import HoldfastError
from holdfast.protocol.rank_messages import FindingReported, RankStep, RankStepMetrics
from holdfast.train.metrics.nan_guard import MAX_IN_A_ROW
from holdfast.train.metrics.step_meter import StepMeter
from holdfast.train.session.rank_config import RankConfig
from holdfast.train.session.rank_coordinator import RankCoordinator


@pytest.fixture
def device() -> FakeAccelerator:
    return FakeAccelerator()


def coordinator_of(device: FakeAccelerator, agent_path: Path | None = None) -> RankCoordinator:
    meter = StepMeter(flops_per_token=1e12)
    return RankCoordinator(RankConfig(rank_socket=agent_path), meter, lambda _: device)


def commit(coordinator: RankCoordinator, device: FakeAccelerator, step: int, loss: float, **metrics: float) -> None:
    """The loop uses its tensor again at once, as `loss` may be a buffer of a compiled step."""
    tensor = device.place(torch.tensor(loss))
    coordinator.report_step(step, total=None, metrics={"loss": tensor, **metrics})


def steps_of(line: Line, last: int) -> list[RankStep | RankStepMetrics]:
    found: list[RankStep | RankStepMetrics] = []
    while not (found and isinstance(found[-1], RankStepMetrics) and found[-1].step == last):
        message = line.next()
        if isinstance(message, RankStep | RankStepMetrics):
            found.append(message)
    return found


def test_steps_are_reported_at_once_and_their_losses_when_they_have_arrived(agent, device: FakeAccelerator) -> None:
    coordinator = coordinator_of(device, agent.path)
    commit(coordinator, device, 1, 2.5, tokens=64.0)
    device.run()
    commit(coordinator, device, 2, 1.5)
    device.run()
    coordinator.report_step(3, total=None, metrics={"loss": 0.25})
    commit(coordinator, device, 4, 0.5)
    device.run()
    coordinator.close()
    told = steps_of(agent.accept(), 4)
    assert [(type(each), each.step) for each in told] == [
        (RankStep, 1),
        (RankStepMetrics, 1),
        (RankStep, 2),
        (RankStepMetrics, 2),
        (RankStep, 3),
        (RankStep, 4),
        (RankStepMetrics, 4),
    ]
    assert [each.metrics_follow for each in told if isinstance(each, RankStep)] == [True, True, False, True]
    losses = [each.metrics["loss"] for each in told if each.metrics]
    assert losses == [2.5, 1.5, 0.25, 0.5]
    first = next(each for each in told if isinstance(each, RankStep))
    metrics = next(each for each in told if isinstance(each, RankStepMetrics)).metrics
    assert metrics["tflops_full"] * (first.ended - first.started) == pytest.approx(64)


def test_tokens_on_a_device_count_for_their_own_step(agent, device: FakeAccelerator) -> None:
    coordinator = coordinator_of(device, agent.path)
    coordinator.report_step(1, total=None, metrics={"tokens": device.place(torch.tensor(32))})
    device.run()
    coordinator.close()
    step, metrics = steps_of(agent.accept(), 1)
    assert isinstance(step, RankStep)
    assert metrics.metrics["tflops_full"] * (step.ended - step.started) == pytest.approx(32)


def test_numbers_on_the_host_are_reported_with_their_step(agent, device: FakeAccelerator) -> None:
    coordinator = coordinator_of(device, agent.path)
    coordinator.report_step(1, total=None, metrics={"loss": torch.tensor(2.0)})
    step = agent.accept().await_(RankStep)
    assert (step.metrics["loss"], step.metrics_follow) == (2.0, False)


def test_checkpoint_waits_for_the_loss_that_it_depends_on(device: FakeAccelerator) -> None:
    coordinator = coordinator_of(device)
    commit(coordinator, device, 1, float("nan"))
    assert device.waits == []
    device.run()
    assert not coordinator.all_finite()
    commit(coordinator, device, 2, 1.0)
    device.run()
    commit(coordinator, device, 3, 1.0)
    device.run()
    assert coordinator.all_finite()


def test_loss_that_stays_no_number_ends_the_loop_one_step_later_and_names_the_step(agent, device) -> None:
    coordinator = coordinator_of(device, agent.path)
    for step in range(1, MAX_IN_A_ROW + 1):
        commit(coordinator, device, step, float("nan"))
        device.run()
    with pytest.raises(HoldfastError) as ended:
        commit(coordinator, device, MAX_IN_A_ROW + 1, 1.0)
    assert f"after step {MAX_IN_A_ROW}," in ended.value.findings[0].what
    first = agent.accept().await_(FindingReported).finding
    assert "is nan after step 1" in first.what


def test_loop_is_at_most_one_step_ahead_of_its_device(device: FakeAccelerator) -> None:
    coordinator = coordinator_of(device)
    commit(coordinator, device, 1, 1.0)
    with ThreadPoolExecutor(1, initializer=device.bind_thread) as loop:
        ahead = loop.submit(commit, coordinator, device, 2, 1.0)
        while not device.waits:
            assert not ahead.done()
        device.run()
        ahead.result(20)
    assert len(device.waits) == 1  # for the first step, with the second still to do
