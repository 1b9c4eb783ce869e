"""A mirror whose controller's pod comes and goes: desk and sockets are real, the cluster runs pods from here."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast import api, asking
from holdfast.errors import HoldfastError
from holdfast.events import ControllerStarted, Outcome, RunFinished
from holdfast.events.log import EventReader, EventWriter, last_event, read_events
from holdfast.findings import Finding
from holdfast.folder import RunFolder
from holdfast.job.accepted import Accepted
from holdfast.job.profile import KUBERNETES
from holdfast.job.spec import Job
from holdfast.launch.keeping import clients_at, take
from holdfast.launch.kubernetes import mirror
from holdfast.launch.kubernetes.ending import conclude
from holdfast.launch.kubernetes.hearing import silence
from holdfast.launch.kubernetes.mirror import Mirror
from holdfast.launch.kubernetes.paths import NAMESPACE, path_of
from holdfast.launch.kubernetes.place import Place, record
from holdfast.launch.kubernetes.refusals import RefusedBy, Unanswered, refusal

WITHIN_S = 60.0
REPLICASET = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "metadata": {"name": "run-controller"}}
PLACE = Place(context=None, namespace="ml", owner="/the/run", controller=REPLICASET)


class Command:
    """A command of a pod's, as a process here."""

    def __init__(self, process: asyncio.subprocess.Process, pods: Pods) -> None:
        self._pods = pods
        assert process.stdin is not None
        assert process.stdout is not None
        self._input, self._output = process.stdin, process.stdout

    async def send(self, data: bytes) -> None:
        self._input.write(data)
        await self._input.drain()

    async def end_input(self) -> None:
        self._input.close()

    async def output(self) -> AsyncIterator[bytes]:
        while data := await self._output.read(1 << 16):
            self._pods.answer()
            self._pods.heard += 1
            yield data


