"""The agent's watch of RDMA counters, on a tree whose files change."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from pathlib import Path

import pytest
from tests.host.test_rdma_counters import H100_PORT, write

from holdfast.agent import rdma_watch
from holdfast.agent.rdma_traffic import Traffic, updated
from holdfast.agent.rdma_watch import POLL_S, watch_rdma
from holdfast.findings import Finding
from holdfast.host.rdma_counters import COUNTERS, HW_COUNTERS, RdmaCounterFiles

MOST_OF_A_CORE = 0.002


def h100_node(root: Path) -> None:
    counters = {f"counters/{name}": "205128687774249" for name in COUNTERS}
    counters |= {f"hw_counters/{name}": "12" for name in HW_COUNTERS}
    for number in range(8):
        write(root, f"mlx5_{number}", H100_PORT | counters | {"counters/link_downed": "2"})


def test_link_that_goes_down_is_reported(tmp_path: Path) -> None:
    h100_node(tmp_path)

    async def first() -> Finding:
        found: asyncio.Queue[Finding] = asyncio.Queue()
        watch = asyncio.ensure_future(watch_rdma("node3", found.put_nowait, root=tmp_path, poll_s=0.01))
        with (tmp_path / "sys/class/infiniband/mlx5_4/ports/1/counters/link_downed").open("r+") as file:
            for downs in itertools.cycle("3456"):  # in place: a reading never finds the file empty
                if not found.empty():
                    break
                file.seek(0)
                file.write(downs)
                file.flush()
                await asyncio.sleep(0.01)
        watch.cancel()
        return await found.get()

    found = asyncio.run(asyncio.wait_for(first(), 30.0))
    assert (found.code, found.where) == ("fabric-link-down", "node3, mlx5_4:1")


def test_driver_that_hangs_blocks_neither_the_agent_nor_its_exit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, answered = threading.Event(), threading.Event()

    def hang(_: Path) -> RdmaCounterFiles:
        asked.set()
        answered.wait()
        return RdmaCounterFiles(tmp_path)

    monkeypatch.setattr(rdma_watch, "RdmaCounterFiles", hang)

    async def go() -> None:
        watch = asyncio.ensure_future(watch_rdma("node3", print, root=tmp_path))
        assert await asyncio.to_thread(asked.wait, 30.0)
        watch.cancel()

    agent = threading.Thread(target=lambda: asyncio.run(go()), daemon=True)
    agent.start()
    agent.join(30.0)
    exited = not agent.is_alive()
    answered.set()
    assert exited


def test_node_without_devices_is_not_watched(tmp_path: Path) -> None:
    asyncio.run(asyncio.wait_for(watch_rdma("node3", print, root=tmp_path), 30.0))


def test_reading_of_eight_ports_costs_little(tmp_path: Path) -> None:
    h100_node(tmp_path)
    files, traffic = RdmaCounterFiles(tmp_path), Traffic()
    began = time.thread_time()
    polls = 20
    for poll in range(polls):
        traffic, _ = updated(traffic, files.read(POLL_S * poll), "node3")
    files.close()
    assert (time.thread_time() - began) / polls <= MOST_OF_A_CORE * POLL_S
