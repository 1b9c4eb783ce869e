"""Receives notices of lost replicas in its own thread, while the training thread waits for a device.

A rank whose peer has died blocks in its next synchronisation with the GPU, which only an abort of the connection ends.
"""

from __future__ import annotations

import os
import select
import weakref
from collections.abc import Callable
from threading import Thread
from typing import Protocol

CHECK_S = 1.0
"""Interval between checks for an operation that takes too long."""


class LossSource(Protocol):
    """What reports lost replicas: the rank's connection to its agent (rank_coordinator.py)."""

    on_replica_lost: Callable[[int], None]

    def fileno(self) -> int | None:
        """File descriptor that becomes readable with news; None without an agent."""
        ...

    def receive(self) -> None:
        """Receive the news, and call `on_replica_lost`."""
        ...


class LossWatcher:
    """Receives from a source until this object is gone."""

    def __init__(self, source: LossSource, check: Callable[[], None]) -> None:
        """`check` is a bound method, called regularly in the thread; neither object is kept alive."""
        stop_fd = os.eventfd(0, os.EFD_CLOEXEC)
        weakref.finalize(self, os.eventfd_write, stop_fd, 1)
        watched = weakref.ref(source), weakref.WeakMethod(check)
        Thread(target=_watch, args=(*watched, stop_fd), name="loss watcher", daemon=True).start()


def _watch(source: weakref.ref[LossSource], check: weakref.WeakMethod[Callable[[], None]], stop_fd: int) -> None:
    stopped = False
    while not stopped:
        ears, call, agent = select.poll(), check(), source()
        ears.register(stop_fd, select.POLLIN)
        if call is not None:
            call()
        if agent is not None and (agent_fd := agent.fileno()) is not None:
            ears.register(agent_fd, select.POLLIN)
        del agent, call  # waiting would keep them alive
        ready = {fd for fd, _ in ears.poll(CHECK_S * 1000)}
        stopped = stop_fd in ready
        if ready and not stopped and (agent := source()) is not None:
            agent.receive()
            del agent
    os.close(stop_fd)
