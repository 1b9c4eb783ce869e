"""The real API on loopback: who gets in, what is refused, and that garbage hurts only its sender."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec
import pytest
from msgspec.structs import replace
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, ConnectionClosedError, InvalidStatus

from holdfast.agent.quorum_relay import QuorumRelay
from holdfast.control.commands import StartAttempt
from holdfast.control.controller import Controller
from holdfast.control.machine import Machine
from holdfast.control.state import NodeState
from holdfast.control.trace_store import TraceStore
from holdfast.controller_api import ControllerApi, make_server
from holdfast.events import (
    AgentConnected,
    AgentDisconnected,
    AnyEvent,
    CancelRequested,
    CheckpointRequested,
    ControllerStarted,
    FaultRequested,
    FindingRaised,
    Outcome,
    RunCreated,
)
from holdfast.events.log import read_events
from holdfast.events.log_writer import EventWriter
from holdfast.events.requests import EXPIRES
from holdfast.findings import Finding
from holdfast.job.backend import BackendNodeState, NodeId, NodeObservation
from holdfast.job.heartbeat_timeouts import HeartbeatTimeouts
from holdfast.job.quarantine import MachineEvidence
from holdfast.job.spec import Job, Nodes
from holdfast.observe.metrics_endpoint import MetricsEndpoint
from holdfast.protocol import orders
from holdfast.protocol.orders import PROTOCOL, Acknowledge, RankLaunch, StartRanks, order_decoder
from holdfast.run_dir import trace_name
from holdfast.security.admission import PendingConnections
from holdfast.security.api_limits import LIMITS, ApiLimits
from holdfast.security.tokens import TokenIssuer

TOKEN = "correct-horse-battery-staple"
KEYS = TokenIssuer(TOKEN)
encode = msgspec.json.Encoder().encode

CANCEL = encode(CancelRequested(at=1.0, requested_by="test"))


class Nowhere:
    """A backend that makes nothing."""

    async def submit(self, node_ids: tuple[NodeId, ...]) -> None: ...

    async def observe(self) -> AsyncIterator[NodeObservation]:
        await asyncio.Event().wait()
        yield NodeObservation(node_id=NodeId(node=0, generation=0), state=BackendNodeState.UNAVAILABLE)

    async def replace_node(self, node_id: NodeId, reason: str) -> None: ...

    async def quarantined(self) -> tuple[Finding, ...]:
        return ()

    async def avoid_machine(
        self, node_id: NodeId, machine: str, evidence: MachineEvidence | None
    ) -> tuple[Finding, ...]:
        return ()

    async def cordon(self, node_id: NodeId) -> None: ...

    async def uncordon(self, node_id: NodeId) -> None: ...

    def generation(self, node: int, address: str) -> int | None:
        """Of the second node one came to life here."""
        return 0 if (node, address) == (1, "127.0.0.1") else None

    async def report_outcome(self, outcome: Outcome, exit_code: int, reason: str) -> None: ...

    async def cancel(self) -> None: ...


@dataclass
class Site:
    """A listening port and the log behind it."""

    url: str
    log: Path
    hall: PendingConnections
    controller: Controller

    def client(self, token: str | None = TOKEN) -> httpx.AsyncClient:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        return httpx.AsyncClient(base_url=f"http://{self.url}", headers=headers, timeout=200, trust_env=False)

    def agent(self, node: int = 0, *, token: str | None = None, sock: socket.socket | None = None) -> connect:
        headers = {"Authorization": f"Bearer {KEYS.node_token(node, 0) if token is None else token}"}
        return connect(f"ws://{self.url}/v1/agent", additional_headers=headers, proxy=None, sock=sock)

    def events(self, *kinds: type[AnyEvent]) -> list[AnyEvent]:
        return [event for event in read_events(self.log) if isinstance(event, kinds)]


async def no_drill(drill: FaultRequested) -> None:
    pytest.fail(f"nothing is broken here: {drill}")


def no_start(start: StartAttempt, members: tuple[NodeState, ...]) -> Callable[[int], StartRanks]:
    pytest.fail("nothing is started here")


@contextlib.asynccontextmanager
async def site(
    folder: Path,
    code: Path | None = None,
    limits: ApiLimits = LIMITS,
    node_grace_s: float = 45.0,
    quorum_port: Callable[[], int] | None = None,
) -> AsyncGenerator[Site]:
    silence = HeartbeatTimeouts(node_grace_s=node_grace_s)
    writer = EventWriter(folder / "events.jsonl")
    controller = Controller(
        machine=Machine(Job(command=("train",), nodes=Nodes(min=3, max=3))),
        writer=writer,
        history=[],
        backend=Nowhere(),
        start_orders=no_start,
        inject_fault=no_drill,
        incarnation="c",
    )
    controller.handle(RunCreated(at=1.0, run="r", job={}), ControllerStarted(at=1.0, pid=1, incarnation="c"))
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    metrics = MetricsEndpoint(lambda: {"r": folder / "events.jsonl"})
    port = ControllerApi(
        controller,
        KEYS,
        code,
        limits,
        metrics=metrics,
        traces=TraceStore(folder / "traces"),
        generation=Nowhere().generation,
        quorum_port=quorum_port,
    )
    served = make_server(port, nodes=3, silence=silence, limits=limits)
    serving = asyncio.ensure_future(served.serve(sockets=[listener]))
    try:
        yield Site(
            url="{}:{}".format(*listener.getsockname()),
            log=folder / "events.jsonl",
            hall=served.pending,
            controller=controller,
        )
    finally:
        served.should_exit = True
        await serving
        writer.close()


def play(
    folder: Path,
    scene: Callable[[Site], Awaitable[None]],
    limits: ApiLimits = LIMITS,
    code: Path | None = None,
    node_grace_s: float = 45.0,
) -> None:
    async def whole() -> None:
        async with asyncio.timeout(60), site(folder, code, limits, node_grace_s) as here:
            await scene(here)

    asyncio.run(whole())


def joined(node: int, *, generation: int = 0, source: str = "", protocol: int = PROTOCOL, oldest: int = 0) -> bytes:
    return encode(
        AgentConnected(
            at=1.0,
            source=source or f"node{node}.{generation}/i",
            node=node,
            generation=generation,
            incarnation="i",
            hostname="h",
            address="127.0.0.1",
            port=4000,
            pid=1,
            protocol=protocol,
            oldest_protocol=oldest,
        )
    )


def found(node: int, seq: int) -> bytes:
    finding = Finding(code="said", what="something")
    return encode(FindingRaised(at=1.0, source=f"node{node}.0/i", seq=seq, finding=finding))


async def acknowledged(agent: ClientConnection, seq: int) -> None:
    while True:
        order = order_decoder.decode(await agent.recv())
        if isinstance(order, Acknowledge) and order.seq >= seq:
            return


class Shouting:
    """A service that answers in capitals, and ends when told to."""

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while (line := await reader.readline()) not in (b"", b"end\n"):
            writer.write(line.upper())
        writer.close()


def start_order(*, relays_quorum: bool) -> StartRanks:
    rank = RankLaunch(rank=0, argv=("train",), cwd="", log="log", env={"TORCHFT_LIGHTHOUSE": "http://elsewhere:1"})
    return StartRanks(replica=0, attempt=0, ranks=(rank,), relays_quorum=relays_quorum)


async def relayed(relay: QuorumRelay) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A rank's connection by the address in its start order."""
    (rank,) = relay.with_address(start_order(relays_quorum=True)).launches
    host, _, port = rank.env["TORCHFT_LIGHTHOUSE"].removeprefix("http://").partition(":")
    return await asyncio.open_connection(host, int(port))


