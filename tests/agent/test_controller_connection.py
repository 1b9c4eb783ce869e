"""The agent's end of the connection against a real WebSocket server: no message is lost, whatever breaks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from http import HTTPStatus
from pathlib import Path

import msgspec
import pytest
from websockets.asyncio.server import Request, Response, Server, ServerConnection, serve

from holdfast.agent.controller_connection import (
    CONNECT_TIMEOUT_S,
    MAX_MESSAGE_BYTES,
    ControllerConnection,
    TokenRejected,
    log,
    open_socket,
)
from holdfast.events import AgentConnected, FindingRaised, RankHung
from holdfast.findings import Finding
from holdfast.job.heartbeat_timeouts import HeartbeatTimeouts
from holdfast.protocol.orders import (
    Acknowledge,
    AnyOrder,
    NodeStep,
    Progress,
    Shutdown,
    TakeCheckpoint,
    agent_message_decoder,
    decode_frame,
    encode,
)
from holdfast.security.tls import make_identity, server_context

TOKEN = "token"


def greeting() -> AgentConnected:
    return AgentConnected(
        at=1.0,
        source="node0.0/x",
        node=0,
        generation=0,
        incarnation="x",
        hostname="h",
        address="127.0.0.1",
        port=1,
        pid=1,
    )


def finding_event() -> FindingRaised:
    return FindingRaised(at=1.0, finding=Finding(code="said", what="said"))


class FakeController:
    """A controller that takes connections and hands them to the test one by one."""

    def __init__(self, port: int, tls: ssl.SSLContext | None = None) -> None:
        self.port = port
        self.tls = tls
        self.connections: asyncio.Queue[ServerConnection] = asyncio.Queue()
        self.hello: AgentConnected | None = None
        """Of the latest connection."""

    async def open(self) -> Server:
        return await serve(self._take, "127.0.0.1", self.port, process_request=self._admit, ssl=self.tls)

    def _admit(self, connection: ServerConnection, request: Request) -> Response | None:
        if request.headers.get("Authorization") == f"Bearer {TOKEN}":
            return None
        return connection.respond(HTTPStatus.FORBIDDEN, "")

    async def _take(self, connection: ServerConnection) -> None:
        self.connections.put_nowait(connection)
        await connection.wait_closed()

    async def next(self) -> ServerConnection:
        connection = await self.connections.get()
        hello = agent_message_decoder.decode(await connection.recv())
        assert isinstance(hello, AgentConnected)
        self.hello = hello
        return connection


async def seqs(connection: ServerConnection, count: int) -> list[int]:
    heard: list[int] = []
    while len(heard) < count:
        heard += [message.seq for message in decode_frame(await connection.recv())]
    return heard


def connection_to(
    port: int,
    *,
    token: str = TOKEN,
    handle_order: Callable[[AnyOrder], None] = lambda _: None,
    node_grace_s: float = 45.0,
) -> ControllerConnection:
    silence = HeartbeatTimeouts(node_grace_s=node_grace_s)
    return ControllerConnection(
        lambda: f"ws://127.0.0.1:{port}/v1/agent",
        token,
        "node0.0/x",
        hello=greeting,
        handle_order=handle_order,
        heartbeat_timeouts=silence,
    )


@contextlib.asynccontextmanager
async def running(link: ControllerConnection) -> AsyncIterator[None]:
    work = asyncio.ensure_future(link.run())
    try:
        yield
    finally:
        work.cancel()


def play(scene: Callable[[int], Awaitable[None]]) -> None:
    """With a port on which no process listens yet, and which no other process can take."""

    async def whole() -> None:
        with socket.socket() as held:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind(("127.0.0.1", 0))
            async with asyncio.timeout(20):
                await scene(held.getsockname()[1])

    asyncio.run(whole())


def test_messages_sent_before_there_is_a_controller_arrive_later() -> None:
    async def scene(port: int) -> None:
        link = connection_to(port)
        assert [link.send(finding_event()), link.send(finding_event())] == [1, 2]
        async with running(link):
            await link.disconnected.wait()
            office = FakeController(port)
            async with await office.open():
                connection = await office.next()
                assert await seqs(connection, 2) == [1, 2]
                link.send(finding_event())
                assert await seqs(connection, 1) == [3]

    play(scene)


def test_message_that_the_controller_would_refuse_for_ever_is_cut_or_dropped() -> None:
    frame = "f" * 100_000
    hung = RankHung(
        at=1.0, node=0, replica=0, attempt=0, rank=0, last_step=1, last_step_at=1.0, waited_s=1.0, top_frame=frame
    )

    async def scene(port: int) -> None:
        link = connection_to(port)
        link.send(hung)
        link.send(msgspec.structs.replace(hung, rank=2**40))  # nothing to be cut: nobody has such a rank
        link.send(FindingRaised(at=1.0, finding=Finding(code="said", what="said", where="/data/\udcff")))
        async with running(link), await (office := FakeController(port)).open():
            connection = await office.next()
            (cut,), (said,) = decode_frame(await connection.recv()), decode_frame(await connection.recv())
            assert isinstance(cut, RankHung)
            assert cut.top_frame.startswith("fff")
            assert (cut.seq, said.seq) == (1, 2)

    play(scene)


def test_memory_for_what_waits_for_a_controller_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.agent.controller_connection.MAX_OUTBOX_BYTES", 10_000)
    steps = tuple(NodeStep(step=step, started=1.0, ended=2.0, metrics={"loss": 0.5}) for step in range(100))
    evidence = FindingRaised(at=1.0, finding=Finding(code="x", what="x", evidence=("line" * 10_000,) * 1000))

    async def scene(port: int) -> None:
        link = connection_to(port)
        for _ in range(20):
            link.send(Progress(node=0, replica=0, attempt=0, steps=steps))
        assert sum(map(len, link._outbox.values())) == link._outbox_bytes < 20_000
        link.send(evidence)
        assert link._outbox_bytes < 20_000 + MAX_MESSAGE_BYTES
        (last,) = decode_frame(link._outbox[20])
        assert isinstance(last, Progress)
        assert [step.step for step in last.steps] == [99]
        link._on_ack(21)
        assert link._outbox_bytes == 0

    play(scene)


def test_unacknowledged_messages_are_resent_in_order_after_a_break() -> None:
    async def scene(port: int) -> None:
        link = connection_to(port)
        office = FakeController(port)
        async with await office.open(), running(link):
            for _ in range(4):
                link.send(finding_event())
            first = await office.next()
            assert await seqs(first, 4) == [1, 2, 3, 4]
            await first.send(encode(Acknowledge(seq=2)))
            await link.wait_acked(2)
            first.transport.abort()
            second = await office.next()
            assert office.hello is not None
            assert office.hello.unacked_seq == 4
            link.send(finding_event())
            assert await seqs(second, 3) == [3, 4, 5]

    play(scene)


def test_controller_that_comes_back_finds_its_agent() -> None:
    async def scene(port: int) -> None:
        link = connection_to(port)
        async with running(link):
            for seq in (1, 2, 3):
                office = FakeController(port)
                async with await office.open():
                    connection = await office.next()
                    link.send(finding_event())
                    assert await seqs(connection, seq) == list(range(1, seq + 1))
                assert not link.connected.is_set() or await link.disconnected.wait()

    play(scene)


def test_wait_for_safety_ends_with_the_acknowledgement_or_where_it_has_one_its_time() -> None:
    async def scene(port: int) -> None:
        link = connection_to(port)
        office = FakeController(port)
        async with await office.open(), running(link):
            seq = link.send(finding_event())
            await link.flush(0.01)
            waiting = asyncio.ensure_future(link.wait_acked(seq))
            connection = await office.next()
            await connection.send(encode(Acknowledge(seq=seq)))
            await waiting
            await link.wait_acked(seq)
            await link.flush(1000.0)

    play(scene)


def test_orders_are_obeyed_and_unknown_ones_passed_over() -> None:
    async def scene(port: int) -> None:
        obeyed: asyncio.Queue[AnyOrder] = asyncio.Queue()
        office = FakeController(port)
        async with await office.open(), running(connection_to(port, handle_order=obeyed.put_nowait)):
            connection = await office.next()
            for order in (encode(TakeCheckpoint()), b'{"order":"from-the-future"}', b"\xff", encode(Shutdown())):
                await connection.send(order)
            assert [await obeyed.get(), await obeyed.get()] == [TakeCheckpoint(), Shutdown()]

    play(scene)


def test_controller_of_another_run_receives_nothing_and_is_retried(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for run in ("ours", "theirs"):
        make_identity(tmp_path / f"{run}.ca", tmp_path / f"{run}.identity")
    heard: list[bytes] = []
    told = asyncio.Event()

    def note(record: logging.LogRecord) -> bool:
        if "is not this run's controller" in record.getMessage():
            told.set()
        return True

    monkeypatch.setattr(log, "filters", [note])

    async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.read())
        writer.close()

    async def scene(port: int) -> None:
        tls = server_context(tmp_path / "theirs.identity")
        async with await asyncio.start_server(hear, "127.0.0.1", port, ssl=tls):
            link = ControllerConnection(
                lambda: f"wss://127.0.0.1:{port}/v1/agent",
                TOKEN,
                "node0.0/x",
                hello=greeting,
                handle_order=lambda _: None,
                heartbeat_timeouts=HeartbeatTimeouts(node_grace_s=45.0),
                ca=tmp_path / "ours.ca",
            )
            async with running(link):
                await told.wait()
        office = FakeController(port, server_context(tmp_path / "ours.identity"))
        async with await office.open(), running(link):
            await office.next()
        assert set(heard) <= {b""}

    play(scene)
    assert TOKEN not in caplog.text


def test_refused_token_is_final() -> None:
    async def scene(port: int) -> None:
        async with await FakeController(port).open():
            with pytest.raises(TokenRejected):
                await connection_to(port, token="wrong").run()

    play(scene)


def test_controller_that_falls_silent_with_its_connection_open_is_given_up_and_found_again() -> None:
    async def scene(port: int) -> None:
        link = connection_to(port, node_grace_s=3.0)
        office = FakeController(port)
        async with await office.open(), running(link):
            first = await office.next()
            await link.connected.wait()
            first.transport.pause_reading()  # it takes nothing in and answers nothing, as a stopped process does
            link.send(finding_event())
            second = await office.next()
            assert await seqs(second, 1) == [1]
            first.transport.abort()

    play(scene)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux gives up a connection that nobody confirms")
def test_connection_to_a_machine_that_confirms_nothing_ends_without_waiting_for_pongs() -> None:
    """An agent then finds the next controller within seconds (test_cluster_runs.py, `lost_again_and_again`)."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        connection = asyncio.run(open_socket(f"ws://127.0.0.1:{server.getsockname()[1]}"))
        with connection:
            given_up_ms = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
    assert given_up_ms == CONNECT_TIMEOUT_S * 1000
