"""What is called weakly ends with its last reference."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Generator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from holdfast.protocol.rank_messages import RankStep
from holdfast.train import RankConfig, Session
from holdfast.train.ft import rank_verifier
from holdfast.train.ft.rank_verifier import AgreedSteps, RankVerifier
from holdfast.train.weak_method import weakly


@pytest.fixture(autouse=True)
def uncollected() -> Generator[None]:
    """No cycle is collected."""
    gc.disable()
    yield
    gc.enable()


def program() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(2, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_method_is_called_while_its_object_is_there() -> None:
    class Noted:
        def __init__(self, notes: list[int]) -> None:
            self.notes = notes

        def note(self, number: int) -> None:
            self.notes.append(number)

    notes: list[int] = []
    noted = Noted(notes)
    call = weakly(noted.note)
    call(1)
    del noted
    call(2)
    assert notes == [1]


def test_session_closes_its_connection_with_its_last_reference(agent: Any) -> None:
    model, optimizer = program()
    session = Session(model=model, optimizer=optimizer, config=RankConfig(rank_socket=agent.path))
    for _ in session.steps(2):
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        session.commit(loss=1.0)
    line = agent.accept()
    del session
    assert [each.step for each in line.rest() if isinstance(each, RankStep)] == [1, 2]
    line.close()


def test_optimizer_that_outlives_its_session_holds_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def shares(_model: torch.nn.Module, _ranks: int) -> bool:
        return True

    def ignore(_step: int) -> None:
        pass

    monkeypatch.setattr(rank_verifier, "shares_all_weights", shares)
    model, optimizer = program()
    coordinator: Any = SimpleNamespace(ranks=SimpleNamespace(world_size=2))
    agreed = AgreedSteps(keep=ignore, set_aside_after=ignore)
    verifier = RankVerifier(RankConfig(), model, optimizer, coordinator, agreed)
    assert verifier.is_active
    gone = weakref.ref(verifier)
    del verifier
    assert gone() is None
    optimizer.step()
