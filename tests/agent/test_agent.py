"""A whole agent, in a separate process, under a test controller over a real WebSocket."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import sys
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest
from websockets.asyncio.server import Server, ServerConnection, serve

from holdfast.errors import ExitCode
from holdfast.events import (
    AgentConnected,
    EvidenceKept,
    ExitReason,
    FaultAction,
    FaultInjected,
    FaultTarget,
    MonitorsStarted,
    RankExited,
    RanksStarted,
    RanksStopped,
)
from holdfast.host.processes import identify
from holdfast.protocol.orders import (
    Acknowledge,
    AgentMessage,
    InjectFault,
    Order,
    RankLaunch,
    Shutdown,
    StartRanks,
    StopRanks,
    decode_frame,
    encode,
)

DEADLINE_S = 200.0
M = TypeVar("M", bound=msgspec.Struct)


class FakeController:
    """The controller's end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.connections: asyncio.Queue[ServerConnection] = asyncio.Queue()
        self.connection: ServerConnection | None = None
        self.received: list[AgentMessage] = []
        self.server: Server | None = None
        self.agent: asyncio.subprocess.Process | None = None

    async def take(self, connection: ServerConnection) -> None:
        self.connections.put_nowait(connection)
        await connection.wait_closed()

    async def joined(self) -> AgentConnected:
        self.connection, self.received = await self.connections.get(), []
        return await self.receive(AgentConnected)

    async def receive(self, kind: type[M]) -> M:
        """The next message, which is of this kind, without those that a thread sends when it is done; acknowledged."""
        assert self.connection is not None
        message: AgentMessage | None = None
        while message is None or isinstance(message, MonitorsStarted | EvidenceKept):
            if not self.received:
                self.received += decode_frame(await self.connection.recv(decode=False))
            message = self.received.pop(0)
        assert isinstance(message, kind), message
        await self.order(Acknowledge(seq=message.seq))
        return message

    async def order(self, order: Order) -> None:
        assert self.connection is not None
        await self.connection.send(encode(order))

    async def start(self, attempt: int, *argv: str) -> RanksStarted:
        env = {"HOLDFAST_REPLICA": "0", "HOLDFAST_ATTEMPT": str(attempt)}
        launch = RankLaunch(rank=0, argv=argv, env=env, cwd="/", log=str(self.folder / f"{attempt}.log"))
        await self.order(StartRanks(replica=0, attempt=attempt, ranks=(launch,)))
        return await self.receive(RanksStarted)

    async def gone(self) -> int:
        assert self.agent is not None
        return await self.agent.wait()


@contextlib.asynccontextmanager
async def fake_controller(folder: Path, sockets: str, *, grace_s: float = 1000.0) -> AsyncGenerator[FakeController]:
    here = FakeController(folder)
    (folder / "token").write_text("token\n")
    async with serve(here.take, "127.0.0.1", 0) as server:
        here.server = server
        port = next(iter(server.sockets)).getsockname()[1]
        options = {
            "--controller": f"ws://127.0.0.1:{port}/v1/agent",
            "--token-file": str(folder / "token"),
            "--folder": str(folder),
            "--sockets": sockets,
            "--code": str(folder / "code"),
            "--address": "127.0.0.1",
            "--controller-grace-s": str(grace_s),
            "--node-grace-s": "45",
            "--stop-grace-s": "5",
        }
        words = [word for option in options.items() for word in option]
        here.agent = await asyncio.create_subprocess_exec(sys.executable, "-m", "holdfast.agent", "0", "2", *words)
        try:
            yield here
        finally:
            if here.agent.returncode is None:
                here.agent.kill()
                await here.agent.wait()


def play(folder: Path, scene: Callable[[FakeController], Awaitable[None]], **options: float) -> None:
    async def whole() -> None:
        with tempfile.TemporaryDirectory(prefix="holdfast-") as sockets:
            async with asyncio.timeout(DEADLINE_S), fake_controller(folder, sockets, **options) as here:
                await scene(here)

    asyncio.run(whole())


