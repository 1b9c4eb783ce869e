"""A thread receives what the agent reports while no other thread of the rank does, and ends with its owner."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from threading import Event

from holdfast.protocol.rank_messages import ReplicaDown, TakeCheckpointNow
from holdfast.train.ft import loss_watcher
from holdfast.train.ft.loss_watcher import LossWatcher
from holdfast.train.session.control_group import StepAction
from holdfast.train.session.rank_config import RankConfig
from holdfast.train.session.rank_coordinator import RankCoordinator

DEADLINE_S = 30.0


class Owner:
    def __init__(self, source: RankCoordinator) -> None:
        self.lost: list[tuple[int, str]] = []
        self.told, self.checked = Event(), Event()
        source.on_replica_lost = self.on_lost
        self.watcher = LossWatcher(source, self.checked_now)

    def on_lost(self, replica: int) -> None:
        self.lost.append((replica, threading.current_thread().name))
        self.told.set()

    def checked_now(self) -> None:
        self.checked.set()


def watchers() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "loss watcher"]


def ended(before: list[threading.Thread]) -> Callable[[], bool]:
    return lambda: not set(watchers()) - set(before)


def test_loss_is_received_while_the_training_thread_is_busy_and_other_requests_wait_for_it(agent) -> None:
    coordinator = RankCoordinator(RankConfig(rank_socket=agent.path))
    owner = Owner(coordinator)
    line = agent.accept()
    line.ask(TakeCheckpointNow())
    line.ask(ReplicaDown(replica=1, attempt=0))
    assert owner.told.wait(DEADLINE_S)
    assert owner.lost == [(1, "loss watcher")]
    assert coordinator.next_action(1, total=None) == StepAction.CHECKPOINT


def test_watcher_checks_regularly_without_an_agent_and_ends_with_its_owner(monkeypatch) -> None:
    monkeypatch.setattr(loss_watcher, "CHECK_S", 0.01)
    before = watchers()
    coordinator = RankCoordinator(RankConfig())
    owner = Owner(coordinator)
    for _ in range(2):
        assert owner.checked.wait(DEADLINE_S)
        owner.checked.clear()
    coordinator.on_replica_lost = print
    del owner
    deadline = time.monotonic() + DEADLINE_S
    while not ended(before)():
        assert time.monotonic() < deadline
