from __future__ import annotations

import math
import threading
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from holdfast.errors import HoldfastError
from holdfast.findings import Severity
from holdfast.protocol.rank_messages import FindingReported, RankStep, TakeCheckpointNow
from holdfast.train import RankConfig, Session
from holdfast.train.checkpoint.remote_tier import RemoteTier
from holdfast.train.metrics.nan_guard import MAX_IN_A_ROW, NonFiniteGuard


def session(**told: object) -> Session:
    model = torch.nn.Linear(2, 2)
    return Session(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=RankConfig(**told)
    )  # fmt: skip


def saved(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("step-*"))


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_loss_that_is_no_number_is_named_with_step_rank_and_the_last_good_one(agent, loss: float):
    loop = session(rank_socket=agent.path)
    loop.commit(loss=2.25)
    loop.commit(loss=torch.tensor(loss), grad_norm=7.0)
    line = agent.accept()
    assert "loss" not in line.await_(RankStep, lambda step: step.step == 2).metrics
    finding = line.await_(FindingReported).finding
    assert (finding.code, finding.severity, finding.where) == ("loss-not-finite", Severity.WARNING, "rank 0")
    assert f"is {loss:g} after step 2" in finding.what
    assert finding.evidence == ("gradient norm 7", "before that: loss 2.25 after step 1")


def test_loss_of_another_replica_than_the_first_is_named_with_it():
    (found,) = NonFiniteGuard(rank=2, replica=1).check(3, {"loss": math.nan})
    assert found.what.startswith("the loss of rank 2 of replica 1 is nan")
    assert found.where == "rank 2 of replica 1"


def test_no_checkpoint_is_taken_while_a_loss_is_no_number_and_good_ones_stay(tmp_path: Path, capsys):
    loop = session(checkpoint_path=tmp_path, checkpoint_every_steps=1, checkpoint_keep=3)
    losses = iter((1.0, 1.0, math.nan, math.nan, math.nan, 1.0))
    for _ in loop.steps(6):
        loop.commit(loss=next(losses))
    assert saved(tmp_path) == ["step-00000001", "step-00000002", "step-00000006"]
    said = capsys.readouterr().err
    assert said.count("no checkpoint was taken: a loss is no number") == 1
    assert said.count("3 checkpoints in a row were not taken") == 1


def test_row_of_withheld_checkpoints_is_counted_at_the_end_too_and_a_later_one_is_said_anew(tmp_path: Path, capsys):
    loop = session(checkpoint_path=tmp_path, checkpoint_every_steps=1)
    losses = iter((math.nan, 1.0, math.nan, math.nan))
    for _ in loop.steps(4):
        loop.commit(loss=next(losses))
    said = capsys.readouterr().err
    assert said.count("no checkpoint was taken: a loss is no number") == 2
    assert said.count("2 checkpoints in a row were not taken") == 1


def test_checkpoint_that_is_asked_for_is_answered_though_it_was_said_before(tmp_path: Path, agent):
    loop = session(checkpoint_path=tmp_path, checkpoint_every_steps=1, rank_socket=agent.path)
    line = agent.accept()
    for step in loop.steps(4):
        if step == 3:
            line.ask(TakeCheckpointNow())
        loop.commit(loss=math.nan)
    told = [
        line.await_(FindingReported, lambda said: said.finding.code == "checkpoint-skipped-nonfinite").finding.what
        for _ in range(3)
    ]
    assert [what.split()[0] for what in told] == ["no", "no", "4"]


def test_last_step_with_a_loss_that_is_no_number_ends_without_a_checkpoint(tmp_path: Path):
    loop = session(checkpoint_path=tmp_path)
    for _ in loop.steps(2):
        loop.commit(loss=math.nan)
    assert saved(tmp_path) == []


def test_newest_good_checkpoint_is_brought_to_the_store_though_the_last_loss_is_no_number(tmp_path: Path, monkeypatch):
    """The store is busy with the first while the second is saved on the node; the third is no good."""
    go_on, bring = threading.Event(), RemoteTier.upload

    def slowly(store: RemoteTier, step: int, files: Iterable[Path]) -> None:
        assert go_on.wait(100)
        bring(store, step, files)

    monkeypatch.setattr(RemoteTier, "upload", slowly)
    loop = session(checkpoint_path=tmp_path / "store", checkpoint_local=tmp_path / "node", checkpoint_every_steps=1)
    losses = iter((1.0, 1.0, math.nan))
    for step in loop.steps(3):
        if step == 3:
            assert loop._checkpoints is not None
            assert loop._checkpoints._saving is not None
            loop._checkpoints._saving.result()
            go_on.set()
        loop.commit(loss=next(losses))
    assert saved(tmp_path / "store") == ["step-00000001.0", "step-00000002.0"]


def test_loop_ends_after_many_such_losses_in_a_row_and_says_so_to_the_agent(agent, capsys):
    loop = session(rank_socket=agent.path)
    for _ in range(MAX_IN_A_ROW - 1):
        loop.commit(loss=math.nan)
    with pytest.raises(HoldfastError) as ended:
        loop.commit(loss=math.nan)
    assert ended.value.findings[0].code == "loss-not-finite"
    assert "the loop ends" not in capsys.readouterr().err  # the program's last words say it
    line = agent.accept()
    line.await_(FindingReported, lambda said: said.finding.severity is Severity.WARNING)
    line.await_(FindingReported, lambda said: said.finding.severity is Severity.ERROR)


def test_a_good_loss_in_between_begins_the_count_anew():
    finite = NonFiniteGuard(0)
    found = [
        finding
        for step in range(3 * MAX_IN_A_ROW)
        for finding in finite.check(step, {"loss": math.nan if step % 5 else 1.0})
    ]
    assert [finding.severity for finding in found] == [Severity.WARNING]


def test_other_metrics_that_are_no_number_are_said_once_a_name_by_rank_0():
    first, second = NonFiniteGuard(0), NonFiniteGuard(1)
    for step in range(3):
        found = first.check(step, {"loss": 1.0, "grad_norm": math.inf})
        assert [finding.code for finding in found] == ["metric-not-finite"][step:]
        assert second.check(step, {"loss": 1.0, "grad_norm": math.inf}) == []
    assert first.is_finite
