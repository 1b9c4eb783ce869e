"""Agents in Monarch's process meshes: whatever dies, its node is reported with the reason, and nothing is left."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from tests.waiting import until_async

from holdfast.errors import HoldfastError
from holdfast.findings import Finding
from holdfast.host.processes import all_pids, by_env, by_env_prefix
from holdfast.job.backend import BackendNodeState, NodeId, NodeObservation
from holdfast.job.run_spec import RunSpec
from holdfast.job.spec import Job, Orchestrator
from holdfast.launch.local.run_network import SharedNetwork
from holdfast.launch.monarch import monarch_link
from holdfast.launch.monarch.client_process import prestart
from holdfast.launch.monarch.monarch_backend import MonarchBackend
from holdfast.run_dir import RunDir

FIRST, SECOND = NodeId(node=0, generation=0), NodeId(node=1, generation=0)
DEADLINE_S = 200.0

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunDir]:
    """A run's folder; sockets go to a temporary folder of the test's own."""
    with tempfile.TemporaryDirectory(prefix="t") as short:
        monkeypatch.setattr(tempfile, "tempdir", short)
        run = RunDir(tmp_path / f"test-{secrets.token_hex(3)}")  # its processes are found by this name
        run.path.mkdir()
        run.token.write_text("token")
        yield run


def backend(folder: RunDir, grace_s: float = 1800.0) -> MonarchBackend:
    recovery = {"controller_grace_s": grace_s}
    job = Job.model_validate(
        {"command": "true", "nodes": 2, "orchestrator": Orchestrator.MONARCH, "recovery": recovery}
    )
    accepted = RunSpec(job=job, base=str(folder.path), created_at=0.0, fabric="tcp")
    folder.job.write_text(accepted.model_dump_json(exclude_defaults=True))
    # Nobody listens there: the agent tries again and again.
    url = "ws://127.0.0.1:1/v1/agent"
    return MonarchBackend(folder=folder, accepted=accepted, networks=SharedNetwork(), url=url)


def play(folder: RunDir, scene: Callable[[MonarchBackend], Awaitable[None]]) -> None:
    """Act a scene, then see to it that nothing is left."""

    async def act() -> None:
        here = backend(folder)
        async with asyncio.timeout(DEADLINE_S):
            try:
                await scene(here)
            finally:
                await here.cancel()

    asyncio.run(act())
    assert by_env_prefix(all_pids(), HOLDFAST_NODE=f"{folder.run_id}/") == []
    assert os.listdir(tempfile.gettempdir()) == []


def agent(folder: RunDir, node_id: NodeId) -> int:
    return json.loads((folder.node_dir(node_id.node, node_id.generation) / "agent.json").read_text())["pid"]


def mesh(folder: RunDir, node_id: NodeId) -> int:
    return json.loads((folder.node_dir(node_id.node, node_id.generation) / "mesh.json").read_text())["pid"]


def client(folder: RunDir) -> int:
    """The process that started Monarch's."""
    return min(by_env(all_pids(), HOLDFAST_NODE=f"{folder.run_id}/monarch"))


async def ended(here: MonarchBackend, *node_ids: NodeId) -> dict[NodeId, str]:
    """The ends of these nodes as they are observed."""
    found = dict[NodeId, str]()
    async for seen in here.observe():
        if isinstance(seen, NodeObservation) and seen.state is BackendNodeState.TERMINATED:
            found[seen.node_id] = seen.reason
        if found.keys() >= {*node_ids}:
            break
    return found


async def until_lost(here: MonarchBackend) -> tuple[list[NodeObservation], Finding]:
    """What is observed until the client is reported as lost."""
    seen = list[NodeObservation]()
    async for each in here.observe():
        if isinstance(each, Finding):
            return seen, each
        seen.append(each)
    raise AssertionError("observations ended")


def test_agents_are_children_of_monarch_and_each_end_is_reported_with_its_reason(folder: RunDir) -> None:
    async def scene(here: MonarchBackend) -> None:
        await here.submit((FIRST, SECOND))
        created = [await anext(here.observe()) for _ in range(2)]
        assert {(seen.node_id, seen.state) for seen in created} == {
            (FIRST, BackendNodeState.CREATED),
            (SECOND, BackendNodeState.CREATED),
        }
        for node_id in (FIRST, SECOND):
            status = Path(f"/proc/{agent(folder, node_id)}/status").read_text()
            assert f"PPid:\t{mesh(folder, node_id)}\n" in status
            environ = Path(f"/proc/{agent(folder, node_id)}/environ").read_bytes()
            assert b"HYPERACTOR_MESH" not in environ  # an agent's environment is the run's
            assert list(folder.node_dir(node_id.node, 0).glob("agent-start.json")) == []

        os.kill(agent(folder, FIRST), signal.SIGKILL)
        assert await ended(here, FIRST) == {FIRST: "its agent was ended by SIGKILL"}

        os.kill(mesh(folder, SECOND), signal.SIGKILL)
        assert await ended(here, SECOND) == {SECOND: "its Monarch process has ended"}
        assert by_env(all_pids(), HOLDFAST_NODE=f"{folder.run_id}/node1.0") == []

        again = NodeId(node=1, generation=1)
        await here.replace_node(again, "a test")
        assert mesh(folder, again) != mesh(folder, SECOND)

    play(folder, scene)


