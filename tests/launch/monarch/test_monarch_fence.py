"""What the controller does about Monarch's processes without a Monarch client."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.waiting import until_async

from holdfast.errors import HoldfastError
from holdfast.host.processes import all_pids, by_env, identify
from holdfast.job.backend import NodeId
from holdfast.job.run_spec import RunSpec
from holdfast.job.spec import Job, Orchestrator
from holdfast.launch.local.node_processes import node_mark
from holdfast.launch.local.run_network import SharedNetwork
from holdfast.launch.monarch.client_process import LOG_NAME, client_folder
from holdfast.launch.monarch.monarch_backend import MonarchBackend
from holdfast.launch.monarch.monarch_link import MonarchLink
from holdfast.launch.monarch.monarch_messages import MESH_RECORD_NAME, AgentPlacement
from holdfast.run_dir import AGENT_RECORD_NAME, RunDir

NODE = NodeId(node=0, generation=0)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunDir]:
    """A run's folder; sockets go to a temporary folder of the test's own."""
    with tempfile.TemporaryDirectory(prefix="t") as short:
        monkeypatch.setattr(tempfile, "tempdir", short)
        run = RunDir(tmp_path / f"test-{secrets.token_hex(3)}")  # its processes are found by this name
        run.path.mkdir()
        yield run


def test_node_is_fenced_whose_mesh_process_ended_and_whose_pid_another_process_has(folder: RunDir) -> None:
    job = Job.model_validate({"command": "true", "orchestrator": Orchestrator.MONARCH})
    accepted = RunSpec(job=job, base=str(folder.path), created_at=0.0, fabric="tcp")
    mark = node_mark(folder.run_id, NODE)
    agent = subprocess.Popen(["sleep", "1000"], env={**os.environ, "HOLDFAST_NODE": mark})
    node_folder = folder.node_dir(NODE.node, NODE.generation)
    node_folder.mkdir(parents=True)
    running = identify(agent.pid)
    assert running is not None
    # A mesh process of this process's pid, which started at another time.
    for name, record in (
        (AGENT_RECORD_NAME, {"pid": running.pid, "started": running.started}),
        (MESH_RECORD_NAME, {"pid": os.getpid(), "started": 1}),
    ):
        (node_folder / name).write_text(json.dumps(record))

    async def find_node() -> None:
        backend = MonarchBackend(folder=folder, accepted=accepted, networks=SharedNetwork(), url="ws://127.0.0.1:1")
        await backend.submit((NODE,))
        await until_async(lambda: by_env(all_pids(), HOLDFAST_NODE=mark) == [])

    try:
        asyncio.run(find_node())
    finally:
        agent.kill()
        agent.wait()


def test_agent_that_is_requested_after_the_end_fails_at_once(folder: RunDir) -> None:
    async def place_late() -> None:
        link = MonarchLink(folder, on_message=print, on_lost=print)
        link.start()
        await link.close()
        with pytest.raises(HoldfastError, match="the run ends"):
            await link.place(NODE, AgentPlacement(order="order"))

    asyncio.run(place_late())
    assert not client_folder(folder).exists()


def test_agent_is_refused_at_once_if_no_client_starts(folder: RunDir) -> None:
    (client_folder(folder) / LOG_NAME).mkdir(parents=True)  # which the client's output should become

    async def place() -> None:
        link = MonarchLink(folder, on_message=print, on_lost=print)
        try:
            with pytest.raises(HoldfastError, match="its client has ended"):
                await link.place(NODE, AgentPlacement(order="order"))
        finally:
            await link.close()

    asyncio.run(place())
