"""Decides which ranks of a node are prewarmed, and reports why others start cold.

Zygotes start one after another once an attempt is running, so that the first start is not slower. A failure never
prevents a rank from starting: without a zygote it starts cold.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from msgspec import Struct, field

from holdfast.agent.python_command import parse_python_command
from holdfast.agent.zygote import ColdStart, NotWorthPrewarming, RankCommand, UnsafeModule, Zygote
from holdfast.findings import Finding, Severity, replica_suffix

log = logging.getLogger("holdfast.agent")

MAX_SKIPPED_MODULES = 4
"""Most modules excluded because they are unsafe to import in advance; a program with more of them starts cold."""

MAX_ZYGOTE_DEATHS = 3
"""Most zygotes of a node that are replaced after they have died; more deaths would have a cause on the node."""

RankSlot = tuple[int, int]
"""Replica, and the rank's index on this node."""

STANDBY_REPLICA = -1
"""Stands for the replica while a node has none."""


class _SlotZygotes(Struct):
    """The zygotes of one slot: one, and a second while new code is being rolled out that the first cannot run."""

    zygotes: list[Zygote] = field(default_factory=list[Zygote])
    cold_reason: str = "its imports were not done yet"

    async def match(self, command: RankCommand) -> Zygote | None:
        """The zygote that can fork this rank."""
        for each in self.zygotes:
            await each.check_code(command)
            if not (reason := each.mismatch(command)):
                return each
            self.cold_reason = reason
        return None

    def kill_all(self, keep: Zygote | None = None) -> None:
        """Kill all zygotes but `keep`."""
        for each in self.zygotes:
            if each is not keep:
                each.kill()
        self.zygotes = [] if keep is None else [keep]


