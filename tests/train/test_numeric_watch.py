"""What a rank reports of the numbers of its steps, and when it ends for them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.train.test_gradient_guard import Loop, nan_in

from holdfast.errors import HoldfastError
from holdfast.events import NumericFault
from holdfast.findings import Severity
from holdfast.metrics.spikes import WARM_UP
from holdfast.protocol.rank_messages import FindingReported, NumericFaultReported
from holdfast.protocol.watch_levels import WatchLevel
from holdfast.train import RankConfig, Session
from holdfast.train.metrics.gradient_guard import SUM
from holdfast.train.metrics.numeric_watch import NumericWatch


def watched(loop: Loop | None = None, **more: WatchLevel) -> NumericWatch:
    return NumericWatch(rank=2, replica=1, gradients=loop.guard if loop else None, **more)


def of_step(loop: Loop, watch: NumericWatch, loss: float = 1.0, factor: float = 1.0) -> list[NumericFaultReported]:
    """Take a step, and judge it."""
    return watch.check(7, {"loss": loss, SUM: loop.step(factor)})


def test_damaged_weights_are_reported_with_the_gradient_that_came_first() -> None:
    loop = Loop()
    watch = watched(loop)
    assert of_step(loop, watch) == []
    nan_in(loop.head.bias)
    (fault,) = of_step(loop, watch)
    assert (fault.step, fault.fault, fault.quantity) == (7, NumericFault.NON_FINITE, "gradient")
    assert (fault.parameter_group, fault.damaged, fault.is_origin) == ("1 (1.bias)", True, True)
    assert fault.finding.what == "after step 7 weights are no longer finite, and rank 2 of replica 1 was the first"
    assert fault.finding.evidence == (
        "after step 7: its gradient of parameter group 1 (1.bias) is not finite, its loss is",
        "not finite now: weights of parameter group 1 (1.bias)",
    )


def test_loss_that_is_not_finite_and_damages_is_the_quantity() -> None:
    loop = Loop()
    (fault,) = of_step(loop, watched(loop), loss=math.nan, factor=math.nan)
    assert (fault.quantity, fault.parameter_group, fault.is_origin) == ("loss", "0 (0.weight)", True)
    assert fault.finding.evidence[0].startswith("after step 7: its loss is nan, its gradient of parameter group 0")


def test_rank_that_only_received_the_nan_does_not_claim_to_be_the_first() -> None:
    loop = Loop()
    with torch.no_grad():
        loop.body.weight[0, 0] = math.nan
    (fault,) = watched(loop).check(7, {"loss": math.nan, SUM: 0.0})
    assert (fault.damaged, fault.is_origin) == (True, False)
    assert "is among the first" in fault.finding.what


def test_rank_that_sees_only_shards_goes_by_its_loss() -> None:
    loop = Loop()
    loop.guard.sees_own_gradients = False
    nan_in(loop.head.bias)
    (of_peer,) = of_step(loop, watched(loop))
    (own,) = of_step(loop, watched(loop), loss=math.nan)
    assert (of_peer.is_origin, own.is_origin) == (False, True)


def test_update_that_was_skipped_is_reported_once_a_minute_and_ends_nothing() -> None:
    loop = Loop()
    watch = watched(loop)
    for step in range(3):
        nan_in(loop.head.bias)
        loop.backward()
        found = watch.check(step, {"loss": 1.0, SUM: float(loop.guard.end_step()[SUM])})
        loop.optimizer.zero_grad()
        assert [(one.damaged, one.finding.code, one.finding.severity) for one in found] == (
            [(False, "gradient-not-finite", Severity.INFO)] if step == 0 else []
        )


def test_levels_say_what_is_looked_for() -> None:
    loop = Loop()
    (fault,) = of_step(loop, watched(loop, non_finite=WatchLevel.WARN), factor=math.nan)
    assert not fault.damaged
    quiet = watched(spikes=WatchLevel.OFF)
    assert [quiet.check(step, {"loss": 1.0 if step < 90 else 99.0}) for step in range(100)] == [[]] * 100


def test_spikes_of_the_loss_are_each_ranks_and_those_of_the_gradient_norm_the_first_ranks() -> None:
    for rank in (0, 1):
        watch = NumericWatch(rank=rank)
        for step in range(WARM_UP):
            assert watch.check(step, {"loss": 2.0, "grad_norm": 1.0}) == []
        found = watch.check(WARM_UP, {"loss": 20.0, "grad_norm": 9.0})
        assert [one.quantity for one in found] == ["loss"]
        # The norm's comes after the next step, when the rank that caused it has reported its loss.
        found += watch.check(WARM_UP + 1, {"loss": 2.0, "grad_norm": 1.0})
        assert [one.step for one in found] == [WARM_UP] * len(found)
        assert watch.check(WARM_UP + 2, {"loss": 2.0, "grad_norm": 1.0}) == []
        assert (
            [(one.finding.code, one.quantity, one.damaged, one.is_origin) for one in found]
            == [
                ("loss-spike", "loss", False, True),
                ("gradient-spike", "gradient", False, False),  # the norm names no rank
            ][: 2 - rank]
        )
        assert f"the loss of rank {rank} is 20 after step {WARM_UP}, 10.0 times its running median" in str(found[0])


def train(loop: Loop, session: Session, steps: int, bad: int) -> int:
    """Train, with a NaN in one step; returns the last step that began."""
    for step in session.steps(steps):
        if step == bad:
            nan_in(loop.head.bias)
        loop.optimizer.zero_grad()
        loop.backward()
        loop.optimizer.step()
        try:
            session.commit(loss=1.0)
        except HoldfastError as error:
            ended = error.findings[0].code
            return step if ended == "weights-not-finite" else -1
    return steps


@pytest.mark.parametrize("level", WatchLevel)
def test_session_ends_its_rank_in_the_step_that_damages_weights_unless_told_not_to(
    agent: Any, level: WatchLevel
) -> None:
    loop = Loop()
    session = Session(
        model=loop.model, optimizer=loop.optimizer, config=RankConfig(rank_socket=agent.path, non_finite=level)
    )
    assert train(loop, session, 6, bad=3) == (3 if level is WatchLevel.ACT else 6)
    session._coordinator.close()
    line = agent.accept()
    del session
    if level is WatchLevel.OFF:
        return
    fault = line.await_(NumericFaultReported)
    assert (fault.step, fault.damaged) == (3, level is WatchLevel.ACT)


def test_session_takes_no_checkpoint_of_damaged_weights(tmp_path: Path) -> None:
    loop = Loop()
    config = RankConfig(checkpoint_path=tmp_path, checkpoint_every_steps=1)
    assert train(loop, Session(model=loop.model, optimizer=loop.optimizer, config=config), 6, bad=3) == 3
    assert {each.name for each in tmp_path.glob("step-*")} <= {"step-00000001", "step-00000002"}
    assert (tmp_path / "step-00000001").is_dir()


def test_sum_of_gradients_is_reported_as_no_metric(agent: Any) -> None:
    loop = Loop()
    session = Session(model=loop.model, optimizer=loop.optimizer, config=RankConfig(rank_socket=agent.path))
    train(loop, session, 2, bad=9)
    line = agent.accept()
    session._coordinator.close()
    messages = [line.next() for _ in range(4)]
    assert not any(SUM in str(message) for message in messages)
    assert not any(isinstance(message, FindingReported) for message in messages)
