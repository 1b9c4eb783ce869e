"""A mirror whose controller pod comes and goes: the sync server and its sockets are real, and its port is here."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import until_async

from holdfast import api, controller_client
from holdfast.errors import HoldfastError
from holdfast.events import ControllerStarted, Outcome, RunFinished
from holdfast.events.log import EventReader, last_event, read_events
from holdfast.events.log_writer import EventWriter
from holdfast.findings import Finding
from holdfast.job.run_spec import RunSpec
from holdfast.job.spec import Job
from holdfast.launch.cluster_contact import lost_contact
from holdfast.launch.controller_supervisor import listen_for_clients, lock_run
from holdfast.launch.kubernetes.client.api_errors import ApiError, ApiUnavailable, to_holdfast_error
from holdfast.launch.kubernetes.client.api_paths import NAMESPACE_PATH, object_path
from holdfast.launch.kubernetes.cluster_ref import ClusterRef, write_cluster_ref
from holdfast.launch.kubernetes.incluster.sync_server import SYNC_PORT, serving
from holdfast.launch.kubernetes.sync import run_sync
from holdfast.launch.kubernetes.sync.finish_run import finish_run
from holdfast.launch.kubernetes.sync.run_sync import RunSync
from holdfast.run_dir import RunDir
from holdfast.security.tls import make_identity

WITHIN_S = 60.0
REPLICASET = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "metadata": {"name": "run-controller"}}
CLUSTER_REF = ClusterRef(context=None, namespace="ml", owner="/the/run", controller=REPLICASET)


class FakePort:
    """A connection to the port of the pod's sync server, which runs here."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pods: FakeCluster) -> None:
        self._reader, self._writer, self._pods = reader, writer, pods

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def receive(self) -> bytes:
        data = await self._reader.read(1 << 16)
        self._pods.answer()
        if not data:
            raise ApiUnavailable("the connection was cut")
        self._pods.heard += 1
        return data


class FakeCluster:
    """A cluster with the controller's pod, or without it; its port serves its folder."""

    def __init__(self, there: RunDir, port: int) -> None:
        self.there, self.port = there, port
        self.runs = False
        self.silent = ""
        """Why it does not answer, where it does not."""
        self.ends = ""
        """Since when the namespace is being deleted, where it is."""
        self.heard = 0
        self.removed: list[str] = []
        self.refusals: list[ApiError] = []
        """What is said to those who would remove something, before it is done."""
        self.removing = asyncio.Event()
        self.removing.set()
        self.connections: list[asyncio.StreamWriter] = []
        self.owner_ends = ""
        """Since when the run's object is being deleted, where it is."""
        self.made: list[str] = []
        self.looks = 0
        """How often it checked that the run's object is there."""
        self.replicas = 1
        """Of the controller's ReplicaSet."""
        self.conditions: list[dict[str, str]] = []
        """Of the run's object."""
        self.blind = False
        """Whether the user may not look at ReplicaSets."""

    def lose(self) -> None:
        """The pod is gone, and what runs in it."""
        self.runs, self.heard = False, 0
        for connection in self.connections:
            connection.close()

    def answer(self) -> None:
        if self.silent:
            raise ApiUnavailable(self.silent)

    async def get(self, path: str, **_: str) -> dict[str, Any]:
        self.answer()
        if path == NAMESPACE_PATH:
            return {"metadata": {"deletionTimestamp": self.ends} if self.ends else {}}
        if path == CLUSTER_REF.owner:
            ended = {"status": {"conditions": self.conditions}}
            return {"metadata": {"deletionTimestamp": self.owner_ends} if self.owner_ends else {}, **ended}
        if path == object_path(REPLICASET):
            if self.blind or path in self.removed:
                raise ApiError(403 if self.blind else 404, "no ReplicaSet")
            return {"spec": {"replicas": self.replicas}}
        pod = {"metadata": {"name": "controller"}, "status": {"phase": "Running"}}
        return {"items": [pod] if self.runs else []}

    async def exists(self, path: str) -> bool:
        self.looks += path == CLUSTER_REF.owner
        if self.blind and path != CLUSTER_REF.owner:
            raise ApiError(403, "may not get replicasets")
        return path not in self.removed

    async def create(self, path: str, one: dict[str, Any]) -> None:
        path = f"{path}/{one['metadata']['name']}"
        if path not in self.removed:
            raise ApiError(409, "already exists")
        self.removed.remove(path)
        self.made.append(path)

    async def delete(self, path: str) -> None:
        await self.removing.wait()
        if self.refusals:
            raise self.refusals.pop(0)
        self.removed.append(path)

    @contextlib.asynccontextmanager
    async def connect_to_port(self, pod: str, port: int) -> AsyncIterator[FakePort]:
        assert port == SYNC_PORT
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.connections.append(writer)
        try:
            yield FakePort(reader, writer, self)
        finally:
            writer.close()


