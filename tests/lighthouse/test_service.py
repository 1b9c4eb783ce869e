"""The service with TorchFT's own client: no replica waits for one that the controller reports lost."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import until_async
from torchft.coordination import LighthouseClient

from holdfast.lighthouse import lighthouse_supervisor
from holdfast.lighthouse.lighthouse_supervisor import LighthouseSupervisor
from holdfast.lighthouse.service import Lighthouse, listen

PATIENCE = timedelta(seconds=60)


@asynccontextmanager
async def serving(*, min_replicas: int = 1) -> AsyncIterator[tuple[Lighthouse, Callable[..., Awaitable[Any]]]]:
    lighthouse = Lighthouse(min_replicas=min_replicas)
    server, port = await listen(lighthouse, "127.0.0.1:0")
    watch = asyncio.ensure_future(lighthouse.tick_loop())

    async def ask(name: str, *, step: int = 3, store: str = "") -> Any:
        def asking() -> Any:
            client = LighthouseClient(addr=f"http://127.0.0.1:{port}", connect_timeout=PATIENCE)
            return client.quorum(name, PATIENCE, "address", store, step, 1, False)

        return await asyncio.to_thread(asking)

    yield lighthouse, ask
    watch.cancel()
    await server.stop(None)


def members(quorum: Any) -> list[tuple[str, int]]:
    return [(one.replica_id, one.step) for one in quorum.participants]


def test_lost_replica_is_not_waited_for_and_its_successor_is_taken_in() -> None:
    async def check() -> None:
        async with serving() as (lighthouse, ask):
            lighthouse.update_liveness({0: "a:1", 1: "b:1"})
            first, same = await asyncio.gather(ask("0:x"), ask("1:y"))
            assert members(first) == members(same) == [("0:x", 3), ("1:y", 3)]
            alone = asyncio.ensure_future(ask("0:x", step=4))
            await until_async(lambda: "0:x" in lighthouse._requests)
            lighthouse.update_liveness({0: "a:1", 1: ""})
            shrunk = await alone
            assert members(shrunk) == [("0:x", 4)]
            assert shrunk.quorum_id > first.quorum_id
            with pytest.raises(RuntimeError):
                await ask("1:y")  # it is stopped, and may not know it yet
            lighthouse.update_liveness({0: "a:1", 1: "b:2"})
            joiner = asyncio.ensure_future(ask("1:z", step=0))
            await until_async(lambda: "1:z" in lighthouse._requests)
            both = await ask("0:x", step=5)
            assert members(both) == members(await joiner) == [("0:x", 5), ("1:z", 0)]

    asyncio.run(check())


def test_attempt_is_known_by_its_store_where_its_name_says_nothing() -> None:
    async def check() -> None:
        async with serving() as (lighthouse, ask):
            lighthouse.update_liveness({0: "a:1", 1: "b:1"})
            await asyncio.gather(ask("x", store="a:1"), ask("y", store="b:1"))
            alone = asyncio.ensure_future(ask("x", store="a:1"))
            await until_async(lambda: "x" in lighthouse._requests)
            lighthouse.update_liveness({0: "a:1", 1: ""})
            assert members(await alone) == [("x", 3)]
            with pytest.raises(RuntimeError):
                await ask("late", store="b:1")

    asyncio.run(check())


def test_supervisor_restarts_the_service_at_its_port_with_its_state(tmp_path: Path) -> None:
    async def check() -> None:
        supervisor = LighthouseSupervisor(
            tmp_path, host="127.0.0.1", public_host="127.0.0.1", min_replicas=1, grace_s=60.0
        )
        supervisor.publish_liveness({0: "a:1"})
        run = asyncio.ensure_future(supervisor.run())
        await asyncio.wait_for(supervisor.wait_address(), 120)
        url, process = supervisor.url, supervisor._process
        assert process is not None
        record = (tmp_path / "lighthouse.port").stat().st_ino
        process.kill()
        await until_async(lambda: supervisor._process is not process and supervisor._writer is not None)
        assert supervisor.url == url
        client = LighthouseClient(addr=url, connect_timeout=PATIENCE)
        quorum = await asyncio.to_thread(client.quorum, "0:x", PATIENCE, "address", "a:1", 3, 1, False)
        assert members(quorum) == [("0:x", 3)]
        run.cancel()
        await supervisor.stop()
        assert supervisor._process is not None
        assert await asyncio.to_thread(supervisor._process.wait, 60) == 0
        assert json.loads((tmp_path / "lighthouse.port").read_text()) == int(url.rpartition(":")[2])
        assert (tmp_path / "lighthouse.port").stat().st_ino != record, "half of it is there if this process is killed"

    asyncio.run(check())


def test_service_that_does_not_answer_is_replaced_at_its_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lighthouse_supervisor, "HEARTBEAT_S", 0.05)

    async def check() -> None:
        supervisor = LighthouseSupervisor(
            tmp_path, host="127.0.0.1", public_host="127.0.0.1", min_replicas=1, grace_s=60.0
        )
        run = asyncio.ensure_future(supervisor.run())
        await asyncio.wait_for(supervisor.wait_address(), 120)
        url, stopped = supervisor.url, supervisor.pid
        os.kill(stopped, signal.SIGSTOP)
        await until_async(lambda: supervisor.pid not in (0, stopped))
        assert supervisor.url == url
        run.cancel()
        await supervisor.stop()
        assert supervisor._process is not None
        assert await asyncio.to_thread(supervisor._process.wait, 60) == 0

    asyncio.run(check())


def test_service_that_was_stopped_before_its_controller_was_replaced_is_replaced_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lighthouse_supervisor, "HEARTBEAT_S", 0.05)

    async def check() -> None:
        former = LighthouseSupervisor(tmp_path, host="127.0.0.1", public_host="127.0.0.1", min_replicas=1, grace_s=60.0)
        run = asyncio.ensure_future(former.run())
        await asyncio.wait_for(former.wait_address(), 120)
        url, stopped = former.url, former.pid
        os.kill(stopped, signal.SIGSTOP)
        run.cancel()
        await asyncio.wait([run])
        supervisor = LighthouseSupervisor(
            tmp_path, host="127.0.0.1", public_host="127.0.0.1", min_replicas=1, grace_s=60.0
        )
        run = asyncio.ensure_future(supervisor.run())
        await until_async(lambda: supervisor._writer is not None and supervisor.pid not in (0, stopped))
        assert supervisor.url == url
        run.cancel()
        await supervisor.stop()
        for ended in (former, supervisor):
            assert ended._process is not None
            await asyncio.to_thread(ended._process.wait, 60)

    asyncio.run(check())