@pytest.mark.parametrize(
    ("number", "why"), [(signal.SIGKILL, "its connection has ended"), (signal.SIGSTOP, "it sent nothing for 7 s")]
)
def test_lost_client_is_reported_with_its_nodes_and_another_places_the_next(
    folder: RunDir, number: int, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monarch_link, "SILENT_S", 7.0)

    async def scene(here: MonarchBackend) -> None:
        await here.submit((FIRST,))
        os.kill(client(folder), number)
        seen, lost = await until_lost(here)
        assert lost.code == "orchestrator-lost"
        assert why in lost.what
        if not any(each.state is BackendNodeState.TERMINATED for each in seen):
            await ended(here, FIRST)
        assert by_env(all_pids(), HOLDFAST_NODE=f"{folder.run_id}/node0.0") == []
        await here.replace_node(NodeId(node=0, generation=1), "a test")
        assert (await anext(here.observe())).state is BackendNodeState.CREATED

    play(folder, scene)


def test_next_controller_finds_the_client_and_the_nodes_of_the_last(folder: RunDir) -> None:
    async def first() -> None:
        here = backend(folder)
        await here.submit((FIRST,))

    asyncio.run(first())  # the end of its loop ends the connection, as the controller's death does
    before = client(folder), agent(folder, FIRST)

    async def scene(here: MonarchBackend) -> None:
        await here.submit((FIRST, SECOND))
        assert (client(folder), agent(folder, FIRST)) == before
        os.kill(agent(folder, FIRST), signal.SIGKILL)
        assert await ended(here, FIRST) == {FIRST: "its agent was ended by SIGKILL"}

    play(folder, scene)


def test_client_without_a_controller_ends_with_all_of_monarchs_processes(folder: RunDir) -> None:
    async def act() -> None:
        here = backend(folder, grace_s=0.5)
        await here.submit((FIRST,))

    asyncio.run(act())

    async def nothing_left() -> None:
        marked = f"{folder.run_id}/"
        await until_async(lambda: by_env_prefix(all_pids(), HOLDFAST_NODE=marked) == [])

    asyncio.run(nothing_left())
    play(folder, lambda here: asyncio.sleep(0))


def test_client_that_the_supervisor_started_has_a_mesh_for_each_node(folder: RunDir) -> None:
    async def scene(here: MonarchBackend) -> None:
        prestart(folder)
        before = client(folder)
        await here.submit((FIRST, SECOND))
        assert client(folder) == before
        assert len(by_env(all_pids(), HOLDFAST_NODE=f"{folder.run_id}/monarch")) == 3  # none was started in vain
        prestart(folder)  # as a later supervisor does
        assert client(folder) == before

    play(folder, scene)


def test_client_that_cannot_start_is_reported_in_its_own_words(folder: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = folder.path / "broken"
    broken.mkdir()
    (broken / "monarch.py").write_text("raise ImportError('libcudart.so: no such file')\n")
    monkeypatch.setenv("PYTHONPATH", str(broken))

    async def scene(here: MonarchBackend) -> None:
        with pytest.raises(HoldfastError) as refused:
            await here.submit((FIRST,))
        assert refused.value.findings[0].code == "agent-not-placed"
        _, lost = await until_lost(here)
        assert lost.code == "orchestrator-lost"
        assert lost.evidence[-1] == "ImportError: libcudart.so: no such file"

    play(folder, scene)


def test_agent_that_cannot_start_is_reported_in_monarchs_words(folder: RunDir) -> None:
    folder.nodes.mkdir()
    folder.node_dir(0, 0).mkdir()
    (folder.node_dir(0, 0) / "agent.log").mkdir()  # which the agent's output should become

    async def scene(here: MonarchBackend) -> None:
        with pytest.raises(HoldfastError) as refused:
            await here.submit((FIRST,))
        finding = refused.value.findings[0]
        assert finding.code == "agent-not-placed"
        assert "IsADirectoryError" in finding.what
        (folder.node_dir(0, 0) / "agent.log").rmdir()
        await here.submit((FIRST,))
        assert agent(folder, FIRST)

    play(folder, scene)
