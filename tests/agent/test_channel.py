"""The agent's end of a rank's socket: what a rank said is heard, however little of a CPU the agent gets."""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
import time
from pathlib import Path

import msgspec

from holdfast.agent.channel import RankChannel
from holdfast.events.rank import Hello, RankToAgent, Step, encode

WITHIN_S = 0.01
SAID = (Hello(rank=0, pid=1), *(Step(step=step, started=0.0, ended=1.0) for step in range(1, 200)))


async def hear_out_slowly(channel: RankChannel) -> None:
    """Hear a rank out in a process that gets so little of a CPU that its time is up before it has looked once."""
    loop, out = asyncio.get_running_loop(), asyncio.ensure_future(channel.hear_out(WITHIN_S))

    def wait_for_a_cpu() -> None:
        time.sleep(2 * WITHIN_S)
        if not out.done():
            loop.call_soon(wait_for_a_cpu)

    loop.call_soon(wait_for_a_cpu)
    await out


def heard_of(*, connected_before: bool, kept_by_a_child: bool) -> list[RankToAgent]:
    """What is heard of a rank that says hello and a step, and ends at once."""
    heard: list[RankToAgent] = []
    in_time: list[RankToAgent] = []

    async def scene(path: Path) -> None:
        channel = RankChannel(path, lambda _, message: heard.append(message), lambda _: None)
        await channel.open()
        rank = socket.socket(socket.AF_UNIX)
        rank.connect(str(path))
        if connected_before:
            while not channel.serving:  # noqa: ASYNC110 - a connection tells nobody
                await asyncio.sleep(0)
        rank.sendall(b"".join(encode(word) + b"\n" for word in SAID))
        child = os.dup(rank.fileno())
        rank.close()
        if not kept_by_a_child:
            os.close(child)
        await hear_out_slowly(channel)
        in_time.extend(heard)
        if kept_by_a_child:
            os.close(child)
        channel.close()

    with tempfile.TemporaryDirectory(prefix="holdfast-") as folder:
        asyncio.run(scene(Path(folder, "socket")))
    return in_time


def test_last_words_of_a_rank_are_heard_by_an_agent_that_waits_for_a_cpu() -> None:
    for connected_before in (False, True):
        for kept_by_a_child in (False, True):
            heard = heard_of(connected_before=connected_before, kept_by_a_child=kept_by_a_child)
            assert msgspec.json.encode(heard) == msgspec.json.encode(SAID), (connected_before, kept_by_a_child)
