"""What a node holds for its ranks serves their next start, also with other code, and a rank never waits for it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.agent.test_held import Codes, Place, play

from holdfast.agent.held import Cold, Wanted
from holdfast.agent.warmth import STANDBY, Warmth
from holdfast.findings import Finding
from holdfast.host.processes import adopt_orphans, state_letter

LARGE = "import numpy, httpx, holdfast.api"
"""More modules than a program has that is not worth holding."""


class Node:
    """A node's warmth, and what is started with it."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.codes = Codes(place)
        self.found: list[Finding] = []
        self.ready = asyncio.Event()
        self.warmth = Warmth(place.folder, self.found.append, lambda replica, ranks: self.ready.set())

    def wanted(self, name: str, imports: str = LARGE) -> Wanted:
        text = f"import sys\nprint('httpx' in sys.modules)\n{imports}\nimport beside\nprint(beside.NAME)"
        return self.codes.wanted(name, text)

    async def keep(self, wanted: Wanted, replica: int = 0) -> None:
        self.ready.clear()
        self.warmth.keep(replica, {(replica, 0): wanted})
        await self.ready.wait()

    async def start(self, wanted: Wanted) -> str:
        """Start the rank of slot 0 warm; what it wrote. Raises Cold."""
        log = self.place.folder / "rank.log"
        with log.open("wb") as output:
            pid = await self.warmth.fork((0, 0), wanted, output.fileno())
        await asyncio.to_thread(os.waitpid, pid, 0)
        return log.read_text()


def held() -> list[int]:
    """Processes of ours that hold a program, in the order of their birth.

    Neither the forks that answer what they asked, nor what ended and was left to us by a program of another test.
    """
    children = map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())
    alive = [pid for pid in children if state_letter(pid) not in "ZX"]
    return [pid for pid in alive if Path(f"/proc/{pid}/comm").read_text() == "holdfast-warm\n"]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    adopt_orphans()
    return Place(tmp_path)


@asynccontextmanager
async def node_in(place: Place) -> AsyncGenerator[Node]:
    node = Node(place)
    try:
        yield node
    finally:
        node.warmth.give_way("the test is over")


@pytest.mark.slow
def test_update_is_served_by_what_is_held_and_so_is_the_way_back(place: Place) -> None:
    async def scene() -> None:
        async with node_in(place) as node:
            former, latter = node.wanted("former"), node.wanted("latter")
            await node.keep(former)
            only = held()
            assert len(only) == 1
            await node.warmth.prepare({(0, 0): latter})
            assert await node.start(latter) == "True\nlatter\n"
            await node.keep(latter)
            assert await node.start(former) == "True\nformer\n"
            assert held() == only

    play(scene)


def test_update_that_imports_less_is_held_beside_until_it_is_at_work(place: Place) -> None:
    async def scene() -> None:
        async with node_in(place) as node:
            former, latter = node.wanted("former", f"{LARGE}, rich.table"), node.wanted("latter")
            await node.keep(former)
            await node.warmth.prepare({(0, 0): latter})
            assert len(held()) == 2
            assert await node.start(latter) == "True\nlatter\n"
            assert await node.start(former) == "True\nformer\n"
            before = held()
            await node.keep(latter)
            assert held() == before[1:]
            assert await node.start(latter) == "True\nlatter\n"

    play(scene)


def test_update_that_imports_more_starts_at_once_and_has_all_of_it_held_later(place: Place) -> None:
    async def scene() -> None:
        async with node_in(place) as node:
            former, latter = node.wanted("former"), node.wanted("latter", f"{LARGE}, rich.table")
            await node.keep(former)
            before = held()
            await node.warmth.prepare({(0, 0): latter})
            assert held() == before
            assert await node.start(latter) == "True\nlatter\n"
            await node.keep(latter)
            assert len(held()) == 1
            assert held() != before

    play(scene)


def test_standby_serves_code_that_came_while_it_waited(place: Place) -> None:
    async def scene() -> None:
        async with node_in(place) as node:
            former, latter = node.wanted("former", f"{LARGE}, rich.table"), node.wanted("latter")
            waiting = {(STANDBY, 0): former}
            await node.warmth.prepare(waiting)
            node.warmth.keep(STANDBY, waiting)
            await node.warmth.prepare_standby(latter.code)
            node.warmth.adopt(0)
            assert await node.start(latter) == "True\nlatter\n"
            assert not node.ready.is_set()

    play(scene)


def test_start_whose_code_cannot_be_gone_over_to_is_cold_and_says_why(place: Place) -> None:
    async def scene() -> None:
        async with node_in(place) as node:
            await node.keep(node.wanted("former", f"{LARGE}, rich.table"))
            with pytest.raises(Cold):
                await node.start(node.wanted("latter"))
            assert [finding.what for finding in node.found] == [
                "a rank was started cold: rich.table is not imported any more where it was"
            ]

    play(scene)