class PrewarmPool:
    """The zygotes of one node; `on_prewarmed` receives the ranks of a replica that have one, perhaps none any more."""

    def __init__(
        self,
        folder: Path,
        report_finding: Callable[[Finding], object],
        on_prewarmed: Callable[[int, tuple[int, ...]], object],
    ) -> None:
        self._folder = folder
        self._report_finding = report_finding
        self._on_prewarmed = on_prewarmed
        self._disabled_reason = ""
        """Why prewarming is off."""
        self._slots: dict[RankSlot, _SlotZygotes] = {}
        self._commands: dict[int, Mapping[RankSlot, RankCommand]] = {}
        self._prewarmed: dict[int, tuple[int, ...]] = {}
        """The ranks of each replica that were reported last."""
        self._tasks: dict[int, asyncio.Task[None]] = {}
        """Keyed by replica."""
        self._lock = asyncio.Lock()
        self._reported: set[str] = set()
        self._deaths = 0

    async def fork(self, slot: RankSlot, command: RankCommand, log: int) -> int:
        """Start a rank as a fork of its zygote; return its pid. Raise ColdStart, reported once, if there is no zygote.

        The first start of a slot is always cold and is not reported.
        """
        zygotes = self._slots.get(slot)
        if zygotes is None:
            raise ColdStart("it is the first start")
        try:
            zygote = await zygotes.match(command)
            if zygote is None:
                raise ColdStart(zygotes.cold_reason)
            return await zygote.fork(command, log)
        except ColdStart as cold:
            self._report_cold_start(f"rank {command.rank}{replica_suffix(slot[0])}", str(cold))
            raise

    def keep_prewarmed(self, replica: int, commands: Mapping[RankSlot, RankCommand]) -> None:
        """Keep zygotes for these programs of a replica, or of a standby, from now on."""
        if self._disabled_reason:
            return
        task, before = self._tasks.get(replica), self._commands.get(replica, {})
        alike = before.keys() == commands.keys() and not any(commands[slot].mismatch(before[slot]) for slot in commands)
        if task is not None and not task.done():
            if alike:
                return
            task.cancel()
        self._commands[replica] = commands
        self._tasks[replica] = asyncio.ensure_future(self._maintain(replica, commands))

    def assign_standby(self, replica: int) -> None:
        """Assign the standby's zygotes to this replica."""
        if (task := self._tasks.pop(STANDBY_REPLICA, None)) is not None:
            task.cancel()
        self._commands.pop(STANDBY_REPLICA, None)
        for _, number in [slot for slot in self._slots if slot[0] == STANDBY_REPLICA]:
            self._slots[replica, number] = self._slots.pop((STANDBY_REPLICA, number))

    def disable(self, reason: str) -> None:
        """Kill all zygotes for good: idle processes go first."""
        self._disabled_reason = reason
        for task in self._tasks.values():
            task.cancel()
        for zygotes in self._slots.values():
            zygotes.kill_all()
            zygotes.cold_reason = reason
        for replica in tuple(self._prewarmed):
            self._report_prewarmed(replica, ())

    async def prewarm(self, commands: Mapping[RankSlot, RankCommand]) -> None:
        """Start zygotes for these programs, which ranks will run soon, and keep the existing ones."""
        for slot, each in commands.items():
            async with self._lock:
                zygotes = self._slots.setdefault(slot, _SlotZygotes())
                if not self._disabled_reason and await zygotes.match(each) is None:
                    await self._try_start(slot, zygotes, each)

    async def prewarm_standby(self, code: Path) -> None:
        """Start additional zygotes for the standby's programs with new code."""
        await self.prewarm(
            {slot: each.with_code(code) for slot, each in self._commands.get(STANDBY_REPLICA, {}).items()}
        )

    async def _maintain(self, replica: int, commands: Mapping[RankSlot, RankCommand]) -> None:
        """Keep exactly these zygotes; replace those that die, which none does on its own."""
        while self._deaths <= MAX_ZYGOTE_DEATHS:
            zygotes: dict[RankSlot, Zygote] = {}
            for slot, each in commands.items():
                async with self._lock:
                    slot_zygotes = self._slots.setdefault(slot, _SlotZygotes())
                    zygote = await slot_zygotes.match(each)
                    if zygote is None or zygote.needs_more_imports(each):
                        zygote = await self._try_start(slot, slot_zygotes, each) or zygote
                    slot_zygotes.kill_all(keep=zygote)
                if zygote is not None:
                    zygotes[slot] = zygote
            self._report_prewarmed(replica, tuple(commands[slot].rank for slot in zygotes))
            if not zygotes:
                return
            ends = [asyncio.ensure_future(each.wait_ended()) for each in zygotes.values()]
            try:
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for each in ends:
                    each.cancel()
            self._deaths += 1
        alive = [slot for slot, each in commands.items() if await self._slots[slot].match(each) is not None]
        self._report_prewarmed(replica, tuple(commands[slot].rank for slot in alive))

    def _report_prewarmed(self, replica: int, ranks: tuple[int, ...]) -> None:
        """Report which ranks have a zygote; that none has is news only after another report."""
        if replica != STANDBY_REPLICA and (ranks or self._prewarmed.get(replica)):
            self._prewarmed[replica] = ranks
            self._on_prewarmed(replica, ranks)

    async def _try_start(self, slot: RankSlot, zygotes: _SlotZygotes, command: RankCommand) -> Zygote | None:
        try:
            zygote = await self._start_zygote(slot, command)
        except ColdStart as cold:
            zygotes.cold_reason = "" if isinstance(cold, NotWorthPrewarming) else str(cold)
            log.info("replica %s, slot %s is not prewarmed: %s", *slot, cold)
            return None
        if self._disabled_reason:  # meanwhile
            zygote.kill()
            zygotes.cold_reason = self._disabled_reason
            return None
        zygotes.zygotes.append(zygote)
        return zygote

    async def _start_zygote(self, slot: RankSlot, command: RankCommand) -> Zygote:
        found = parse_python_command(command.argv)
        if isinstance(found, str):
            raise ColdStart(found)
        skip_modules: set[str] = set()
        path = self._folder / f"zygote-{slot[0]}-{slot[1]}.log"
        while True:
            try:
                return await Zygote.start(found, command, path, skip_modules=skip_modules)
            except UnsafeModule as unfit:
                if len(skip_modules) == MAX_SKIPPED_MODULES:
                    raise
                log.info("%s", unfit)
                skip_modules.add(unfit.module)

    def _report_cold_start(self, who: str, reason: str) -> None:
        if not reason or reason in self._reported:
            return
        self._reported.add(reason)
        self._report_finding(
            Finding(
                code="cold-start",
                severity=Severity.INFO,
                what=f"a rank was started cold: {reason}",
                where=who,
                remedy="Nothing need be done; prewarming saves a restart the time of the program's imports.",
            )
        )
