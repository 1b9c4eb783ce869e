"""The store that the ranks of a replica meet at costs nothing until one of them connects."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from holdfast.agent.tcp_store_host import TcpStoreHost
from holdfast.agent.zygote import RankCommand

WAIT_S = 100.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.mark.slow
def test_store_is_hosted_anew_for_each_attempt_once_a_rank_connects(tmp_path: Path) -> None:
    rank = RankCommand(rank=0, argv=(sys.executable, "train.py"), cwd=tmp_path, environ=os.environ)
    stores = TcpStoreHost()

    def client(port: int) -> TCPStore:
        return TCPStore("localhost", port, timeout=timedelta(seconds=WAIT_S))

    async def scene() -> None:
        for attempt in range(2):
            port = free_port()
            serving = asyncio.ensure_future(stores.serve(0, port, rank, tmp_path / "store.log"))
            await asyncio.sleep(0)  # it listens from its first step on
            assert stores.started is (attempt > 0)
            store = await asyncio.wait_for(asyncio.to_thread(client, port), WAIT_S)
            assert await asyncio.wait_for(serving, WAIT_S) is None
            assert stores.started
            assert not store.check(["attempt"])
            store.set("attempt", str(attempt))
            assert store.get("attempt") == str(attempt).encode()
            stores.close(0)
        await stores.stop()

    asyncio.run(scene())


def test_port_of_an_unused_store_is_free_after_the_attempt(tmp_path: Path) -> None:
    rank = RankCommand(rank=0, argv=(sys.executable, "train.py"), cwd=tmp_path, environ=os.environ)
    port = free_port()

    async def scene() -> None:
        stores = TcpStoreHost()
        serving = asyncio.ensure_future(stores.serve(0, port, rank, tmp_path / "store.log"))
        await asyncio.sleep(0)
        other = await stores.serve(1, port, rank, tmp_path / "other.log")
        assert other is not None
        assert (other.code, "in use" in other.evidence[0]) == ("tcp-store-not-hosted", True)
        serving.cancel()
        await asyncio.wait([serving])
        stores.close(0)
        assert not stores.started
        socket.create_server(("127.0.0.1", port)).close()

    asyncio.run(scene())