Scene = Callable[[RunDir, FakeCluster, asyncio.Event], Awaitable[None]]


@pytest.fixture
def play(tmp_path: Path) -> Iterator[Callable[[Scene], None]]:
    here, there = RunDir(tmp_path / "here" / "run"), RunDir(tmp_path / "there" / "run")
    accepted = RunSpec(job=Job(command=("train",)), base="/", created_at=1.0, fabric="tcp", target_kind="kubernetes")
    for folder in (here, there):
        folder.path.mkdir(parents=True)
        folder.job.write_text(accepted.model_dump_json(exclude_defaults=True))
        EventWriter(folder.events).append([accepted.created_event("run")])
    make_identity(here.ca, here.identity)
    here.identity.rename(there.identity)
    for folder in (here, there):
        folder.token.write_text("token")

    async def whole(scene: Scene, port: int) -> None:
        asked, pods = asyncio.Event(), FakeCluster(there, port)
        sync = RunSync(here, pods, CLUSTER_REF)  # pyright: ignore[reportArgumentType] - as much of a cluster as it asks

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            asked.set()
            await sync.handle_client(reader, writer)

        async with await asyncio.start_unix_server(answer, sock=listen_for_clients(here)), asyncio.timeout(WITHIN_S):
            keeping = asyncio.ensure_future(sync.run())
            await scene(here, pods, asked)
            keeping.cancel()
            await asyncio.wait((keeping,))

    lock = lock_run(here)
    assert lock is not None
    with serving(there, 0) as port:
        yield lambda scene: asyncio.run(whole(scene, port))
    os.close(lock)


async def takes_one_request(folder: RunDir) -> str:
    """Be the controller's end for one request: report it done, and return the request."""
    heard: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = next(line for line in head.lower().splitlines() if line.startswith("content-length:"))
        await reader.readexactly(int(length.split()[1]))  # closed with it unread, the connection would be reset
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        writer.close()
        heard.set_result(head)

    async with await asyncio.start_unix_server(answer, sock=listen_for_clients(folder)):
        return await heard


def test_question_waits_for_a_controller_that_comes_back(play) -> None:
    async def scene(run: RunDir, pods: FakeCluster, asked: asyncio.Event) -> None:
        request = asyncio.ensure_future(asyncio.to_thread(api.cancel, run))
        await asked.wait()
        taking = asyncio.ensure_future(takes_one_request(pods.there))
        await asyncio.sleep(0)  # it listens
        pods.runs = True
        await request
        head = await taking
        assert head.startswith("POST /v1/cancel ")
        # Until when it may be obeyed is on the pod's own clock, which is this machine's here.
        until = float(
            next(line for line in head.splitlines() if line.lower().startswith("holdfast-expires")).split()[1]
        )
        assert 0 < until - time.monotonic() <= controller_client.REQUEST_TIMEOUT_S
        assert pods.removed == []

    play(scene)


