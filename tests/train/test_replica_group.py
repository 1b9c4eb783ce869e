"""Two replicas in threads of one process, with TorchFT's own Lighthouse: who is there for the next step, who is not."""

from __future__ import annotations

import math
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Generator
from concurrent.futures import Future
from itertools import pairwise
from threading import Event, Thread, Timer
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
from tests.programs import nccl_like
from tests.programs.nccl_like import NcclLike
from torchft.coordination import LighthouseServer

from holdfast.errors import HoldfastError
from holdfast.findings import Finding
from holdfast.protocol.rank_messages import Activity
from holdfast.protocol.wait_frames import FOR_DEVICE, FOR_REPLICAS
from holdfast.train.ft import abortable_pg
from holdfast.train.ft.abortable_pg import CONNECT_S
from holdfast.train.ft.device_sync import read_host
from holdfast.train.ft.replica_group import FIRST_PAUSE_S, ReplicaGroup, State
from holdfast.train.ft.state_transport import StateTransport
from holdfast.train.session.control_group import ControlGroup
from holdfast.train.session.rank_config import RankConfig
from holdfast.train.torch_private import NCCL_CONNECT_TIMEOUT

pytestmark = pytest.mark.slow

T = TypeVar("T")

DEADLINE_S = 60.0
RELEASED_S = 5.0
"""Long enough on a busy machine, and far from the ten minutes of a group's own timeout."""


class Events:
    """What an agent says of other replicas; `patience` is that of one who is to leave."""

    on_replica_lost: Callable[[int], None]

    def __init__(self) -> None:
        self.wait_limit = math.inf
        self.said: list[Activity] = []
        self._agent, self.line = socket.socketpair()

    def tell(self, lost: int) -> None:
        self._agent.send(bytes([lost]))

    def fileno(self) -> int:
        return self.line.fileno()

    def receive(self) -> None:
        for lost in self.line.recv(100):
            self.on_replica_lost(lost)

    def set_activity(self, to: Activity) -> None:
        self.said.append(to)

    def report_finding(self, finding: Finding) -> None:
        pass

    def wait_limit_s(self) -> float:
        return self.wait_limit