class Pods:
    """A cluster with the controller's pod, or without it; commands in it see its folder."""

    def __init__(self, there: RunFolder) -> None:
        self.there = there
        self.runs = False
        self.silent = ""
        """Why it does not answer, where it does not."""
        self.ends = ""
        """Since when the namespace is being deleted, where it is."""
        self.heard = 0
        self.removed: list[str] = []
        self.refusals: list[RefusedBy] = []
        """What is said to those who would remove something, before it is done."""
        self.removing = asyncio.Event()
        self.removing.set()
        self.commands: list[asyncio.subprocess.Process] = []
        self.owner_ends = ""
        """Since when the run's object is being deleted, where it is."""
        self.made: list[str] = []
        self.looks = 0
        """How often it was asked whether the run's object is there."""
        self.blind = False
        """Whether the user may not look at ReplicaSets."""

    def lose(self) -> None:
        """The pod is gone, and what runs in it."""
        self.runs, self.heard = False, 0
        for command in self.commands:
            with contextlib.suppress(ProcessLookupError):
                command.kill()

    def answer(self) -> None:
        if self.silent:
            raise Unanswered(self.silent)

    async def read(self, path: str, **_: str) -> dict[str, Any]:
        self.answer()
        if path == NAMESPACE:
            return {"metadata": {"deletionTimestamp": self.ends} if self.ends else {}}
        if path == PLACE.owner:
            return {"metadata": {"deletionTimestamp": self.owner_ends} if self.owner_ends else {}}
        pod = {"metadata": {"name": "controller"}, "status": {"phase": "Running"}}
        return {"items": [pod] if self.runs else []}

    async def exists(self, path: str) -> bool:
        self.looks += path == PLACE.owner
        if self.blind and path != PLACE.owner:
            raise RefusedBy(403, "may not get replicasets")
        return path not in self.removed

    async def make(self, path: str, one: dict[str, Any]) -> None:
        path = f"{path}/{one['metadata']['name']}"
        if path not in self.removed:
            raise RefusedBy(409, "already exists")
        self.removed.remove(path)
        self.made.append(path)

    async def remove(self, path: str) -> None:
        await self.removing.wait()
        if self.refusals:
            raise self.refusals.pop(0)
        self.removed.append(path)

    @contextlib.asynccontextmanager
    async def execute(self, pod: str, *command: str) -> AsyncIterator[Command]:
        words = [sys.executable, *command[1:3], str(self.there.path), *command[4:]]
        process = await asyncio.create_subprocess_exec(
            *words, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        self.commands.append(process)
        try:
            yield Command(process, self)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


Scene = Callable[[RunFolder, Pods, asyncio.Event], Awaitable[None]]


@pytest.fixture
def play(tmp_path: Path) -> Iterator[Callable[[Scene], None]]:
    here, there = RunFolder(tmp_path / "here" / "run"), RunFolder(tmp_path / "there" / "run")
    accepted = Accepted(job=Job(command=("train",)), base="/", created_at=1.0, fabric="tcp", backend=KUBERNETES)
    for folder in (here, there):
        folder.path.mkdir(parents=True)
        folder.job.write_text(accepted.model_dump_json(exclude_defaults=True))
        EventWriter(folder.events).append([accepted.created("run")])
    here.token.write_text("token")

    async def whole(scene: Scene) -> None:
        asked, pods = asyncio.Event(), Pods(there)
        mirror = Mirror(here, pods, PLACE)  # pyright: ignore[reportArgumentType] - as much of a cluster as it asks

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            asked.set()
            await mirror.answer(reader, writer)

        async with await asyncio.start_unix_server(answer, sock=clients_at(here)), asyncio.timeout(WITHIN_S):
            keeping = asyncio.ensure_future(mirror.run())
            await scene(here, pods, asked)
            keeping.cancel()
            await asyncio.wait((keeping,))

    lock = take(here)
    assert lock is not None
    yield lambda scene: asyncio.run(whole(scene))
    os.close(lock)


async def takes_one_request(folder: RunFolder) -> str:
    """Be the controller's end for one request: say that it is done, and give back what was asked."""
    heard: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        writer.close()
        heard.set_result(head)

    async with await asyncio.start_unix_server(answer, sock=clients_at(folder)):
        return await heard


def test_question_waits_for_a_controller_that_comes_back(play) -> None:
    async def scene(run: RunFolder, pods: Pods, asked: asyncio.Event) -> None:
        request = asyncio.ensure_future(asyncio.to_thread(api.cancel, run))
        await asked.wait()
        taking = asyncio.ensure_future(takes_one_request(pods.there))
        await asyncio.sleep(0)  # it listens
        pods.runs = True
        await request
        head = await taking
        assert head.startswith("POST /v1/cancel ")
        # Until when it may be obeyed is on the pod's own clock, which is this machine's here.
        until = float(next(line for line in head.splitlines() if line.lower().startswith("holdfast-until")).split()[1])
        assert 0 < until - time.monotonic() <= asking.ASK_S
        assert pods.removed == []

    play(scene)


def test_what_was_heard_last_is_shown_with_its_age_while_the_cluster_is_silent(play) -> None:
    async def scene(run: RunFolder, pods: Pods, asked: asyncio.Event) -> None:
        async def until(reached: Callable[[], object]) -> None:
            while not reached():  # noqa: ASYNC110 - what a file says
                await asyncio.sleep(0.02)

        def shown(after_s: float) -> Finding | None:
            return asking.unheard(run, now=time.time() + after_s)

        pods.runs = True
        record(run, PLACE)
        await until(lambda: pods.heard and not run.silence.exists())
        assert shown(60.0) is None
        pods.silent = "connect: refused"
        await until(run.silence.exists)
        finding = shown(90.0)
        assert finding is not None
        assert finding.code == "cluster-unheard"
        assert finding.evidence == ("the cluster's API server cannot be reached, or does not work: connect: refused",)
        assert "VPN" in finding.remedy, "what can be done here"
        assert "1 min 30 s old" in finding.what
        assert shown(0.0) is None, "a moment is nothing to speak of"
        pods.silent, pods.runs = "", False
        pods.lose()
        await until(lambda: (known := silence(run)) and "does not run" in known.why)
        assert shown(90.0) is not None
        run.events.unlink()
        assert shown(90.0) is None, "what it waits for is said, and nothing has gone on yet"
        pods.runs = True
        pods.silent = ""
        await until(lambda: not run.silence.exists())

    play(scene)


def test_run_whose_namespace_is_being_deleted_is_not_said_to_go_on(play) -> None:
    async def scene(run: RunFolder, pods: Pods, asked: asyncio.Event) -> None:
        record(run, PLACE)
        pods.ends = "2026-11-22T20:00:00Z"
        while (found := asking.unheard(run, now=time.time())) is None:  # noqa: ASYNC110 - what a file says
            await asyncio.sleep(0.02)
        assert found.code == "namespace-ending"
        assert "ml is being deleted" in found.what
        assert pods.ends in found.evidence[0]
        assert "goes on" not in found.remedy

    play(scene)


@pytest.mark.parametrize("force", [False, True])
def test_run_whose_controller_stays_away_is_ended_by_force_alone(
    play, monkeypatch: pytest.MonkeyPatch, force: bool
) -> None:
    monkeypatch.setattr(asking, "ASK_S", 1.0)
    monkeypatch.setattr(asking, "ANSWER_S", WITHIN_S)

    async def scene(run: RunFolder, pods: Pods, asked: asyncio.Event) -> None:
        if force:
            await asyncio.to_thread(api.cancel, run, force=True)
            assert isinstance(last_event(run.events), RunFinished)
        else:
            with pytest.raises(HoldfastError) as silent:
                await asyncio.to_thread(api.cancel, run)
            assert silent.value.findings[0].code == "controller-silent"
        assert pods.removed[:1] == ([PLACE.owner] if force else [])

    play(scene)


def test_run_that_is_gone_before_anybody_said_so_was_cancelled(play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "ASK_S", 0.5)
    monkeypatch.setattr(asking, "ANSWER_S", 0.5)
    (gone,) = refusal(RefusedBy(404, 'jobsets.jobset.x-k8s.io "run" not found')).findings

    async def scene(run: RunFolder, pods: Pods, asked: asyncio.Event) -> None:
        pods.removing.clear()  # the cluster takes its time
        with pytest.raises(HoldfastError):
            await asyncio.to_thread(api.cancel, run, force=True)
        monkeypatch.setattr(asking, "waits_for", lambda _: gone)
        await asyncio.to_thread(api.cancel, run, force=True)
        pods.removing.set()

    play(scene)


@pytest.mark.parametrize("blind", [False, True], ids=["seen", "unseen"])
def test_controllers_replicaset_that_somebody_deletes_is_made_again(
    play, blind: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by a user who may not look at ReplicaSets; not once the run itself is being deleted."""
    monkeypatch.setattr(mirror, "AGAIN_S", 0.02)
    path = path_of(REPLICASET)

    async def scene(run: RunFolder, pods: Pods, asked: asyncio.Event) -> None:
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


def test_log_that_was_had_back_is_shown_once_a_node_knows_who_goes_on_with_it(play) -> None:
    async def scene(run: RunFolder, pods: Pods, asked: asyncio.Event) -> None:
        async def until(reached: Callable[[], object]) -> None:
            while not reached():  # noqa: ASYNC110 - what a file says
                await asyncio.sleep(0.02)

        def started(pid: int) -> ControllerStarted:
            return ControllerStarted(at=2.0, pid=pid, incarnation="c")

        def write(pid: int) -> None:
            writer = EventWriter(pods.there.events)
            writer.append([started(pid)])
            writer.close()

        write(1)
        pods.runs = True
        await until(lambda: len(read_events(run.events)) == 2)
        reader = EventReader(run.events)
        story = list(reader.read())
        # Another pod, whose folder is empty at first, and then has a log that it may not show.
        pods.lose()
        pods.there.events.rename(had := pods.there.path / "had")
        pods.runs = True
        await until(lambda: pods.heard)
        pods.there.untold.touch()
        had.rename(pods.there.events)
        write(2)
        # What is looked at after it is here, and nothing of it is.
        other = pods.there.path / "logs" / "attempt-0" / "rank-0.log"
        other.parent.mkdir(parents=True)
        other.write_text("a line\n")
        await until((run.path / "logs" / "attempt-0" / "rank-0.log").exists)
        assert read_events(run.events) == story
        pods.there.untold.unlink()
        await until(lambda: read_events(run.events) == [*story, started(2)])
        assert list(reader.read()) == [started(2)]
        # One that nobody knew of is another story, which takes the place of this one at once.
        pods.lose()
        writer_of_another = EventWriter(fresh := pods.there.path / "fresh")
        writer_of_another.append([story[0], started(3)])
        writer_of_another.close()
        fresh.rename(pods.there.events)
        pods.runs = True
        await until(lambda: read_events(run.events) == [story[0], started(3)])
        assert list(reader.read()) == [story[0], started(3)]

    play(scene)


def test_cancelled_run_is_removed_by_an_api_server_that_has_just_started(play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.launch.kubernetes.mirror.AGAIN_S", 0.01)

    async def scene(run: RunFolder, pods: Pods, asked: asyncio.Event) -> None:
        pods.refusals = [RefusedBy(403, "not yet ready to handle request")] * 2
        conclude(pods.there, Outcome.CANCELLED, "cancelled on request", 1)
        pods.runs = True
        while not pods.removed:  # noqa: ASYNC110 - the cluster's own list
            await asyncio.sleep(0.01)
        assert pods.removed == [PLACE.owner]
        assert pods.refusals == []

    play(scene)
