"""Two replicas in threads of one process, with TorchFT's own Lighthouse: who is there for the next step, who is not."""

from __future__ import annotations

import math
import socket
import traceback
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch
from torchft.coordination import LighthouseServer

from holdfast.findings import Finding
from holdfast.protocol.rank_messages import Activity
from holdfast.train.ft import abortable_pg
from holdfast.train.ft.replica_group import ReplicaGroup, State
from holdfast.train.session.control_group import ControlGroup
from holdfast.train.session.rank_config import RankConfig

pytestmark = pytest.mark.slow

T = TypeVar("T")


class Events:
    """What an agent says of other replicas; `patience` is that of one who is to leave."""

    def __init__(self) -> None:
        self.wait_limit = math.inf
        self.said: list[Activity] = []
        self._agent, self.line = socket.socketpair()
        self._lost: set[int] = set()

    def tell(self, lost: int) -> None:
        self._lost.add(lost)
        self._agent.send(b"\n")

    def fileno(self) -> int:
        return self.line.fileno()

    def take_lost_replicas(self) -> frozenset[int]:
        lost, self._lost = frozenset(self._lost), set()
        if lost:
            self.line.recv(1)
        return lost

    def set_activity(self, to: Activity) -> None:
        self.said.append(to)

    def report_finding(self, finding: Finding) -> None:
        pass

    def wait_limit_s(self) -> float:
        return self.wait_limit


class Replica:
    """One of two, of one rank each; its state is the number of the replica that it was made by."""

    def __init__(self, number: int, lighthouse: str) -> None:
        self.state = number
        self.events = Events()
        told = RankConfig(
            replica=number, replica_count=2, min_replicas=1, lighthouse=lighthouse, master_addr="localhost"
        )
        self.group = ReplicaGroup(
            told, ControlGroup(), self.events, nccl=False, export_state=self._give, import_state=self._take
        )

    def _give(self) -> State:
        return {"state": self.state}

    def _take(self, state: State) -> None:
        self.state = state["state"]

    def step(self) -> bool:
        """Exchange something, and commit it."""
        self.group.start_allreduce(torch.ones(1))
        self.group.wait_all()
        return self.group.should_commit()


@pytest.fixture
def both() -> Generator[Callable[[Callable[[Replica], T]], list[T]]]:
    """Let both do something concurrently, after their first step together; return the result of each."""
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=10_000, quorum_tick_ms=10)
    with ThreadPoolExecutor(2) as pool:
        replicas = [*pool.map(Replica, (0, 1), [lighthouse.address()] * 2)]

        def both(do: Callable[[Replica], T]) -> list[T]:
            return [*pool.map(do, replicas)]

        assert both(lambda each: each.group.join_quorum(1)) == [True, True]
        assert both(Replica.step) == [True, True]
        yield both
        for each in replicas:
            each.group.manager.shutdown()
    lighthouse.shutdown()


def test_replicas_that_are_all_there_continue_without_asking(both) -> None:
    for step in (1, 2, 3):
        assert both(lambda each, step=step: each.group.barrier_if_unchanged(step)) == [True, True]
        assert both(Replica.step) == [True, True]


def test_one_that_could_not_commit_fails_the_others_word_and_takes_their_state(both) -> None:
    def commit(each: Replica) -> bool:
        if each.state == 1:
            each.group.manager.report_error(RuntimeError("lost: replica 7"))
        return each.step()

    assert both(lambda each: each.group.barrier_if_unchanged(1)) == [True, True]
    assert both(commit)[1] is False
    assert both(lambda each: each.group.barrier_if_unchanged(2 - each.state)) == [False, False]
    assert both(lambda each: each.group.join_quorum(3 - each.state)) == [True, True]
    assert both(lambda each: each.state) == [0, 0]
    assert both(Replica.step) == [True, True]


def test_one_that_stands_elsewhere_is_not_stepped_with(both) -> None:
    assert both(lambda each: each.group.barrier_if_unchanged(1 + each.state)) == [False, False]
    assert both(lambda each: each.group.join_quorum(2 + each.state)) == [True, True]
    assert both(lambda each: each.state) == [1, 1]


def test_one_that_is_lost_is_not_waited_for(both) -> None:
    def stand(each: Replica) -> bool | None:
        if each.state == 1:
            return None
        each.events.tell(lost=1)
        return each.group.barrier_if_unchanged(1)

    assert both(stand) == [False, None]


def test_one_that_is_to_leave_does_not_wait_for_the_others_word(both) -> None:
    def stand(each: Replica) -> bool | None:
        each.events.wait_limit = 0.0
        return each.group.barrier_if_unchanged(1) if each.state == 0 else None

    assert both(stand) == [False, None]


def test_one_that_dies_while_the_others_connect_is_not_waited_for_where_no_agent_tells(both, monkeypatch) -> None:
    monkeypatch.setattr(abortable_pg, "CONNECT_S", 1.0)

    def fail(each: Replica) -> bool:  # so that the next quorum connects anew
        each.group.manager.report_error(RuntimeError("lost: replica 7"))
        return each.step()

    def join(each: Replica) -> bool:
        if each.state == 0:
            return each.group.join_quorum(2) and each.group.count == 1

        def die(*_: object, **__: object) -> None:
            each.group.manager.shutdown(wait=False)  # its heartbeats end
            raise ConnectionError("it dies")

        monkeypatch.setattr(each.group._group, "connect", die)
        each.group.manager.start_quorum()
        return each.group.manager.errored() is not None

    assert both(fail) == [False, False]
    assert both(join) == [True, True]
    assert both(lambda each: each.state == 1 or each.step()) == [True, True]


def test_one_whose_state_cannot_be_exported_fails_with_its_own_error(both) -> None:
    def join(each: Replica) -> bool | str:
        lags = each.state == 1
        each.events.wait_limit = 0.5 if lags else 20.0  # one that tried again would do so forever
        if not lags:
            del each.state
        try:
            return each.group.join_quorum(2 if lags else 3)
        except AttributeError as error:
            return "".join(traceback.format_exception(error))

    donor, receiver = both(join)
    assert "in _give" in str(donor)
    assert receiver is False