class Replica:
    """One of two, of one rank each; its state is the number of the replica that it was made by."""

    def __init__(self, number: int, lighthouse: str, nccl: bool) -> None:
        self.state = number
        self.events = Events()
        told = RankConfig(
            replica=number, replica_count=2, min_replicas=1, lighthouse=lighthouse, master_addr="localhost"
        )
        self.group = ReplicaGroup(
            told, ControlGroup(), self.events, nccl=nccl, export_state=self._give, import_state=self._take
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


@pytest.fixture(params=["gloo", "nccl-like"])
def both(request, monkeypatch) -> Generator[Callable[[Callable[[Replica], T]], list[T]]]:
    """Let both do something concurrently, after their first step together; return the result of each.

    They use the group that the parameter names.
    """
    nccl = request.param == "nccl-like"
    if nccl:
        monkeypatch.delenv(NCCL_CONNECT_TIMEOUT, raising=False)
        monkeypatch.setattr(abortable_pg, "nccl_group", lambda store, rank, size, *_: NcclLike(store, rank, size))
    lighthouse = LighthouseServer(
        bind="[::]:0", min_replicas=1, join_timeout_ms=10_000, quorum_tick_ms=10, heartbeat_timeout_ms=1000
    )
    here = lighthouse.address()
    replicas: list[Replica] = []

    def both(do: Callable[[Replica], T]) -> list[T]:
        return [future.result(DEADLINE_S) for future in [_started(do, each) for each in replicas]]

    try:
        made = [_started(Replica, number, here, nccl) for number in (0, 1)]
        replicas += [each.result(DEADLINE_S) for each in made]
        assert both(_meet) == [True, True]
        assert both(Replica.step) == [True, True]
        yield both
    finally:
        for each in replicas:
            each.group.manager.shutdown()
        lighthouse.shutdown()


def _meet(each: Replica) -> bool:
    """Join the first quorum of both: one whose heartbeat comes first may have had a quorum of its own."""
    joined = each.group.join_quorum(1)
    while joined and each.group.count < 2:
        joined = each.group.join_quorum(1)
    return joined


def _started(do: Callable[..., T], *given: object) -> Future[T]:
    """A call in a daemon thread: at its end an executor would wait for one whose replica never comes."""
    future = Future[T]()

    def run() -> None:
        try:
            future.set_result(do(*given))
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    return future


def fail(each: Replica) -> bool:
    """Discard a step, so that the next quorum connects anew."""
    each.group.manager.report_error(RuntimeError("lost: replica 7"))
    return each.step()


def lose_the_second(each: Replica) -> bool:
    """The second replica is lost in a step, which the first one discards."""
    if each.state == 1:
        each.group.manager.shutdown(wait=False)  # its heartbeats end
        return True
    each.group.start_allreduce(torch.ones(1))
    each.events.tell(lost=1)
    return not each.group.wait_all() and not each.group.should_commit()


on_gloo = pytest.mark.parametrize("both", ["gloo"], indirect=True)
"""Only replicas on Gloo have a barrier before a step, and only there does an error of one end the others' wait."""


@on_gloo
def test_replicas_that_are_all_there_continue_without_asking(both) -> None:
    for step in (1, 2, 3):
        assert both(lambda each, step=step: each.group.barrier_if_unchanged(step)) == [True, True]
        assert both(Replica.step) == [True, True]


@pytest.mark.parametrize("both", ["nccl-like"], indirect=True)
def test_nccl_ends_a_call_that_connects_to_a_dead_replica_as_soon_as_a_quorum_may_take(both) -> None:
    assert float(os.environ[NCCL_CONNECT_TIMEOUT]) == CONNECT_S


@pytest.mark.parametrize("both", ["nccl-like"], indirect=True)
def test_loss_releases_a_replica_that_waits_for_its_device(both) -> None:
    """Its thread is in a call that only the device ends, and receives no message of its agent."""
    released: list[float] = []

    def wait(each: Replica) -> bool | None:
        if each.state == 1:
            return None
        each.group.start_allreduce(torch.ones(1))
        Timer(0.1, each.events.tell, [1]).start()
        began = time.monotonic()
        nccl_like.synchronize()
        released.append(time.monotonic() - began)
        return each.group.wait_all() or each.group.should_commit()

    assert both(wait) == [False, None]
    assert released[0] < RELEASED_S


def test_step_that_loses_a_replica_is_discarded_and_the_next_is_taken_without_it(both) -> None:
    def go_on(each: Replica) -> bool:
        return each.state == 1 or (each.group.join_quorum(2) and each.group.count == 1 and each.step())

    assert both(lose_the_second) == [True, True]
    assert both(go_on) == [True, True]


@on_gloo
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


@on_gloo
def test_one_that_discards_a_synchronisation_of_torchft_notifies_the_others(both) -> None:
    """LocalSGD and DiLoCo ask TorchFT's manager, and not the group, whether to commit."""

    def synchronize(each: Replica) -> bool:
        if each.state == 1:
            each.group.manager.report_error(RuntimeError("lost: replica 7"))
            return each.group.manager.should_commit()
        each.group.start_allreduce(torch.ones(1))
        return each.group.wait_all()

    assert both(synchronize) == [False, False]


@on_gloo
def test_one_that_is_lost_is_not_waited_for(both) -> None:
    def stand(each: Replica) -> bool | None:
        if each.state == 1:
            return None
        each.events.tell(lost=1)
        return each.group.barrier_if_unchanged(1)

    assert both(stand) == [False, None]


@on_gloo
def test_one_that_is_to_leave_does_not_wait_for_the_others_word(both) -> None:
    def stand(each: Replica) -> bool | None:
        each.events.wait_limit = 0.0
        return each.group.barrier_if_unchanged(1) if each.state == 0 else None

    assert both(stand) == [False, None]


def test_one_that_dies_while_the_others_connect_is_not_waited_for_where_no_agent_tells(both, monkeypatch) -> None:
    monkeypatch.setattr(abortable_pg, "CONNECT_S", 1.0)

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


def test_state_is_exported_after_the_work_that_the_device_still_has(monkeypatch) -> None:
    weight = torch.zeros(1)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: weight.fill_(1))
    group: Any = object.__new__(ReplicaGroup)
    group._export_state = lambda: {"weight": weight.clone()}
    assert group._exported_state()["weight"].item() == 1


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


