"""Owns a node's side of a run: it carries out the controller's orders and outlives it.

The agent decides nothing but this: when its node is taken away (SIGTERM), or there was no controller for too long, it
has its ranks save what they can and leaves; and its ranks never outlive it. One file, a little longer than
others, because it is the one list of the orders that it obeys.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from holdfast.agent.code import CodeFolder
from holdfast.agent.copies import Copies
from holdfast.agent.drills import Drills, Reach
from holdfast.agent.echo import Echo
from holdfast.agent.handed import Handed
from holdfast.agent.link import Link, Refused
from holdfast.agent.port import HeldPort
from holdfast.agent.pressure import watch as watch_memory
from holdfast.agent.retention import Retention
from holdfast.agent.sources import Sources
from holdfast.agent.standby import get_ready
from holdfast.agent.storehost import StoreHost
from holdfast.agent.team import Team
from holdfast.agent.warmth import Warmth
from holdfast.clock import LOOK_S, Clock, clock_jumped
from holdfast.errors import HoldfastError
from holdfast.events import (
    AgentEvent,
    AgentJoined,
    CodeFetched,
    FindingRaised,
    NodeLeaving,
    RanksStopped,
    RanksWarmed,
    StandbyReady,
    rank,
)
from holdfast.events.orders import (
    PROTOCOL,
    AnyOrder,
    AskCheckpoint,
    AskSplit,
    Break,
    FetchCode,
    GetReady,
    KeepLog,
    Leave,
    Look,
    Progress,
    Release,
    ReplicaBack,
    ReplicaLost,
    StartRanks,
    StopRanks,
    TakeStacks,
    WindDown,
)
from holdfast.events.rank import CheckpointNow, HandOver, SplitNow, StopNow
from holdfast.findings import Finding
from holdfast.folder import LEFT_NAME, description_at
from holdfast.host.processes import adopt_orphans, descendants, end_all
from holdfast.job.silence import Silence

log = logging.getLogger("holdfast.agent")

STDOUT = 1

LEAVING_GRACE_S = 30.0
"""Grace that ranks get when the agent gives up waiting for a controller."""

PREPARE_S = 60.0
"""Longest that an update waits for the imports of its code, beside ranks at work."""

ECHO_S = 2.0
"""Longest that the rest of what ranks wrote may take to reach standard output."""

PARTING_S = 5.0
"""Seconds beyond the grace that killed ranks get to be gone."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What an agent is started with."""

    node: int
    generation: int
    controller: str
    """Where the controller was when this agent was started."""
    token: str
    ca: Path | None
    folder: Path
    sockets: Path
    code: Path
    address: str
    controller_grace_s: float
    node_grace_s: float
    stop_grace_s: float
    record: Path | None = None
    """The run's `controller.json`, where this node can read it: another keeper may have had to take another port."""
    copies: Path | None = None
    """Folder for copies of the run's log and code, where the controller may lose them with its machine."""
    echo: bool = False
    """Whether what ranks write goes to standard output too."""

    def where(self) -> str:
        """The controller's URL, as far as it is known now."""
        found = description_at(self.record) if self.record else {}
        if not {"host", "port"} <= found.keys():
            return self.controller
        address = f"{found['host']}:{found['port']}"
        return urlsplit(self.controller)._replace(netloc=address).geturl()