def test_attempts_follow_one_another_each_with_a_port_of_its_own(tmp_path: Path) -> None:
    async def scene(here: FakeController) -> None:
        joined = await here.joined()
        assert (joined.node, joined.generation, joined.attempt, joined.running) == (0, 2, -1, ())
        ports = [joined.port]
        for attempt in range(3):
            await here.start(attempt, "sleep", "600")
            await here.order(StopRanks(replica=0, attempt=attempt))
            exited = await here.receive(RankExited)
            assert (exited.reason, exited.stopped) == (ExitReason.SIGNAL, True)
            ports.append((await here.receive(RanksStopped)).port)
        assert all(one != other for one, other in itertools.pairwise(ports))
        await here.order(Shutdown())
        assert await here.gone() == 0

    play(tmp_path, scene)


def test_attempt_stopped_before_its_start_arrived_is_never_started_and_its_port_not_used_again(tmp_path: Path) -> None:
    async def scene(here: FakeController) -> None:
        joined = await here.joined()
        await here.order(StopRanks(replica=0, attempt=0))
        stopped = await here.receive(RanksStopped)
        assert (stopped.attempt, stopped.port != joined.port) == (0, True)
        late = RankLaunch(rank=0, argv=("false",), env={}, cwd="/", log=str(tmp_path / "late.log"))
        await here.order(StartRanks(replica=0, attempt=0, ranks=(late,)))
        started = await here.start(1, "sleep", "600")
        assert started.attempt == 1
        assert not (tmp_path / "late.log").exists()

    play(tmp_path, scene)


def test_orders_given_twice_or_too_late_change_nothing(tmp_path: Path) -> None:
    async def scene(here: FakeController) -> None:
        await here.joined()
        await here.order(StopRanks(replica=0, attempt=0))
        await here.receive(RanksStopped)
        started = await here.start(1, "sleep", "600")
        launch = RankLaunch(rank=0, argv=("false",), env={}, cwd="/", log=str(tmp_path / "1.log"))
        await here.order(StartRanks(replica=0, attempt=1, ranks=(launch,)))
        await here.order(StopRanks(replica=0, attempt=0))
        drill = InjectFault(requested_at=5.0, target=FaultTarget.RANK, rank=0, index=4, action=FaultAction.KILL)
        await here.order(drill)
        await here.order(drill)
        assert (await here.receive(FaultInjected)).target == "rank 4"
        exited = await here.receive(RankExited)
        assert (exited.attempt, exited.reason, exited.code, exited.stopped) == (1, ExitReason.SIGNAL, 9, False)
        await here.receive(RanksStopped)
        assert identify(started.ranks[0].pid) is None

    play(tmp_path, scene)


def test_ranks_live_on_while_the_controller_is_gone_and_die_with_their_agent(tmp_path: Path) -> None:
    async def scene(here: FakeController) -> None:
        await here.joined()
        pid = (await here.start(0, "sleep", "600")).ranks[0].pid
        rank = identify(pid)
        assert here.connection is not None
        here.connection.transport.abort()
        again = await here.joined()
        assert (again.attempt, [state.pid for state in again.running]) == (0, [pid])
        assert rank is not None
        assert rank.alive
        ended = os.pidfd_open(pid)
        assert here.agent is not None
        here.agent.kill()
        loop, gone = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(ended, gone.set)
        await gone.wait()
        loop.remove_reader(ended)
        os.close(ended)

    play(tmp_path, scene)


@pytest.mark.slow
def test_agent_long_without_a_controller_stops_its_ranks_and_leaves(tmp_path: Path) -> None:
    async def scene(here: FakeController) -> None:
        await here.joined()
        pid = (await here.start(0, "sleep", "600")).ranks[0].pid
        assert here.server is not None
        here.server.close()
        assert await here.gone() == ExitCode.NODES_LOST
        assert identify(pid) is None

    play(tmp_path, scene, grace_s=3.0)  # it must also suffice to find the controller at all