def test_frames_in_which_a_rank_waits_carry_the_mark_that_the_controller_searches() -> None:
    seen: list[str] = []

    class Waited:
        """Stands for what a rank waits for: it notes whose frame does."""

        def poll(self, *_: object) -> None:
            seen.append(sys._getframe(1).f_code.co_qualname)

        tolist = poll

    group: Any = object.__new__(ReplicaGroup)
    group._group = SimpleNamespace(signals_completion=True)
    group._poller, group._drain_wakes = Waited, lambda: None
    group._events = Events()
    group._wait_arrival()
    group.wait_for_replicas(iter((False, True)).__next__, lambda: None)
    read_host(Waited())  # type: ignore[arg-type]
    *for_replicas, for_device = seen
    assert [each.endswith(FOR_REPLICAS) for each in for_replicas] == [True, True]
    assert for_device.endswith(FOR_DEVICE)


class _Unreadable:
    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return int, ("no number",)


@pytest.mark.parametrize(
    ("part", "code"),
    [(lambda: None, "replica-state-unsendable"), (_Unreadable(), "replica-state-unreadable")],
)
def test_one_that_cannot_receive_the_state_fails_and_the_other_takes_the_step_alone(both, part, code: str) -> None:
    def join(each: Replica) -> str:
        if each.state == 0:
            each.state = part
            return str(each.group.join_quorum(3))
        with pytest.raises(HoldfastError) as raised:
            each.group.join_quorum(2)
        return raised.value.findings[0].code

    assert both(join) == ["True", code]
    assert both(lose_the_second) == [True, True]
    assert both(lambda each: each.state == 1 or (each.group.join_quorum(3) and each.step())) == [True, True]


def test_one_that_asks_for_a_state_whose_donor_has_left_the_quorum_joins_the_next(both, monkeypatch) -> None:
    """Each would wait for the other: the donor for a quorum, and the one behind for the state in the quorum left."""
    asked_again = Event()

    def join(each: Replica) -> bool:
        if each.state == 0:
            assert each.group.join_quorum(3)
            each.group.leave(ConnectionError("it was told of an earlier loss late"))
            ask = each.group.manager._client._quorum
            each.group.manager._client._quorum = lambda **given: asked_again.set() or ask(**given)
            return each.group.join_quorum(3)
        connect = each.group._group.connect

        def connect_late(*given: object, **named: object) -> None:
            connect(*given, **named)
            assert asked_again.wait(DEADLINE_S)

        monkeypatch.setattr(each.group._group, "connect", connect_late)
        return each.group.join_quorum(2)

    assert both(fail) == [False, False]
    assert both(join) == [True, True]
    assert both(lambda each: each.state) == [0, 0]
    assert both(Replica.step) == [True, True]


@on_gloo
def test_connection_that_is_closed_as_soon_as_it_is_made_lets_the_other_wait_for_nothing(both, monkeypatch) -> None:
    """One that comes back very soon is in the next quorum while its loss still counts for one of the others."""

    def join(each: Replica) -> float:
        if each.state == 0:
            monkeypatch.setattr(each.group._group, "abort_connecting", lambda: 0.0)
            each.group._group.lose(1)
        began = time.monotonic()
        while not (each.group.join_quorum(2) and each.step()):
            pass
        return time.monotonic() - began

    assert both(fail) == [False, False]
    assert max(both(join)) < RELEASED_S


@on_gloo  # on NCCL the donor waits for one that is not lost until its timeout
def test_one_that_loses_donor_after_donor_tries_again_with_pauses(both, monkeypatch) -> None:
    tried: list[float] = []
    receive = StateTransport.recv_checkpoint

    def lose(transport: StateTransport, *given: object, **named: object) -> object:
        tried.append(time.monotonic())
        if len(tried) < 5:
            raise ConnectionError("its donor is lost")
        return receive(transport, *given, **named)

    def join(each: Replica) -> bool:
        while not (joined := each.group.join_quorum(3 - each.state) and each.step()):
            assert each.state == 0
        return joined

    monkeypatch.setattr(StateTransport, "recv_checkpoint", lose)
    assert both(join) == [True, True]
    assert both(lambda each: each.state) == [0, 0]
    pauses = [later - earlier for earlier, later in pairwise(tried)]
    assert pauses[1] > FIRST_PAUSE_S
    assert pauses[2] > 2 * FIRST_PAUSE_S
