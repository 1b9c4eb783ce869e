"""What an agent breaks of its own node: done once, whatever becomes of its controller meanwhile."""

from __future__ import annotations

import asyncio
import socket

import pytest
from tests.agent.test_link import Office, link_to, running, seqs

from holdfast.agent import drills
from holdfast.agent.drills import Drills, Reach
from holdfast.clock import Clock
from holdfast.events import DrillAction, DrillTarget
from holdfast.events.orders import Acknowledge, Break, encode

HOUR_S = 3600.0


def test_drill_of_a_node_waits_for_a_controller_that_writes_it_down_and_is_done_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done = asyncio.Event()
    monkeypatch.setitem(drills._ACTS, (DrillAction.KILL, DrillTarget.NODE), lambda reach, order: done.set())

    async def scene(port: int) -> None:
        link = link_to(port)
        node = Drills(Reach(node=1, teams=tuple, link=link, clock=Clock()))
        node.take(Break(requested_at=5.0, target=DrillTarget.NODE, action=DrillAction.KILL))
        await asyncio.sleep(0)
        loop = asyncio.get_running_loop()
        with monkeypatch.context() as later:
            now = loop.time()
            later.setattr(loop, "time", lambda: now + HOUR_S)
            for _ in range(10):  # whatever was due by then is over
                await asyncio.sleep(0)
        assert not done.is_set()
        office = Office(port)
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