def test_what_was_heard_last_is_shown_with_its_age_while_the_cluster_is_silent(play) -> None:
    async def scene(run: RunDir, pods: FakeCluster, asked: asyncio.Event) -> None:
        def shown(after_s: float) -> Finding | None:
            return controller_client.staleness(run, now=time.time() + after_s)

        pods.runs = True
        write_cluster_ref(run, CLUSTER_REF)
        await until_async(lambda: pods.heard and not run.cluster_contact.exists())
        assert shown(60.0) is None
        pods.silent = "connect: refused"
        await until_async(run.cluster_contact.exists)
        finding = shown(90.0)
        assert finding is not None
        assert finding.code == "cluster-status-stale"
        assert finding.evidence == ("the cluster's API server cannot be reached, or does not work: connect: refused",)
        assert "VPN" in finding.remedy, "what can be done here"
        assert "1 min 30 s old" in finding.what
        assert shown(0.0) is None, "a moment is nothing to speak of"
        pods.silent, pods.runs = "", False
        pods.lose()
        await until_async(lambda: (known := lost_contact(run)) and "does not run" in known.reason)
        assert shown(90.0) is not None
        run.events.unlink()
        assert shown(90.0) is None, "what it waits for is said, and nothing has gone on yet"
        pods.runs = True
        pods.silent = ""
        await until_async(lambda: not run.cluster_contact.exists())

    play(scene)


def test_run_whose_namespace_is_being_deleted_is_not_said_to_continue(play) -> None:
    async def scene(run: RunDir, pods: FakeCluster, asked: asyncio.Event) -> None:
        write_cluster_ref(run, CLUSTER_REF)
        pods.ends = "2026-11-22T20:00:00Z"
        while (found := controller_client.staleness(run, now=time.time())) is None:  # noqa: ASYNC110 - what a file says
            await asyncio.sleep(0.02)
        assert found.code == "namespace-terminating"
        assert "ml is being deleted" in found.what
        assert pods.ends in found.evidence[0]
        assert "goes on" not in found.remedy

    play(scene)


@pytest.mark.parametrize("force", [False, True])
def test_run_whose_controller_stays_away_is_ended_by_force_alone(
    play, monkeypatch: pytest.MonkeyPatch, force: bool
) -> None:
    monkeypatch.setattr(controller_client, "REQUEST_TIMEOUT_S", 1.0)
    monkeypatch.setattr(controller_client, "ANSWER_MARGIN_S", WITHIN_S)

    async def scene(run: RunDir, pods: FakeCluster, asked: asyncio.Event) -> None:
        if force:
            await asyncio.to_thread(api.cancel, run, force=True)
            assert isinstance(last_event(run.events), RunFinished)
        else:
            with pytest.raises(HoldfastError) as silent:
                await asyncio.to_thread(api.cancel, run)
            assert silent.value.findings[0].code == "controller-timeout"
        assert pods.removed[:1] == ([CLUSTER_REF.owner] if force else [])

    play(scene)


@pytest.mark.slow
def test_run_that_is_gone_before_anybody_said_so_was_cancelled(play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller_client, "REQUEST_TIMEOUT_S", 0.5)
    monkeypatch.setattr(controller_client, "ANSWER_MARGIN_S", 0.5)
    gone = to_holdfast_error(ApiError(404, 'jobsets.jobset.x-k8s.io "run" not found'))

    async def scene(run: RunDir, pods: FakeCluster, asked: asyncio.Event) -> None:
        pods.removing.clear()  # the cluster takes its time
        with pytest.raises(HoldfastError):
            await asyncio.to_thread(api.cancel, run, force=True)
        monkeypatch.setattr(controller_client, "pending_reason", lambda _: gone)
        await asyncio.to_thread(api.cancel, run, force=True)
        pods.removing.set()

    play(scene)


