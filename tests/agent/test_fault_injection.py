"""Faults that an agent injects on its node: each once, whatever happens to its controller meanwhile."""

from __future__ import annotations

import asyncio
import socket

import pytest
from tests.agent.test_controller_connection import FakeController, connection_to, running, seqs

from holdfast.agent import fault_injection
from holdfast.agent.fault_injection import FaultInjector, InjectionContext
from holdfast.agent.node_monitors import NodeMonitors, WatchedNode
from holdfast.clock import Clock
from holdfast.events import FaultAction, FaultTarget
from holdfast.protocol.orders import Acknowledge, InjectFault, encode

HOUR_S = 3600.0


def test_drill_of_a_node_waits_for_a_controller_that_writes_it_down_and_is_done_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done = asyncio.Event()
    monkeypatch.setitem(
        fault_injection.INJECT_FUNCTIONS, (FaultAction.KILL, FaultTarget.NODE), lambda reach, order: done.set()
    )

    async def scene(port: int) -> None:
        link = connection_to(port)
        monitors = NodeMonitors(WatchedNode(node=1, generation=0, address=""), Clock(), print, lambda: None)
        node = FaultInjector(
            InjectionContext(node=1, worker_groups=tuple, controller=link, clock=Clock(), monitors=monitors)
        )
        node.schedule(InjectFault(requested_at=5.0, target=FaultTarget.NODE, action=FaultAction.KILL))
        await asyncio.sleep(0)
        loop = asyncio.get_running_loop()
        with monkeypatch.context() as later:
            now = loop.time()
            later.setattr(loop, "time", lambda: now + HOUR_S)
            for _ in range(10):  # whatever was due by then is over
                await asyncio.sleep(0)
        assert not done.is_set()
        office = FakeController(port)
        async with await office.open(), running(link):
            connection = await office.next()
            assert await seqs(connection, 1) == [1]
            assert not done.is_set()
            await connection.send(encode(Acknowledge(seq=1)))
            await done.wait()

    with socket.socket() as held:  # a port on which nobody listens yet, and which nobody else can take
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        asyncio.run(scene(held.getsockname()[1]))
