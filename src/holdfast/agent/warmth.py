"""Owns which of a node's ranks have their imports done before they are started, and says why others have not.

Programs are held once an attempt is at work, one after another, so that the first start is not slower for it. None of
this ever keeps a rank from being started: what cannot be warm is cold.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from holdfast.agent.held import Cold, Held, Small, UnfitModule, Wanted
from holdfast.agent.program import program
from holdfast.findings import Finding, Severity

log = logging.getLogger("holdfast.agent")

MOST_WITHOUT = 4
"""Modules that are left out because they must not be imported beforehand; a program with more of them is cold."""

MOST_DEATHS = 3
"""Held processes of a node that are replaced when they have died; more would be a reason of the node's own."""

Slot = tuple[int, int]
"""Replica, and which of its ranks on this node."""

STANDBY = -1
"""In place of a replica, as long as a node has none."""


@dataclass
class _Place:
    """What is known of one slot."""

    held: Held | None = None
    why_not: str = "its imports were not done yet"

    def leave(self, why: str) -> None:
        """End what is held."""
        if self.held is not None:
            self.held.end()
        self.held, self.why_not = None, why


class Warmth:
    """The held programs of one node; `find` takes what is to be said, `ready` the ranks of a replica that are held."""

    def __init__(
        self, folder: Path, find: Callable[[Finding], object], ready: Callable[[int, tuple[int, ...]], object]
    ) -> None:
        self._folder = folder
        self._find = find
        self._ready = ready
        self._barred = ""
        """Why nothing is held any more."""
        self._places: dict[tuple[Slot, Path], _Place] = {}
        """By slot and folder: while an update is on its way a slot has two."""
        self._wanted: dict[int, Mapping[Slot, Wanted]] = {}
        self._keepers: dict[int, asyncio.Task[None]] = {}
        """One a replica."""
        self._turn = asyncio.Lock()
        self._said: set[str] = set()
        self._deaths = 0

    async def fork(self, slot: Slot, wanted: Wanted, log: int) -> int:
        """Start a rank as a fork of its held program; its number. Raises Cold, which is said once, where there is none.

        The first start of a slot has nothing to be warm with, which is not worth a word.
        """
        place = self._places.get((slot, wanted.cwd))
        if place is None and any(other == slot for other, _ in self._places):
            place = _Place(why_not="its code lies in another folder than before")
        if place is None:
            raise Cold("it is the first start")
        try:
            if place.held is None:
                raise Cold(place.why_not)
            if why := place.held.differs(wanted):
                place.leave(why)
                raise Cold(why)
            return await place.held.fork(wanted, log)
        except Cold as cold:
            self._say(wanted.rank, str(cold))
            raise

    def keep(self, replica: int, wanted: Mapping[Slot, Wanted]) -> None:
        """Have these programs of a replica held from now on."""
        if self._barred:
            return
        keeper, before = self._keepers.get(replica), self._wanted.get(replica, {})
        alike = before.keys() == wanted.keys() and not any(wanted[slot].differs(before[slot]) for slot in wanted)
        if keeper is not None and not keeper.done():
            if alike:
                return
            keeper.cancel()
        self._wanted[replica] = wanted
        self._keepers[replica] = asyncio.ensure_future(self._keep(replica, wanted))

    def adopt(self, replica: int) -> None:
        """What was held by a standby is this replica's from now on."""
        for slot, cwd in [(slot, cwd) for slot, cwd in self._places if slot[0] == STANDBY]:
            self._places[(replica, slot[1]), cwd] = self._places.pop((slot, cwd))

    def give_way(self, why: str) -> None:
        """End every held program for good: what only waits goes first."""
        self._barred = why
        for keeper in self._keepers.values():
            keeper.cancel()
        for place in self._places.values():
            place.leave(why)

    async def prepare(self, wanted: Mapping[Slot, Wanted]) -> None:
        """Have these programs held beside those that are: ranks are to be started as them soon."""
        for slot, each in wanted.items():
            if not self._barred:
                async with self._turn:
                    await self._hold(slot, self._places.setdefault((slot, each.cwd), _Place()), each)

    async def _keep(self, replica: int, wanted: Mapping[Slot, Wanted]) -> None:
        """Hold what is not held; again when one of them has died, which none does by itself."""
        places = {slot: self._places.setdefault((slot, each.cwd), _Place()) for slot, each in wanted.items()}
        for slot, cwd in list(self._places):
            if slot in wanted and cwd != wanted[slot].cwd:
                self._places.pop((slot, cwd)).leave("it runs other code by now")
        while self._deaths <= MOST_DEATHS:
            for slot, place in places.items():
                async with self._turn:
                    await self._hold(slot, place, wanted[slot])
            held = {slot: place.held for slot, place in places.items() if place.held is not None}
            if not held:
                return
            self._ready(replica, tuple(wanted[slot].rank for slot in held))
            ends = [asyncio.ensure_future(each.ended()) for each in held.values()]
            try:
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for each in ends:
                    each.cancel()
            self._deaths += 1

    async def _hold(self, slot: Slot, place: _Place, wanted: Wanted) -> None:
        if place.held is not None and (why := place.held.differs(wanted)):
            place.leave(why)
        if place.held is not None:
            return
        try:
            place.held = await self._begin(slot, wanted)
        except Cold as cold:
            place.why_not = "" if isinstance(cold, Small) else str(cold)
            log.info("replica %s, slot %s is not held: %s", *slot, cold)

    async def _begin(self, slot: Slot, wanted: Wanted) -> Held:
        found = program(wanted.argv)
        if isinstance(found, str):
            raise Cold(found)
        without: set[str] = set()
        path = self._folder / f"warm-{slot[0]}-{slot[1]}.log"
        while True:
            try:
                return await Held.begin(found, wanted, path, without=without)
            except UnfitModule as unfit:
                if len(without) == MOST_WITHOUT:
                    raise
                log.info("%s", unfit)
                without.add(unfit.module)

    def _say(self, rank: int, why: str) -> None:
        if not why or why in self._said:
            return
        self._said.add(why)
        self._find(
            Finding(
                code="started-cold",
                severity=Severity.INFO,
                what=f"rank {rank} was started cold: {why}",
                where=f"rank {rank}",
                remedy="Nothing need be done; a warm start saves a restart the time of the program's imports.",
            )
        )