@pytest.mark.parametrize("blind", [False, True], ids=["seen", "unseen"])
def test_controllers_replicaset_that_somebody_deletes_is_made_again(
    play, blind: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by a user who may not look at ReplicaSets; not once the run itself is being deleted."""
    monkeypatch.setattr(run_sync, "RETRY_S", 0.02)
    path = object_path(REPLICASET)

    async def scene(run: RunDir, pods: FakeCluster, asked: asyncio.Event) -> None:
        pods.blind = blind
        pods.owner_ends = "2026-11-23T00:00:00Z"
        pods.removed.append(path)
        looks = pods.looks
        while pods.looks < looks + 3:  # noqa: ASYNC110 - it looks by itself, and tells nobody
            await asyncio.sleep(0.02)
        assert pods.made == []
        pods.owner_ends = ""
        while not pods.made:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.02)
        assert pods.made == [path]
        looks = pods.looks
        while pods.looks < looks + 3:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.02)
        assert pods.made == [path]

    play(scene)


def test_run_whose_controller_left_with_the_log_ends_as_its_object_says(play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_sync, "RETRY_S", 0.02)

    async def scene(run: RunDir, pods: FakeCluster, asked: asyncio.Event) -> None:
        pods.replicas = 0
        looks = pods.looks
        while pods.looks < looks + 3:  # noqa: ASYNC110 - it looks by itself, and tells nobody
            await asyncio.sleep(0.02)
        assert not isinstance(last_event(run.events), RunFinished), "its object does not show its end yet"
        why = "rank 1 exited with code 3 (exit code 3)"
        pods.conditions.append({"type": "Failed", "status": "True", "message": why})
        await until_async(lambda: isinstance(last_event(run.events), RunFinished))
        ended = last_event(run.events)
        assert isinstance(ended, RunFinished)
        assert (ended.outcome, ended.exit_code) == (Outcome.FAILED, 3)
        assert ended.reason == f"{why}; its log is on the machine that started it"

    play(scene)


def test_log_that_was_had_back_is_shown_once_a_node_knows_who_continues_with_it(play) -> None:
    async def scene(run: RunDir, pods: FakeCluster, asked: asyncio.Event) -> None:
        def started(pid: int) -> ControllerStarted:
            return ControllerStarted(at=2.0, pid=pid, incarnation="c")

        def write(pid: int) -> None:
            writer = EventWriter(pods.there.events)
            writer.append([started(pid)])
            writer.close()

        write(1)
        pods.runs = True
        await until_async(lambda: len(read_events(run.events)) == 2)
        reader = EventReader(run.events)
        story = list(reader.read())
        # Another pod, whose folder is empty at first, and then has a log that it may not show.
        pods.lose()
        pods.there.events.rename(had := pods.there.path / "had")
        pods.runs = True
        await until_async(lambda: pods.heard)
        pods.there.log_unreplicated.touch()
        had.rename(pods.there.events)
        write(2)
        # What is looked at after it is here, and nothing of it is.
        other = pods.there.path / "logs" / "attempt-0" / "rank-0.log"
        other.parent.mkdir(parents=True)
        other.write_text("a line\n")
        await until_async((run.path / "logs" / "attempt-0" / "rank-0.log").exists)
        assert read_events(run.events) == story
        pods.there.log_unreplicated.unlink()
        await until_async(lambda: read_events(run.events) == [*story, started(2)])
        assert list(reader.read()) == [started(2)]
        # One that nobody knew of is another story, which takes the place of this one at once.
        pods.lose()
        writer_of_another = EventWriter(fresh := pods.there.path / "fresh")
        writer_of_another.append([story[0], started(3)])
        writer_of_another.close()
        fresh.rename(pods.there.events)
        pods.runs = True
        await until_async(lambda: read_events(run.events) == [story[0], started(3)])
        assert list(reader.read()) == [story[0], started(3)]

    play(scene)


def test_cancelled_run_is_removed_by_an_api_server_that_has_just_started(play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.launch.kubernetes.sync.run_sync.RETRY_S", 0.01)

    async def scene(run: RunDir, pods: FakeCluster, asked: asyncio.Event) -> None:
        pods.refusals = [ApiError(403, "not yet ready to handle request")] * 2
        finish_run(pods.there, Outcome.CANCELLED, "cancelled on request", 1)
        pods.runs = True
        while not pods.removed:  # noqa: ASYNC110 - the cluster's own list
            await asyncio.sleep(0.01)
        assert pods.removed == [CLUSTER_REF.owner]
        assert pods.refusals == []

    play(scene)