def test_ranks_reach_the_quorum_service_through_agent_and_controller(tmp_path: Path) -> None:
    async def scene() -> None:
        service = await asyncio.start_server(Shouting(), "127.0.0.1", 0, limit=1 << 20)
        port: int = service.sockets[0].getsockname()[1]
        limits = replace(LIMITS, quorum_connections=2)
        async with asyncio.timeout(60), site(tmp_path, limits=limits, quorum_port=lambda: port) as here:
            relay = QuorumRelay(lambda: f"ws://{here.url}/v1/agent", KEYS.node_token(1, 0), None)
            unchanged = start_order(relays_quorum=False)
            assert relay.with_address(unchanged) is unchanged
            (first, to_first), (second, to_second) = await relayed(relay), await relayed(relay)
            large = b"x" * 300_000 + b"\n"
            to_first.write(large)
            to_second.write(b"two\n")
            assert await second.readline() == b"TWO\n"
            assert await first.readexactly(len(large)) == large.upper()
            third, _ = await relayed(relay)
            assert await third.read() == b"", "a node has no more than its share"
            to_first.write(b"end\n")
            assert await first.read() == b""
            to_second.close()
            service.close()
            after, _ = await relayed(relay)
            assert await after.read() == b"", "a connection ends while there is no service"
            service = await asyncio.start_server(Shouting(), "127.0.0.1", port)
            again, to_again = await relayed(relay)
            to_again.write(b"again\n")
            assert await again.readline() == b"AGAIN\n"
            to_again.close()
            service.close()

    asyncio.run(scene())


