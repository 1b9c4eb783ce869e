"""A run's log and code are restored from its nodes; only what the controller signed counts."""

from __future__ import annotations

import asyncio
import hashlib
import socket
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import httpx
import pytest

from holdfast.agent.log_replica import LogReplica
from holdfast.control.agent_connections import AgentConnection, AgentRegistry
from holdfast.control.log_replication import CHUNK_BYTES, MAX_REPLICAS, MAX_UNSENT, LogReplicator
from holdfast.controller_api import make_server
from holdfast.events import AgentConnected, ControllerStarted, Event, FindingRaised, RunCreated
from holdfast.events.agent_events import LogReplicaPosition
from holdfast.events.log import encode_line
from holdfast.events.log_writer import EventWriter
from holdfast.findings import Finding
from holdfast.job.heartbeat_timeouts import HeartbeatTimeouts
from holdfast.log_restore import restore_log
from holdfast.protocol.orders import Order, ReplicateLog
from holdfast.run_dir import RunDir
from holdfast.security.tokens import TokenIssuer

KEYS = TokenIssuer("correct-horse-battery-staple")
CREATED = RunCreated(at=1.0, run="run", job={})
STARTED = ControllerStarted(at=2.0, pid=1, incarnation="c")
SAID = FindingRaised(at=3.0, finding=Finding(code="internal", what="x" * 1000))


class Node:
    """A node's end of its connection, with the copies that it keeps."""

    def __init__(self, folder: Path, node: int = 0) -> None:
        self.copies = LogReplica(folder / f"copies{node}")
        self.node = node
        self.sent: list[ReplicateLog] = []

    def send(self, order: Order) -> None:
        assert isinstance(order, ReplicateLog)
        self.sent.append(order)
        self.copies.apply(order)

    def after_sent(self, act: Callable[[], None]) -> None:
        act()

    def close(self) -> None: ...

    def joins(self, of: LogReplicator) -> AgentRegistry:
        joined = AgentConnected(
            at=0, node=self.node, generation=0, incarnation="a", hostname="h", address="a", port=1, pid=1
        )
        links = AgentRegistry()
        copied = of.position_of(self.node, self.copies.position)
        links.add(AgentConnection(peer=self, joined=joined, clock_offset_s=0.0, replicated_bytes=copied))
        of.replicate(links)
        return links


def grown(path: Path, events: Sequence[Event]) -> LogReplicator:
    with path.open("ab") as file:
        file.writelines(map(encode_line, events))
    return LogReplicator(path, KEYS.log_signature)


