"""An unreachable lost node that cannot be killed exits by itself once it is back."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Self, TypeVar

import pytest
from tests.runs.conftest import leftovers_of

from holdfast import api, controller_main
from holdfast.events import AgentConnected, AnyEvent, NodeRequested, RanksStarted
from holdfast.events.log import read_events
from holdfast.job.backend import NodeId
from holdfast.job.run_spec import RunSpec
from holdfast.launch import controller_supervisor
from holdfast.launch.local.local_backend import LocalBackend
from holdfast.launch.local.run_network import RunNetwork
from holdfast.launch.new_run import write_inputs
from holdfast.run_dir import RunDir

DEADLINE_S = 90.0

E = TypeVar("E", bound=AnyEvent)


class UnreachableBackend(LocalBackend):
    """A place that can make nodes and has no way to reach those that are lost."""

    @classmethod
    def make(cls, *, folder: RunDir, accepted: RunSpec, networks: RunNetwork, url: str, **_: object) -> Self:
        return cls(folder=folder, accepted=accepted, networks=networks, url=url)

    async def replace_node(self, node_id: NodeId, reason: str) -> None:
        await self.submit((node_id,))


async def event(folder: RunDir, kind: type[E], node: int, number: int = 0) -> E:
    """A node's event of a kind, counted from 0, once the log has it."""
    while True:
        found = [
            one for one in read_events(folder.events) if isinstance(one, kind) and getattr(one, "node", -1) == node
        ]
        if len(found) > number:
            return found[number]
        await asyncio.sleep(0.02)  # the log is a file, which tells nobody


async def end_of(descriptor: int) -> None:
    """Wait for the end of a process that need not be our child."""
    loop, gone = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, gone.set)
    await gone.wait()
    loop.remove_reader(descriptor)
    os.close(descriptor)


@pytest.mark.slow
def test_agent_stopped_until_it_was_replaced_ends_its_ranks_when_it_wakes(home: Path, tmp_path: Path) -> None:
    job = api.load_job(None, command=("sleep", "3600"), nodes=2, name="far", overrides=("recovery.node_grace_s=6",))
    folder = RunDir.create("far")
    write_inputs(folder, RunSpec(job=job, base=str(tmp_path), created_at=time.time(), fabric="tcp", capacity=3))

    async def scene() -> None:
        _, beat = os.pipe()
        with controller_supervisor.listen(folder, "127.0.0.1") as (agents, clients):
            serving = asyncio.ensure_future(
                controller_main.serve(folder, agents, clients, beat, make_backend=UnreachableBackend.make)
            )
            async with asyncio.timeout(DEADLINE_S):
                (rank,) = (await event(folder, RanksStarted, node=1)).ranks
                agent = await event(folder, AgentConnected, node=1)
                ends = [os.pidfd_open(agent.pid), os.pidfd_open(rank.pid)]
                os.kill(agent.pid, signal.SIGSTOP)
                assert (await event(folder, NodeRequested, node=1, number=1)).generation == 1
                assert (await event(folder, RanksStarted, node=1, number=1)).attempt == 1
                os.kill(agent.pid, signal.SIGCONT)
                await asyncio.gather(*map(end_of, ends))
                await asyncio.to_thread(api.cancel, folder, force=True)
                await serving

    asyncio.run(scene())
    folder.control_socket.unlink()
    assert leftovers_of(folder) == []
