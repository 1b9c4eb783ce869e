"""Zygotes of a node serve the next start of its ranks, also with changed code, and a rank never waits for one."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.agent.test_zygote import CodeVersions, ProgramDir, play

from holdfast.agent.prewarm import STANDBY_REPLICA, PrewarmPool
from holdfast.agent.zygote import ColdStart, RankCommand, Zygote
from holdfast.findings import Finding
from holdfast.host.processes import adopt_orphans, state_letter

LARGE = "import numpy, httpx, holdfast.api"
"""More modules than a program has that is not worth holding."""


class PrewarmedNode:
    """A node's prewarm pool, and what it starts."""

    def __init__(self, place: ProgramDir) -> None:
        self.place = place
        self.codes = CodeVersions(place)
        self.found: list[Finding] = []
        self.ready = asyncio.Event()
        self.told: list[tuple[int, tuple[int, ...]]] = []
        """The ranks of each replica that were reported as prewarmed."""
        self.pool = PrewarmPool(place.folder, self.found.append, self._on_prewarmed)

    def _on_prewarmed(self, replica: int, ranks: tuple[int, ...]) -> None:
        self.told.append((replica, ranks))
        self.ready.set()

    def command(self, name: str, imports: str = LARGE) -> RankCommand:
        text = f"import sys\nprint('httpx' in sys.modules)\n{imports}\nimport beside\nprint(beside.NAME)"
        return self.codes.command(name, text)

    async def keep_prewarmed(self, wanted: RankCommand, replica: int = 0) -> None:
        self.ready.clear()
        self.pool.keep_prewarmed(replica, {(replica, 0): wanted})
        await self.ready.wait()

    async def start(self, wanted: RankCommand) -> str:
        """Start the rank of slot 0 warm; what it wrote. Raises Cold."""
        log = self.place.folder / "rank.log"
        with log.open("wb") as output:
            pid = await self.pool.fork((0, 0), wanted, output.fileno())
        await asyncio.to_thread(os.waitpid, pid, 0)
        return log.read_text()


def held() -> list[int]:
    """Processes of ours that hold a program, in the order of their birth.

    Neither the forks that answer what they asked, nor what ended and was left to us by a program of another test.
    """
    children = map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())
    alive = [pid for pid in children if state_letter(pid) not in "ZX"]
    return [pid for pid in alive if Path(f"/proc/{pid}/comm").read_text() == "holdfast-zygote\n"]


@pytest.fixture
def place(tmp_path: Path) -> ProgramDir:
    adopt_orphans()
    return ProgramDir(tmp_path)


@asynccontextmanager
async def node_in(place: ProgramDir) -> AsyncGenerator[PrewarmedNode]:
    node = PrewarmedNode(place)
    try:
        yield node
    finally:
        node.pool.disable("the test is over")


@pytest.mark.slow
def test_update_and_rollback_are_served_by_the_same_zygote(place: ProgramDir) -> None:
    async def scene() -> None:
        async with node_in(place) as node:
            former, latter = node.command("former"), node.command("latter")
            await node.keep_prewarmed(former)
            only = held()
            assert len(only) == 1
            await node.pool.prewarm({(0, 0): latter})
            assert await node.start(latter) == "True\nlatter\n"
            await node.keep_prewarmed(latter)
            assert await node.start(former) == "True\nformer\n"
            assert held() == only

    play(scene)


@pytest.mark.slow
def test_update_that_imports_less_gets_a_second_zygote_until_it_runs(place: ProgramDir) -> None:
    async def scene() -> None:
        async with node_in(place) as node:
            former, latter = node.command("former", f"{LARGE}, rich.table"), node.command("latter")
            await node.keep_prewarmed(former)
            await node.pool.prewarm({(0, 0): latter})
            assert len(held()) == 2
            assert await node.start(latter) == "True\nlatter\n"
            assert await node.start(former) == "True\nformer\n"
            before = held()
            await node.keep_prewarmed(latter)
            assert held() == before[1:]
            assert await node.start(latter) == "True\nlatter\n"

    play(scene)


@pytest.mark.slow
def test_update_that_imports_more_starts_immediately_and_is_prewarmed_later(place: ProgramDir) -> None:
    async def scene() -> None:
        async with node_in(place) as node:
            former, latter = node.command("former"), node.command("latter", f"{LARGE}, rich.table")
            await node.keep_prewarmed(former)
            before = held()
            await node.pool.prewarm({(0, 0): latter})
            assert held() == before
            assert await node.start(latter) == "True\nlatter\n"
            await node.keep_prewarmed(latter)
            assert len(held()) == 1
            assert held() != before

    play(scene)


@pytest.mark.slow
def test_standby_serves_code_that_came_while_it_waited(place: ProgramDir) -> None:
    async def scene() -> None:
        async with node_in(place) as node:
            former, latter = node.command("former", f"{LARGE}, rich.table"), node.command("latter")
            waiting = {(STANDBY_REPLICA, 0): former}
            await node.pool.prewarm(waiting)
            node.pool.keep_prewarmed(STANDBY_REPLICA, waiting)
            await node.pool.prewarm_standby(latter.code_dir)
            node.pool.assign_standby(0)
            assert await node.start(latter) == "True\nlatter\n"
            assert not node.ready.is_set()

    play(scene)


def test_ranks_count_as_prewarmed_no_more_once_memory_is_short(place: ProgramDir) -> None:
    async def scene() -> None:
        async with node_in(place) as node:
            wanted = node.command("former")
            await node.keep_prewarmed(wanted)
            assert node.told == [(0, (wanted.rank,))]
            node.pool.disable("memory was short")
            assert node.told[1:] == [(0, ())]
            node.pool.keep_prewarmed(0, {(0, 0): wanted})
            node.pool.disable("memory was short again")
            assert node.told[2:] == []
            assert held() == []

    play(scene)


def test_zygote_that_is_ready_after_memory_became_short_is_killed(
    place: ProgramDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = Zygote.start

    async def scene() -> None:
        async with node_in(place) as node:

            async def starts_as_memory_runs_short(*given: Any, **named: Any) -> Zygote:
                zygote = await start(*given, **named)
                node.pool.disable("memory was short")
                return zygote

            monkeypatch.setattr(Zygote, "start", starts_as_memory_runs_short)
            await node.pool.prewarm({(0, 0): node.command("former")})
            assert held() == []
            with pytest.raises(ColdStart, match="memory was short"):
                await node.start(node.command("former"))

    play(scene)


def test_start_whose_code_cannot_be_adopted_is_cold_with_the_reason(place: ProgramDir) -> None:
    async def scene() -> None:
        async with node_in(place) as node:
            await node.keep_prewarmed(node.command("former", f"{LARGE}, rich.table"))
            with pytest.raises(ColdStart):
                await node.start(node.command("latter"))
            assert [finding.what for finding in node.found] == [
                "a rank was started cold: rich.table is not imported any more where it was"
            ]

    play(scene)
