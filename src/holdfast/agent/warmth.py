"""Owns which of a node's ranks have their imports done before they are started, and says why others have not.

Programs are held once an attempt is at work, one after another, so that the first start is not slower for it. None of
this ever keeps a rank from being started: what cannot be warm is cold.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.agent.held import Cold, Held, Small, UnfitModule, Wanted
from holdfast.agent.program import program
from holdfast.findings import Finding, Severity, of_replica

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
    """What is held for one slot: one program, and another while code is on its way that the one cannot run."""

    held: list[Held] = field(default_factory=list[Held])
    why_not: str = "its imports were not done yet"

    async def fit(self, wanted: Wanted) -> Held | None:
        """The one that can be forked as this rank."""
        for each in self.held:
            await each.ask(wanted)
            if not (why := each.differs(wanted)):
                return each
            self.why_not = why
        return None

    def leave_all(self, but: Held | None = None) -> None:
        """End what is held."""
        for each in self.held:
            if each is not but:
                each.end()
        self.held = [] if but is None else [but]


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
        self._places: dict[Slot, _Place] = {}
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
        place = self._places.get(slot)
        if place is None:
            raise Cold("it is the first start")
        try:
            held = await place.fit(wanted)
            if held is None:
                raise Cold(place.why_not)
            return await held.fork(wanted, log)
        except Cold as cold:
            self._say(f"rank {wanted.rank}{of_replica(slot[0])}", str(cold))
            raise

    def keep(self, replica: int, wanted: Mapping[Slot, Wanted]) -> None:
        """Have these programs of a replica, or of a standby, held from now on."""
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
        if (keeper := self._keepers.pop(STANDBY, None)) is not None:
            keeper.cancel()
        self._wanted.pop(STANDBY, None)
        for _, number in [slot for slot in self._places if slot[0] == STANDBY]:
            self._places[replica, number] = self._places.pop((STANDBY, number))

    def give_way(self, why: str) -> None:
        """End every held program for good: what only waits goes first."""
        self._barred = why
        for keeper in self._keepers.values():
            keeper.cancel()
        for place in self._places.values():
            place.leave_all()
            place.why_not = why

    async def prepare(self, wanted: Mapping[Slot, Wanted]) -> None:
        """Have these programs held beside those that are: ranks are to be started as them soon."""
        for slot, each in wanted.items():
            async with self._turn:
                place = self._places.setdefault(slot, _Place())
                if not self._barred and await place.fit(each) is None:
                    await self._hold(slot, place, each)

    async def prepare_standby(self, code: Path) -> None:
        """Have what a standby holds held with other code, beside."""
        await self.prepare({slot: each.with_code(code) for slot, each in self._wanted.get(STANDBY, {}).items()})

    async def _keep(self, replica: int, wanted: Mapping[Slot, Wanted]) -> None:
        """Hold these and nothing else; again when one of them has died, which none does by itself."""
        while self._deaths <= MOST_DEATHS:
            held: dict[Slot, Held] = {}
            for slot, each in wanted.items():
                async with self._turn:
                    place = self._places.setdefault(slot, _Place())
                    fit = await place.fit(each)
                    if fit is None or fit.lacks(each):
                        fit = await self._hold(slot, place, each) or fit
                    place.leave_all(but=fit)
                if fit is not None:
                    held[slot] = fit
            if not held:
                return
            if replica != STANDBY:
                self._ready(replica, tuple(wanted[slot].rank for slot in held))
            ends = [asyncio.ensure_future(each.ended()) for each in held.values()]
            try:
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for each in ends:
                    each.cancel()
            self._deaths += 1

    async def _hold(self, slot: Slot, place: _Place, wanted: Wanted) -> Held | None:
        try:
            held = await self._begin(slot, wanted)
        except Cold as cold:
            place.why_not = "" if isinstance(cold, Small) else str(cold)
            log.info("replica %s, slot %s is not held: %s", *slot, cold)
            return None
        place.held.append(held)
        return held

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

    def _say(self, who: str, why: str) -> None:
        if not why or why in self._said:
            return
        self._said.add(why)
        self._find(
            Finding(
                code="started-cold",
                severity=Severity.INFO,
                what=f"a rank was started cold: {why}",
                where=who,
                remedy="Nothing need be done; a warm start saves a restart the time of the program's imports.",
            )
        )