def test_node_gets_what_it_lacks_and_all_anew_where_its_copy_is_of_another_life(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    node = Node(tmp_path)
    copies = grown(path, [CREATED, STARTED])
    links = node.joins(copies)
    grown(path, [SAID] * (CHUNK_BYTES // 1000 + 10))
    copies.replicate(links)
    assert [bool(order.signature) for order in node.sent] == [True, False, True]
    assert node.copies.position.bytes == path.stat().st_size
    # Another controller, which goes by what is in the log alone.
    node.sent.clear()
    node.joins(grown(path, []))
    assert node.sent == []
    node.joins(grown(path, [STARTED]))
    assert [order.offset for order in node.sent] == [path.stat().st_size - len(encode_line(STARTED))]
    path.write_bytes(b"".join(map(encode_line, [CREATED, SAID, SAID])))
    node.sent.clear()
    node.joins(grown(path, []))
    assert [order.offset for order in node.sent] == [0]
    assert (tmp_path / "copies0" / "events.jsonl").read_bytes() == path.read_bytes()


def test_what_waits_for_a_node_to_know_of_it_waits_for_the_first(tmp_path: Path) -> None:
    path, told = tmp_path / "events.jsonl", list[int]()
    path.write_bytes(encode_line(CREATED))
    first, second = Node(tmp_path), Node(tmp_path, 1)
    copies = LogReplicator(path, KEYS.log_signature, lambda: told.append(first.copies.position.bytes))
    copies.replicate(AgentRegistry())
    Node(tmp_path, MAX_REPLICAS).joins(copies)
    assert told == []
    first.joins(copies)
    second.joins(copies)
    assert told == [path.stat().st_size]


def test_lag_is_the_age_of_the_oldest_lines_that_no_node_was_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, now, queued = tmp_path / "events.jsonl", [100.0], list[Callable[[], None]]()
    monkeypatch.setattr("holdfast.control.log_replication.time.monotonic", lambda: now[0])
    node = Node(tmp_path)
    monkeypatch.setattr(node, "after_sent", queued.append)
    copies = grown(path, [CREATED])
    assert copies.unsent_s == 0.0
    links = node.joins(copies)
    for second in range(1, 1 + 2 * MAX_UNSENT):
        now[0] = 100.0 + second
        with path.open("ab") as file:
            file.write(encode_line(STARTED))
        copies.replicate(links)
    assert copies.unsent_s == 2 * MAX_UNSENT
    queued.pop(0)()
    assert copies.unsent_s == 2 * MAX_UNSENT - 1
    queued[-1]()
    assert copies.unsent_s == 0.0


def test_only_the_first_nodes_keep_a_copy(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    node = Node(tmp_path, MAX_REPLICAS)
    node.joins(grown(path, [CREATED]))
    assert (node.sent, node.copies.position) == ([], LogReplicaPosition(bytes=0, signature=""))


async def recalled(folder: RunDir, nodes: Sequence[Node], newcomer: int) -> Finding:
    """Have nodes hand back what they have, and one ask who it is, as soon as somebody listens."""
    with socket.create_server(("127.0.0.1", 0)) as agents:
        address = "{}:{}".format(*agents.getsockname())
        listen = partial(make_server, nodes=len(nodes) + 1, silence=HeartbeatTimeouts(node_grace_s=45.0))
        slots = len(nodes) + 1
        having = asyncio.ensure_future(restore_log(folder, CREATED, KEYS, agents, listen, slots=slots, grace_s=100.0))
        for node in nodes:
            await node.copies.upload(f"ws://{address}/v1/agent", KEYS.node_token(node.node, 0), None)
        async with httpx.AsyncClient(base_url=f"http://{address}", trust_env=False, timeout=60) as client:
            stranger = await client.put("/v1/uploads/events.jsonl", content=b"", headers={"Authorization": "Bearer x"})
            assert stranger.status_code == 401
            headers = {"Authorization": f"Bearer {KEYS.unassigned_node_token(newcomer)}"}
            assert (await client.post("/v1/bootstrap", headers=headers, json={"address": "a"})).status_code == 404
        async with asyncio.timeout(60):
            return await having


@pytest.fixture
def folder(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "run")
    made.path.mkdir()
    return made


@pytest.mark.slow
def test_log_of_the_last_controller_is_had_back_and_a_longer_one_that_nobody_vouched_for_is_not(
    tmp_path: Path, folder: RunDir
) -> None:
    former, latest, code = tmp_path / "former", tmp_path / "latest", b"an archive"
    nodes = [Node(tmp_path, number) for number in range(3)]
    nodes[0].joins(grown(former, [CREATED, STARTED, *[SAID] * 9]))
    nodes[1].joins(grown(latest, [CREATED, STARTED, STARTED, SAID]))
    nodes[2].joins(grown(latest, []))
    with (tmp_path / "copies2" / "events.jsonl").open("ab") as file:
        file.writelines([encode_line(STARTED)] * 5)
    forged = nodes[2].copies.position
    nodes[2].copies._position = LogReplicaPosition(
        bytes=forged.bytes + 5 * len(encode_line(STARTED)), signature=forged.signature
    )  # pyright: ignore[reportPrivateUsage] - what an agent that was broken into would say
    digest = hashlib.sha256(code).hexdigest()
    (tmp_path / "copies0" / f"{digest}.tar").write_bytes(code)
    (tmp_path / "copies1" / f"{'0' * 64}.tar").write_bytes(code)

    finding = asyncio.run(recalled(folder, nodes, newcomer=3))

    assert (finding.code, "node1" in finding.what) == ("event-log-restored", True)
    assert folder.events.read_bytes() == latest.read_bytes()
    assert folder.log_unreplicated.exists()
    assert [path.name for path in folder.code.iterdir()] == [f"{digest}.tar"]
    assert not (folder.path / "restore-scratch").exists()
    EventWriter(folder.events).close()


@pytest.mark.slow
def test_run_begins_anew_where_nobody_has_a_copy(tmp_path: Path, folder: RunDir) -> None:
    other = Node(tmp_path)
    other.joins(grown(tmp_path / "other", [RunCreated(at=1.0, run="another", job={}), STARTED]))
    assert asyncio.run(recalled(folder, [other], newcomer=1)).code == "event-log-lost"
    assert not folder.events.exists()
