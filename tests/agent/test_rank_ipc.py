"""The agent's end of a rank's socket: every message arrives, however little CPU the agent gets."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import pytest

from holdfast.agent import rank_ipc
from holdfast.agent.rank_ipc import MAX_LINE_BYTES, RankServer
from holdfast.agent.rate_limits import DROPPED_MESSAGE_BYTES, DropReason, RateLimit
from holdfast.protocol.rank_messages import Hello, RankStep, RankToAgent, encode


class RecordingHandler:
    """Keeps what a channel's ranks send."""

    def __init__(self) -> None:
        self.received: list[RankToAgent] = []
        self.dropped: list[DropReason] = []
        self.metrics: dict[str, str] = {}
        self.changed = asyncio.Event()

    def on_message(self, rank: int, message: RankToAgent, dropped: Mapping[str, str]) -> None:
        self.received.append(message)
        self.metrics |= dropped
        self.changed.set()

    def on_close(self, rank: int) -> None:
        self.changed.set()

    def on_drop(self, rank: int, reason: DropReason, sample: str) -> None:
        self.dropped.append(reason)
        self.changed.set()


WITHIN_S = 0.01
DEADLINE_S = 200.0
SAID = (Hello(rank=0, pid=1), *(RankStep(step=step, started=0.0, ended=1.0) for step in range(1, 200)))


async def drain_slowly(channel: RankServer) -> None:
    """Hear a rank out in a process that gets so little of a CPU that its time is up before it has looked once."""
    loop, out = asyncio.get_running_loop(), asyncio.ensure_future(channel.drain(WITHIN_S))

    def wait_for_a_cpu() -> None:
        time.sleep(2 * WITHIN_S)
        if not out.done():
            loop.call_soon(wait_for_a_cpu)

    loop.call_soon(wait_for_a_cpu)
    await out


def received_from(*, connected_before: bool, kept_by_a_child: bool) -> list[RankToAgent]:
    """What arrives from a rank that sends a hello and a step, and exits immediately."""
    listening = RecordingHandler()
    in_time: list[RankToAgent] = []

    async def scene(path: Path) -> None:
        channel = RankServer(listening)
        await channel.open(path)
        rank = socket.socket(socket.AF_UNIX)
        rank.connect(str(path))
        if connected_before:
            while not channel.open_connections:  # noqa: ASYNC110 - a connection tells nobody
                await asyncio.sleep(0)
        rank.sendall(b"".join(encode(word) + b"\n" for word in SAID))
        child = os.dup(rank.fileno())
        rank.close()
        if not kept_by_a_child:
            os.close(child)
        await drain_slowly(channel)
        in_time.extend(listening.received)
        if kept_by_a_child:
            os.close(child)
        channel.close()

    with tempfile.TemporaryDirectory(prefix="holdfast-") as folder:
        asyncio.run(scene(Path(folder, "socket")))
    return in_time


def test_last_messages_of_a_rank_reach_an_agent_without_a_cpu() -> None:
    for connected_before in (False, True):
        for kept_by_a_child in (False, True):
            heard = received_from(connected_before=connected_before, kept_by_a_child=kept_by_a_child)
            assert msgspec.json.encode(heard) == msgspec.json.encode(SAID), (connected_before, kept_by_a_child)


def fed(*parts: bytes, world_size: int = 2**31, until: Callable[[RecordingHandler], bool]) -> RecordingHandler:
    """What a channel makes of these parts, sent one after the other, once something holds of it."""
    listening = RecordingHandler()

    async def scene(path: Path) -> None:
        channel = RankServer(listening, world_size=world_size)
        await channel.open(path)
        _, writer = await asyncio.open_unix_connection(path)
        for part in parts:
            writer.write(part)
        async with asyncio.timeout(DEADLINE_S):
            while not until(listening):
                listening.changed.clear()
                await listening.changed.wait()
        writer.close()
        channel.close()

    with tempfile.TemporaryDirectory(prefix="holdfast-") as folder:
        asyncio.run(scene(Path(folder, "socket")))
    return listening


HELLO = encode(Hello(rank=0, pid=1)) + b"\n"
STEP = encode(RankStep(step=7, started=0.0, ended=1.0)) + b"\n"


def test_too_long_line_is_skipped_and_the_next_ones_are_read() -> None:
    endless = b"x" * (3 * MAX_LINE_BYTES + 5)
    got = fed(HELLO, endless, endless + b"\n" + STEP, until=lambda said: len(said.received) == 2)
    assert got.dropped == [DropReason.TOO_LONG]
    assert isinstance(got.received[1], RankStep)


def test_foreign_ranks_and_a_second_rank_on_a_connection_are_dropped() -> None:
    others = (encode(Hello(rank=rank, pid=1)) + b"\n" for rank in (4, 1))
    got = fed(
        *others, encode(Hello(rank=2, pid=1)) + b"\n", STEP, world_size=4, until=lambda said: len(said.received) == 2
    )
    assert got.dropped == [DropReason.ANOTHER_RANK] * 2
    assert got.received[0] == Hello(rank=1, pid=1)


def test_flood_of_garbage_is_read_slowly_and_costs_the_agent_no_more_than_it_allows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rank_ipc, "READ_LIMIT", RateLimit(burst=64 * DROPPED_MESSAGE_BYTES, per_s=1.0))
    line = b"garbage\n" * 32
    listening = RecordingHandler()

    async def scene(path: Path) -> None:
        channel = RankServer(listening)
        await channel.open(path)
        _, writer = await asyncio.open_unix_connection(path)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                while True:
                    writer.write(line)
                    await writer.drain()  # waits once the agent reads no more
        writer.transport.abort()
        channel.close()

    with tempfile.TemporaryDirectory(prefix="holdfast-") as folder:
        asyncio.run(scene(Path(folder, "socket")))
    assert 32 <= len(listening.dropped) < 100_000