def test_quorum_service_is_for_agents_alone_and_only_where_it_is_relayed(tmp_path: Path) -> None:
    async def refused(url: str, token: str) -> bool:
        headers = {"Authorization": f"Bearer {token}"}
        with contextlib.suppress(InvalidStatus):
            async with connect(f"ws://{url}/v1/quorum", additional_headers=headers, proxy=None):
                return False
        return True

    async def scene() -> None:
        service = await asyncio.start_server(Shouting(), "127.0.0.1", 0, limit=1 << 20)
        async with asyncio.timeout(60), site(tmp_path, quorum_port=lambda: service.sockets[0].getsockname()[1]) as here:
            assert await refused(here.url, TOKEN)
            assert await refused(here.url, "mistaken")
            assert not await refused(here.url, KEYS.node_token(0, 0))
        (tmp_path / "other").mkdir()
        async with site(tmp_path / "other") as here:
            assert await refused(here.url, KEYS.node_token(0, 0))
        service.close()

    asyncio.run(scene())


def test_code_is_given_to_nodes_under_its_digest_alone(tmp_path: Path) -> None:
    archive = tmp_path / "code" / f"{'5f' * 32}.tar"
    archive.parent.mkdir()
    archive.write_bytes(b"code" * 100_000)
    (tmp_path / f"{'aa' * 32}.tar").write_bytes(b"another run's")

    async def scene(here: Site) -> None:
        async with here.client(KEYS.node_token(1, 0)) as node, here.client() as operator, here.client(None) as nobody:
            path = f"/v1/code/{archive.stem}"
            answer = await node.get(path)
            assert (answer.status_code, answer.content) == (200, archive.read_bytes())
            assert (await nobody.get(path)).status_code == 401
            assert (await operator.get(path)).status_code == 401
            for other in (f"/v1/code/{'aa' * 32}", f"/v1/code/{archive.name}", "/v1/code/x"):
                assert (await node.get(other)).status_code == 410
                assert (await operator.get(other)).status_code == 401
            for other in (f"/v1/code/../{archive.name}", "/v1/code"):
                assert (await node.get(other)).status_code == 401
                assert (await operator.get(other)).status_code == 404
            archive.unlink()
            assert (await node.get(path)).status_code == 410

    play(tmp_path, scene, code=archive.parent)


WRONG_TOKENS = [None, "mistaken", TOKEN[:-1], TOKEN + "x", "ünknown"]