class Agent:
    """One node's agent."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._incarnation = secrets.token_hex(4)
        self._source = f"node{settings.node}.{settings.generation}/{self._incarnation}"
        self._clock = Clock()
        self._port = HeldPort(settings.address)
        self._code = CodeFolder(settings.where, settings.token, settings.code, ca=settings.ca, copies=settings.copies)
        self._copies = Copies(settings.copies) if settings.copies else None
        self._retention = Retention(self._found)
        self._echo = Echo(STDOUT) if settings.echo else None
        self._warmth = Warmth(settings.folder, self._found, self._warmed)
        self._handed = Handed()
        self._stores = StoreHost()
        self._sources: defaultdict[int, Sources] = defaultdict(Sources)
        """By replica."""
        self._teams: dict[int, Team] = {}
        self._attempts: dict[int, int] = {}
        """Highest attempt started or stopped, by replica: an order for an earlier one comes too late."""
        self._starts: dict[int, asyncio.Task[None]] = {}
        self._fetches: set[asyncio.Task[None]] = set()
        """Of code for a later start."""
        self._readying: asyncio.Task[None] | None = None
        self._quiet = asyncio.Event()
        self._farewell: asyncio.Task[None] | None = None
        """What is done before leaving; from then on nothing is started."""
        self._leaving = asyncio.Event()
        self._dismissed = False
        """Whether its controller has said that it is not needed any more."""
        self._link = Link(
            settings.where,
            settings.token,
            self._source,
            greet=self._greet,
            obey=self._obey,
            silence=Silence(node_grace_s=settings.node_grace_s),
            ca=settings.ca,
            hand_back=self._hand_back if settings.copies else None,
        )
        self._drills = Drills(Reach(node=settings.node, teams=self._teams.values, link=self._link, clock=self._clock))

    async def run(self) -> bool:
        """Work until told to leave, or until there has been no controller for too long; whether it was dismissed."""
        adopt_orphans()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._told_to_leave)
        link = asyncio.ensure_future(self._link.run())
        link.add_done_callback(self._link_ended)
        work = (
            self._patience(),
            self._watch_clock(),
            self._retention.run(),
            *([self._echo.run()] if self._echo else []),
            watch_memory(f"node{self._settings.node}", self._memory_short),
        )
        watches = [asyncio.ensure_future(each) for each in work]
        await self._leaving.wait()
        for watch in watches:
            watch.cancel()
        for team in list(self._teams.values()):
            team.stop(0.0)
        link.cancel()
        for team in list(self._teams.values()):
            team.end_leftovers()
        await self._stores.end()  # end_all would reap it, of which asyncio warns
        end_all(lambda: descendants(os.getpid()), within_s=PARTING_S)
        if self._echo is not None:
            await self._echo.finish(ECHO_S)
        return self._dismissed

    def _link_ended(self, link: asyncio.Future[None]) -> None:
        if link.cancelled():
            return
        if isinstance(error := link.exception(), Refused):
            log.error("the controller refused this agent's token")
        else:
            log.error("the connection to the controller failed for good", exc_info=error)
        self._leaving.set()

    async def _patience(self) -> None:
        """Leave when no controller has been there for the grace time: ranks nobody watches hold a node for nothing."""
        grace_s = self._settings.controller_grace_s
        while True:
            await self._link.lost.wait()
            try:
                await asyncio.wait_for(self._link.connected.wait(), grace_s)
                self._link.lost.clear()
            except TimeoutError:
                reason = f"its agent left after {grace_s:g} s without a controller (recovery.controller_grace_s)"
                self._farewell = asyncio.ensure_future(self._part(reason, LEAVING_GRACE_S))
                return

    def _told_to_leave(self) -> None:
        """The node is taken away: the run is told, and ranks have their grace; told again, the agent leaves at once."""
        if self._farewell is not None:
            self._leaving.set()
            return
        grace_s = self._settings.stop_grace_s
        self._link.say(NodeLeaving(at=self._clock(), node=self._settings.node, grace_s=grace_s))
        self._farewell = asyncio.ensure_future(self._part("its agent was told to leave by SIGTERM", grace_s))

    async def _part(self, reason: str, grace_s: float) -> None:
        """Have the ranks save what they can, and leave when they have ended."""
        log.error("%s; ranks were asked for a checkpoint first", reason)
        with contextlib.suppress(OSError):
            (self._settings.folder / LEFT_NAME).write_text(reason)
        for team in list(self._teams.values()):
            team.part(grace_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s + PARTING_S):
                while self._teams:
                    self._quiet.clear()
                    await self._quiet.wait()
        if self._link.connected.is_set():
            await self._link.settled(within_s=PARTING_S)
        self._leaving.set()

    async def _watch_clock(self) -> None:
        """Say when the wall clock is set; nothing here goes by it."""
        while True:
            await asyncio.sleep(LOOK_S)
            if jump_s := self._clock.jumped_s():
                found = clock_jumped(f"node{self._settings.node}", jump_s)
                self._link.say(FindingRaised(at=self._clock(), finding=found))

    def _greet(self) -> AgentJoined:
        teams = list(self._teams.values())
        return AgentJoined(
            at=self._clock(),
            source=self._source,
            node=self._settings.node,
            generation=self._settings.generation,
            incarnation=self._incarnation,
            hostname=socket.gethostname(),
            address=self._settings.address,
            port=self._port.number,
            pid=os.getpid(),
            attempt=max(self._attempts.values(), default=-1),
            clock=self._clock.anchor,
            protocol=PROTOCOL,
            copy=self._copies.log if self._copies else None,
            running=tuple(state for team in teams for state in team.running),
        )

    async def _hand_back(self) -> None:
        if self._copies is not None:
            await self._copies.hand_back(self._settings.where(), self._settings.token, self._settings.ca)

    # Orders

    def _obey(self, order: AnyOrder) -> None:
        match order:
            case StartRanks():
                self._start(order)
            case GetReady(start=start):
                if self._readying is None or self._readying.done():
                    self._readying = asyncio.ensure_future(self._get_ready(start))
            case StopRanks():
                self._stop(order)
            case Break():
                self._drills.take(order)
            case AskCheckpoint():
                for team in self._teams.values():
                    team.ask_sessions(CheckpointNow(), "takes a checkpoint")
            case AskSplit():
                for team in self._teams.values():
                    team.ask_sessions(SplitNow(), "says where its time goes")
            case TakeStacks():
                for team in self._teams.values():
                    team.take_stacks()
            case WindDown():
                for team in self._teams.values():
                    team.ask(HandOver() if order.hand_over else StopNow(reason=order.reason))
            case FetchCode():
                self._fetch(order.digest)
            case Release():
                self._handed.release(order.replica)
            case Look():
                team = self._teams.get(order.replica)
                if team is not None and team.attempt == order.attempt:
                    team.look(everyone=order.everyone)
            case ReplicaLost() | ReplicaBack():
                self._tell_others(order)
            case KeepLog():
                if self._copies is not None:
                    self._copies.take(order)
            case Leave():
                self._dismissed = True
                self._leaving.set()
            case _:
                log.warning("an order this agent does not know: %s", order)

    def _tell_others(self, order: ReplicaLost | ReplicaBack) -> None:
        """Pass on what befell a replica to the ranks of the others."""
        kind = rank.ReplicaLost if isinstance(order, ReplicaLost) else rank.ReplicaBack
        for team in self._teams.values():
            if team.replica != order.replica:
                team.ask(kind(replica=order.replica, attempt=order.attempt))

    def _fetch(self, digest: str) -> None:
        """Have code before anybody runs it, beside the ranks at work."""
        fetch = asyncio.ensure_future(self._fetched(digest))
        self._fetches.add(fetch)
        fetch.add_done_callback(self._fetches.discard)

    async def _fetched(self, digest: str) -> None:
        """Get code, have the programs that it makes of the ranks held, and say so."""
        problem = None
        try:
            code = await self._code.get(digest)
            async with asyncio.timeout(PREPARE_S):
                await asyncio.gather(*(team.prepare(code) for team in self._teams.values()))
                await self._warmth.prepare_standby(code)
        except HoldfastError as error:
            problem = error.findings[0]
        except TimeoutError:
            log.warning("the imports of other code take more than %g s; its ranks will start cold", PREPARE_S)
        self._link.say(CodeFetched(at=self._clock(), node=self._settings.node, digest=digest, problem=problem))

    def _start(self, order: StartRanks) -> None:
        if order.attempt <= self._attempts.get(order.replica, -1) or self._farewell is not None:
            return
        self._attempts[order.replica] = order.attempt
        self._drills.begin_anew()
        self._warmth.adopt(order.replica)
        team = Team(
            order,
            node=self._settings.node,
            sockets=self._settings.sockets,
            folder=self._settings.folder,
            port=self._port,
            clock=self._clock,
            code=self._code.get,
            retention=self._retention,
            echo=self._echo,
            warmth=self._warmth,
            handed=self._handed,
            stores=self._stores,
            sources=self._sources[order.replica],
            say=self._say,
            on_step=self._drills.step_passed,
            on_stopped=self._stopped,
        )
        self._teams[order.replica] = team
        start = asyncio.ensure_future(team.start())
        start.add_done_callback(self._start_settled)
        self._starts[order.replica] = start

    async def _get_ready(self, start: StartRanks) -> None:
        node, generation = self._settings.node, self._settings.generation
        ready = await get_ready(
            start,
            node=node,
            code=self._code.get,
            warmth=self._warmth,
            clock=self._clock,
            find=self._found,
            abandoned=self._leaving,
        )
        if ready and self._farewell is None:
            self._link.say(StandbyReady(at=self._clock(), node=node, generation=generation))

    def _start_settled(self, start: asyncio.Future[None]) -> None:
        """Ranks that were started by half are nobody's: the node had better be lost, which everybody understands."""
        if not start.cancelled() and (error := start.exception()) is not None:
            log.critical("the ranks could not be started", exc_info=error)
            self._leaving.set()

    def _stop(self, order: StopRanks) -> None:
        known = self._attempts.get(order.replica, -1)
        team = self._teams.get(order.replica)
        if team is not None and team.attempt <= order.attempt:
            team.stop(order.grace_s, together=order.together)
        elif order.attempt > known:
            # The order to start this attempt never arrived; now it must not. Other nodes may have met at this port.
            self._attempts[order.replica] = order.attempt
            self._port.renew()
            self._link.say(
                RanksStopped(
                    at=self._clock(),
                    node=self._settings.node,
                    replica=order.replica,
                    attempt=order.attempt,
                    port=self._port.number,
                )
            )

    def _say(self, message: AgentEvent | Progress) -> int:
        """A node that is about to go never counts as quiet: nothing can be started on it again."""
        parting = self._farewell is not None and isinstance(message, RanksStopped)
        return 0 if parting else self._link.say(message)

    def _found(self, finding: Finding) -> None:
        self._link.say(FindingRaised(at=self._clock(), finding=finding))

    def _memory_short(self, finding: Finding) -> None:
        self._warmth.give_way("memory was short")
        self._found(finding)

    def _warmed(self, replica: int, ranks: tuple[int, ...]) -> None:
        self._link.say(RanksWarmed(at=self._clock(), node=self._settings.node, replica=replica, ranks=ranks))

    def _stopped(self, team: Team) -> None:
        if self._teams.get(team.replica) is team:
            del self._teams[team.replica]
        self._quiet.set()