def test_request_without_the_token_is_refused_the_same_everywhere(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    paths = ["/v1/cancel", "/v1/agent", "/v1/nothing", "/"]

    async def scene(here: Site) -> None:
        async with here.client(None) as client:
            for path, token in itertools.product(paths, WRONG_TOKENS):
                headers = {} if token is None else {b"Authorization": f"Bearer {token}".encode()}
                for method in ("GET", "POST"):
                    answer = await client.request(method, path, content=CANCEL, headers=headers)
                    assert answer.status_code == 401
                    assert answer.json() == {"error": "refused"}
                    assert "server" not in answer.headers
        assert here.events(CancelRequested) == []

    with caplog.at_level(logging.WARNING):
        play(tmp_path, scene)
    refusals = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
    assert len(refusals) == 2 * len(paths) * len(WRONG_TOKENS)
    assert all("127.0.0.1" in refusal for refusal in refusals)
    assert not any(token in caplog.text for token in (TOKEN[:-1], "mistaken", "ünknown"))


def test_address_in_the_log_is_where_the_connection_came_from(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scene(here: Site) -> None:
        async with here.client(None) as client:
            await client.get("/", headers={"X-Forwarded-For": "10.9.9.9"})

    play(tmp_path, scene)
    assert "refused a connection from 127.0.0.1" in caplog.text
    assert "10.9.9.9" not in caplog.text


def test_basic_authorization_with_the_token_is_refused(tmp_path: Path) -> None:
    async def scene(here: Site) -> None:
        async with here.client(None) as client:
            answer = await client.post("/v1/cancel", content=CANCEL, headers={"Authorization": f"Basic {TOKEN}"})
        assert answer.status_code == 401

    play(tmp_path, scene)


def test_agent_without_the_token_is_refused_before_it_is_accepted(tmp_path: Path) -> None:
    async def scene(here: Site) -> None:
        with pytest.raises(InvalidStatus) as refusal:
            async with here.agent(token="wrong"):
                pass
        assert refusal.value.response.status_code in (401, 403)
        assert here.events(AgentConnected) == []

    play(tmp_path, scene)


def test_path_in_the_log_cannot_forge_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scene(here: Site) -> None:
        async with here.client(None) as client:
            await client.get("/x%0a2026-01-01 INFO all is well")

    play(tmp_path, scene)
    (refused,) = [text for name, _, text in caplog.record_tuples if name == "holdfast.controller" and "refused" in text]
    assert "all is well" in refused
    assert "\n" not in refused


def test_requests_with_the_token_reach_the_log_as_our_own_of_now(tmp_path: Path) -> None:
    async def scene(here: Site) -> None:
        drill = b'{"type":"fault-requested","at":1,"target":"rank","index":1,"action":"kill"}'
        forged = b'{"type":"checkpoint-requested","at":1,"source":"node0.0/i","seq":99}'
        async with here.client() as client:
            for path, body in (("drill", drill), ("checkpoint", forged), ("cancel", CANCEL)):
                answer = await client.post(f"/v1/{path}", content=body)
                assert (answer.status_code, answer.json()) == (200, {"ok": True})
        for event in here.events(FaultRequested, CheckpointRequested, CancelRequested):
            assert event.at > 1e9
            assert (event.source, event.seq) == ("", 0)

    play(tmp_path, scene)


def test_body_that_is_too_large_is_refused(tmp_path: Path) -> None:
    async def scene(here: Site) -> None:
        async with here.client() as client:
            answer = await client.post("/v1/cancel", content=b" " * (LIMITS.body_bytes + 1))
        assert answer.status_code == 413

    play(tmp_path, scene)


GARBAGE = [
    b"",
    b"{",
    b"\xff\xfe",
    b"[]",
    b"null",
    b"{}",
    b'{"type":"run-finished","at":1}',
    b'{"type":"fault-requested","at":1,"target":"rank","index":"one","action":"kill"}',
    b'{"type":"fault-requested","at":1e999,"target":"rank","index":1,"action":"kill"}',
    b'{"type":"fault-requested","at":1,"target":"r\xffnk","index":1,"action":"kill"}',
    b'{"type":"fault-requested","at":1,"x":' + b"[" * 60_000,
]


def test_garbage_is_answered_with_400_and_changes_nothing(tmp_path: Path) -> None:
    async def scene(here: Site) -> None:
        before = read_events(here.log)
        async with here.client() as client:
            for body in GARBAGE:
                answer = await client.post("/v1/drill", content=body)
                assert answer.status_code == 400, body[:80]
                assert answer.json()["error"] == "not understood"
            assert read_events(here.log) == before
            assert (await client.post("/v1/cancel", content=CANCEL)).status_code == 200

    play(tmp_path, scene)


def test_request_that_is_read_too_late_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    async def scene(here: Site) -> None:
        before = read_events(here.log)
        async with here.client() as client:
            for until, status in ((time.monotonic() - 0.001, 408), ("soon", 400)):
                answer = await client.post("/v1/cancel", content=CANCEL, headers={EXPIRES: f"{until}"})
                assert answer.status_code == status
            assert read_events(here.log) == before
            in_time = {EXPIRES: f"{time.monotonic() + 600}"}
            assert (await client.post("/v1/cancel", content=CANCEL, headers=in_time)).status_code == 200

    play(tmp_path, scene)


async def _gone(agent: ClientConnection) -> None:
    with contextlib.suppress(ConnectionClosed):
        while True:
            await agent.recv()


def test_agent_whose_first_word_is_not_a_greeting_is_cut_off_alone(tmp_path: Path) -> None:
    async def scene(here: Site) -> None:
        async with here.agent() as good:
            await good.send(joined(0))
            for seq, garbage in enumerate([*GARBAGE, "text", found(0, 1)], 1):
                async with here.agent() as bad:
                    await bad.send(garbage)
                    await _gone(bad)
                await good.send(found(0, seq))
                await acknowledged(good, seq)
        assert len(here.events(AgentConnected)) == 1

    play(tmp_path, scene)


def test_agent_that_says_garbage_later_is_cut_off_alone(tmp_path: Path) -> None:
    async def scene(here: Site) -> None:
        garbages = [*GARBAGE, "text", found(0, 99), joined(0), joined(1)]
        async with here.agent() as good:
            await good.send(joined(0))
            for seq, garbage in enumerate(garbages, 1):
                async with here.agent(1) as bad:
                    await bad.send(joined(1))
                    await bad.send(garbage)
                    await _gone(bad)
                await good.send(found(0, seq))
                await acknowledged(good, seq)
            nodes = [event.node for event in here.events(AgentDisconnected) if isinstance(event, AgentDisconnected)]
            assert nodes == [1] * len(garbages)
        assert len(here.events(FindingRaised)) == len(garbages)

    play(tmp_path, scene)


# A message of a kind, and one with a value, that only a later version knows.
LATER = (
    b'{"type":"weather-observed","at":1,"node":0,"source":"node0.0/i","seq":1}',
    b'{"type":"evidence-kept","at":1,"node":0,"replica":0,"attempt":0,"folder":"f","files":"all","bytes":1,"source":"node0.0/i","seq":2}',
)


def test_agent_one_protocol_version_later_is_heard_and_what_is_unknown_is_acknowledged(tmp_path: Path) -> None:
    async def scene(here: Site) -> None:
        async with here.agent(0) as agent:
            await agent.send(joined(0, protocol=PROTOCOL + 1, oldest=PROTOCOL))
            await agent.send(b"\n".join((*LATER, found(0, 3))))
            await acknowledged(agent, 3)
        assert len(here.events(FindingRaised)) == 1
        for message in LATER:  # of this version it would be no such message
            async with here.agent(1) as agent:
                await agent.send(joined(1))
                await agent.send(message.replace(b"node0", b"node1").replace(b'"node":0', b'"node":1'))
                await _gone(agent)

    play(tmp_path, scene)


def test_agent_one_protocol_version_earlier_is_heard_by_a_release_that_speaks_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orders, "PROTOCOL", PROTOCOL + 1)

    async def scene(here: Site) -> None:
        async with here.agent(0) as agent:
            await agent.send(joined(0))
            await agent.send(found(0, 1))
            await acknowledged(agent, 1)
        assert len(here.events(AgentConnected)) == 1

    play(tmp_path, scene)


@pytest.mark.parametrize(
    ("protocol", "oldest", "spoken"), [(PROTOCOL - 1, 0, f"{PROTOCOL - 1}"), (9, 8, "8 and 9"), (9, 0, "9")]
)
def test_agent_two_protocol_versions_apart_is_refused_in_words(
    tmp_path: Path, protocol: int, oldest: int, spoken: str
) -> None:
    async def scene(here: Site) -> None:
        what = f"the agent of node0 speaks protocol {spoken}, and this controller {PROTOCOL}"
        for _ in range(2):
            async with here.agent(0) as agent:
                await agent.send(joined(0, protocol=protocol, oldest=oldest))
                with pytest.raises(ConnectionClosedError) as closed:
                    await agent.recv()
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.reason == what
        (raised,) = here.events(FindingRaised)
        assert isinstance(raised, FindingRaised)
        assert (raised.finding.code, raised.finding.what) == ("protocol-mismatch", what)
        assert here.events(AgentConnected) == []

    play(tmp_path, scene)


def test_agent_speaks_for_nobody_else(tmp_path: Path) -> None:
    async def scene(here: Site) -> None:
        others = [joined(1), joined(-1), joined(10**30), joined(0, generation=1), joined(0, source="node1.0/i")]
        for other in others:
            async with here.agent(0) as agent:
                await agent.send(other)
                await _gone(agent)
        assert here.events(AgentConnected) == []

    play(tmp_path, scene)


def test_node_token_sends_no_requests_and_the_users_token_is_no_agent(tmp_path: Path) -> None:
    async def scene(here: Site) -> None:
        before = read_events(here.log)
        async with here.client(KEYS.node_token(0, 0)) as client:
            # The path is what counts, not the one that a forged Host header makes of it.
            for headers in ({}, {"Host": "x/v1/agent?"}, {"Host": "["}):
                for path in ("cancel", "drill", "checkpoint", "profile", "nothing"):
                    answer = await client.post(f"/v1/{path}", content=CANCEL, headers=headers)
                    assert (answer.status_code, answer.json()) == (401, {"error": "refused"})
        with pytest.raises(InvalidStatus):
            async with here.agent(token=TOKEN):
                pass
        assert read_events(here.log) == before

    play(tmp_path, scene)


def test_trace_is_stored_for_an_agent_alone(tmp_path: Path) -> None:
    path = f"/v1/traces/{trace_name(20, 3, attempt=0)}"

    async def scene(here: Site) -> None:
        async with here.client() as user, here.client(KEYS.node_token(0, 0)) as agent:
            assert (await user.put(path, content=b"x")).status_code == 401
            assert (await agent.put("/v1/traces/token", content=b"x")).status_code == 413
            assert (await agent.put(path, content=b"trace")).status_code == 200
        (stored,) = here.log.parent.glob("traces/*/*")
        assert stored.read_bytes() == b"trace"

    play(tmp_path, scene)


def test_metrics_token_reads_metrics_and_nothing_else(tmp_path: Path) -> None:
    async def scene(here: Site) -> None:
        async with here.client(KEYS.metrics_token()) as monitor, here.client() as user, here.client(None) as stranger:
            answer = await monitor.get("/metrics")
            assert 'holdfast_run_phase{phase="pending",run="r"} 1.0' in answer.text
            assert (await user.get("/metrics")).text.splitlines()[0] == answer.text.splitlines()[0]
            assert (await stranger.get("/metrics")).status_code == 401
            assert (await monitor.post("/v1/cancel", content=encode(CancelRequested(at=1.0)))).status_code == 401
            openmetrics = await monitor.get("/metrics", headers={"Accept": "application/openmetrics-text"})
            assert openmetrics.text.endswith("# EOF\n")
        async with here.client(KEYS.node_token(0, 0)) as agent:
            assert (await agent.get("/metrics")).status_code == 401

    play(tmp_path, scene)


def test_agents_that_say_nothing_are_cut_off_and_keep_nobody_waiting(tmp_path: Path) -> None:
    async def scene(here: Site) -> None:
        async with contextlib.AsyncExitStack() as crowd:
            silent = [await crowd.enter_async_context(here.agent()) for _ in range(20)]
            good = await crowd.enter_async_context(here.agent(2))
            await good.send(joined(2))
            await good.send(found(2, 1))
            await acknowledged(good, 1)
            for one in silent:
                await _gone(one)
            await good.send(found(2, 2))
            await acknowledged(good, 2)

    play(tmp_path, scene, replace(LIMITS, admission_s=1.0))


STALLED = [
    b"",
    b"POST /v1/cancel HTTP/1.1\r\nHost: x\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",  # refused, then silent
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\nGET / HT",
    f"POST /v1/cancel HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: 9\r\n\r\n".encode(),
]


@pytest.mark.parametrize("beginning", STALLED)
def test_connection_that_does_not_continue_is_cut_off(tmp_path: Path, beginning: bytes) -> None:
    async def scene(here: Site) -> None:
        host, port = here.url.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(beginning)
        with contextlib.suppress(ConnectionResetError):
            while await reader.read(1000):
                pass
        writer.close()
        assert len(here.hall) == 0
        assert here.events(CancelRequested) == []

    play(tmp_path, scene, replace(LIMITS, admission_s=0.5))


def test_pending_strangers_make_way_for_later_connections(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scene(here: Site) -> None:
        host, port = here.url.split(":")
        crowd = [await asyncio.open_connection(host, int(port)) for _ in range(50)]
        async with here.agent() as good:
            await good.send(joined(0))
            await good.send(found(0, 1))
            await acknowledged(good, 1)
            assert len(here.hall) <= 5 + 3
            # One that has come to stay is no longer in anybody's way.
            crowd += [await asyncio.open_connection(host, int(port)) for _ in range(50)]
            await good.send(found(0, 2))
            await acknowledged(good, 2)
        for _, writer in crowd:
            writer.close()

    play(tmp_path, scene, replace(LIMITS, max_pending=5))
    assert "8 connections have yet to show a token" in caplog.text


def test_node_that_says_too_much_is_slowed_and_loses_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scene(here: Site) -> None:
        async with here.agent() as loud, here.agent(1) as good:
            await loud.send(joined(0))
            await good.send(joined(1))
            # More than may come at once, however slowly this machine takes the rest in.
            await loud.send(found(0, 1) + b" " * 200_000)
            for seq in range(2, 101):
                await loud.send(found(0, seq))
            await good.send(found(1, 1))
            await acknowledged(good, 1)
            await acknowledged(loud, 100)
        assert len(here.events(FindingRaised)) == 101

    play(tmp_path, scene, replace(LIMITS, node_bytes_per_s=1e6, node_burst_bytes=1e5))
    assert "node0.0 says more than" in caplog.text
    assert "node1.0 says more than" not in caplog.text


@pytest.mark.slow
def test_agent_that_does_not_read_is_cut_off_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scene(here: Site) -> None:
        host, port = here.url.split(":")
        narrow = socket.socket()
        narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        narrow.connect((host, int(port)))
        async with here.agent(sock=narrow) as deaf, here.agent(1) as good:
            await deaf.send(joined(0))
            await good.send(joined(1))
            deaf.transport.pause_reading()
            seq = 0
            while not here.events(AgentDisconnected):
                # What the deaf one does not read piles up in the kernel first, then here.
                here.controller.handle(*(CheckpointRequested(at=1.0) for _ in range(40)))
                await good.send(found(1, seq := seq + 1))
                await acknowledged(good, seq)
            deaf.transport.abort()
        assert next(event for event in here.events(AgentDisconnected) if isinstance(event, AgentDisconnected)).node == 0

    play(tmp_path, scene, replace(LIMITS, max_queued_orders=50))
    assert "has not read its last 50 orders" in caplog.text


def test_agent_of_a_node_that_does_not_exist_is_told_to_leave(tmp_path: Path) -> None:
    async def scene(here: Site) -> None:
        for node in (3, 10**8):
            async with here.agent(node) as stranger:
                await stranger.send(joined(node))
                assert "shutdown" in str(await stranger.recv())
        assert here.events(AgentConnected) == []

    play(tmp_path, scene)


def test_message_beyond_the_limit_cuts_its_sender_off_alone(tmp_path: Path) -> None:
    async def scene(here: Site) -> None:
        async with here.agent() as good, here.agent(1) as bad:
            await good.send(joined(0))
            await bad.send(joined(1))
            with contextlib.suppress(ConnectionClosed):
                await bad.send(b" " * (LIMITS.message_bytes + 1))
            await _gone(bad)
            await good.send(found(0, 1))
            await acknowledged(good, 1)

    play(tmp_path, scene)


def test_agent_that_falls_silent_with_its_connection_open_is_taken_to_be_away(tmp_path: Path) -> None:
    async def scene(here: Site) -> None:
        async with here.agent() as agent:
            await agent.send(joined(0))
            await agent.send(found(0, 1))
            await acknowledged(agent, 1)
            agent.transport.pause_reading()  # it takes nothing in and answers nothing, as a stopped process does
            while not here.events(AgentDisconnected):  # noqa: ASYNC110 - the log is a file, which tells nobody
                await asyncio.sleep(0.01)
            agent.transport.abort()

    play(tmp_path, scene, node_grace_s=3.0)


def test_unassigned_node_receives_its_generation(tmp_path: Path) -> None:
    async def scene(here: Site) -> None:
        async with here.client(KEYS.unassigned_node_token(1)) as client:
            known = await client.post("/v1/bootstrap", json={"address": "127.0.0.1"})
            assert known.json() == {"generation": 0, "token": KEYS.node_token(1, 0), "code": ""}
            unknown = await client.post("/v1/bootstrap", json={"address": "127.0.0.2"})
            assert (unknown.status_code, "token" in unknown.text) == (404, False)
            for garbage in (b"", b"[]", b"\xff", b'{"address": 1}', b"{}"):
                assert (await client.post("/v1/bootstrap", content=garbage)).status_code == 400
            assert (await client.post("/v1/cancel", content=CANCEL)).status_code == 401
        for token in (KEYS.node_token(1, 0), TOKEN, KEYS.unassigned_node_token(1)[:-1]):
            async with here.client(token) as client:
                assert (await client.post("/v1/bootstrap", json={"address": "127.0.0.1"})).status_code == 401
        with pytest.raises(InvalidStatus):
            async with here.agent(1, token=KEYS.unassigned_node_token(1)):
                pass

    play(tmp_path, scene)


def test_newcomer_becomes_the_agent_of_its_generation(tmp_path: Path) -> None:
    async def scene(here: Site) -> None:
        (tmp_path / "newcomer").write_text(KEYS.unassigned_node_token(1))
        named = {
            "bootstrap-token-file": tmp_path / "newcomer",
            "token-file": tmp_path / "token",
            "controller": f"ws://{here.url}/v1/agent",
            "address": "127.0.0.1",
            "folder": tmp_path / "node",
            "sockets": tmp_path / "sockets",
            "code": tmp_path / "code",
        } | dict.fromkeys(("controller-grace-s", "node-grace-s", "stop-grace-s"), "60")
        words = [str(word) for name, value in named.items() for word in (f"--{name}", value)]
        agent = await asyncio.create_subprocess_exec(sys.executable, "-m", "holdfast.agent.bootstrap", "1", *words)
        try:
            while not here.events(AgentConnected):
                assert agent.returncode is None
                await asyncio.sleep(0.02)
        finally:
            with contextlib.suppress(ProcessLookupError):
                agent.kill()
            await agent.wait()
        (came,) = here.events(AgentConnected)
        assert isinstance(came, AgentConnected)
        assert (came.node, came.generation) == (1, 0)
        assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600

    play(tmp_path, scene)
