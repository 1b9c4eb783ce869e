"""Owns the I/O around the machine: it writes events down, then does what the machine commands, and tells it the time.

Nothing is decided here. The order is always: event into the log, state moved, commands carried out; so a controller
that dies anywhere leaves a log from which its successor goes on.

One file, longer than others, because what is taken in, held back, written, acknowledged and carried out is one order of
things over one state, and must be read side by side.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NoReturn, TypeVar

import msgspec

from holdfast.clock import LOOK_S, Clock, clock_jumped
from holdfast.control.commands import (
    Command,
    Cordon,
    Finish,
    Inject,
    Prepare,
    Record,
    ReplaceNode,
    Start,
    SubmitNodes,
    Uncordon,
)
from holdfast.control.copies import LogCopies
from holdfast.control.crowd import GATHER_S, Crowd
from holdfast.control.dispatch import dispatch_of
from holdfast.control.effects import failed_effect
from holdfast.control.links import AgentLink, AgentPeer, Links, NotItsOwn
from holdfast.control.machine import Machine
from holdfast.control.progress import StepLedger
from holdfast.control.state import NodeState, ReplicaPhase, State
from holdfast.control.thinning import LONGEST_S, Thinning, drawn_together
from holdfast.errors import ExitCode, HoldfastError
from holdfast.events import (
    AgentEvent,
    AgentJoined,
    AgentLeft,
    AnyEvent,
    CancelRequested,
    CheckpointCommitted,
    ControllerStarted,
    CrowdEvent,
    DeadlinePassed,
    DrillDone,
    DrillRequested,
    FindingRaised,
    NodeEvicted,
    NodeGone,
    NodeMade,
    NodeUnavailable,
    OperatorEvent,
    RunCreated,
    RunFinished,
    StepCommitted,
)
from holdfast.events.log import EventWriter, Superseded
from holdfast.events.orders import (
    GetReady,
    Leave,
    Progress,
    StartRanks,
)
from holdfast.findings import Fault, Finding, Severity
from holdfast.folder import SUPERSEDED_STATUS
from holdfast.job.backend import Backend, NodeObservation, NodePlace, Sight
from holdfast.shortage import holding_up, shortage_of

Timed = TypeVar("Timed", bound=msgspec.Struct)

log = logging.getLogger("holdfast.controller")

CLOCK_TOLERANCE_S = 0.25
"""Clocks nearer than this are taken as one: the difference may be the message's travel."""

ONE_CLOCK_S = 0.001
"""What two looks at one machine's clock may differ by, at most: the time between reading its two faces."""

AHEAD_STEPS = 100_000
"""Steps that one node may have passed and others not: what is kept of them is memory, about 60 MB."""

HOLD_S = 1.0
"""Seconds between two tries of what the operating system had no room for."""

LONGEST_HOLD_S = 30.0
"""Longest time between two tries of a command that failed; each waits twice as long as the one before."""

SAY_S = 60.0
"""Seconds between two findings about one subject, however often the words of its failure change."""

ENDING_TRIES = 5
"""Times that the removal of nodes is tried before a run ends without it."""

LEAVE_S = 3.0
"""Seconds that dismissed agents get to leave by themselves before the back end removes them."""


class Controller:
    """Runs one job from its log, its machine and its back end.

    `start_orders` expands a Start among these nodes into what the ranks of each are given; it is injected because
    launching is not control's business; so is `drill`, which breaks what no agent can, and `attend`, which is told
    which replicas have ranks. `copies` are those of the log, where it may be lost with its machine.
    """

    def __init__(
        self,
        *,
        machine: Machine,
        writer: EventWriter,
        history: Iterable[AnyEvent],
        backend: Backend,
        start_orders: Callable[[Start, tuple[NodeState, ...]], Callable[[int], StartRanks]],
        drill: Callable[[DrillRequested], Awaitable[None]],
        attend: Callable[[Mapping[int, str]], None] | None = None,
        copies: LogCopies | None = None,
        incarnation: str,
        clock: Callable[..., Clock] = Clock,
    ) -> None:
        self._machine = machine
        self._writer = writer
        self._backend = backend
        self._start_orders = start_orders
        self._drill = drill
        self._attend = attend
        self._copies = copies
        self._incarnation = incarnation
        self._links = Links()
        self._ledgers: dict[int, StepLedger] = {}
        self._thinning: defaultdict[int, Thinning] = defaultdict(Thinning)
        self._crowd = Crowd()
        self._seen: dict[str, int] = {}
        self._told: set[Finding] = set()
        """What is only to be known, without where it was found."""
        self._said: dict[str, float] = {}
        """When a finding about a subject was last written (monotonic seconds)."""
        self._held: tuple[AnyEvent, ...] = ()
        """Events that wait for the log."""
        self._short = False
        self.holding = False
        """Whether the log cannot be written at the moment."""
        self._state = State()
        self._began = 0.0
        self._due: asyncio.TimerHandle | None = None
        self._wake = asyncio.Event()
        self._done = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        former, latest = None, 0.0
        for event in history:
            self._fold(event)
            latest = max(latest, event.at)
            if isinstance(event, ControllerStarted):
                former = event.clock
        self._clock = clock(former, not_before=latest)

    @property
    def finished(self) -> bool:
        return self._state.finished

    async def run(self) -> None:
        """Take over the run and see it through to its end."""
        now = self._clock.anchor
        self.feed(ControllerStarted(at=now.at, pid=os.getpid(), incarnation=self._incarnation, clock=now))
        self._spawn(self._watch_nodes())
        self._spawn(self._watch_time())
        self._spawn(self._watch_clock())
        await self._done.wait()
        for task in self._tasks:
            task.cancel()

    def ask(self, request: OperatorEvent) -> None:
        """Take in what somebody asks for, as an event of ours and of now."""
        self.feed(msgspec.structs.replace(request, at=self._clock(), source="", seq=0))

    def tell(self, *findings: Finding) -> None:
        """Write down what is worth saying and by itself changes nothing."""
        self.feed(*(FindingRaised(at=self._clock(), finding=finding) for finding in findings))

    def feed(self, *events: AnyEvent) -> None:
        """Take events in, after what was kept back, or hold them as long as the log cannot be written."""
        self._enter([*self._kept(), *events])

    def _enter(self, events: Sequence[AnyEvent]) -> None:
        """Take in just these, or hold them as long as the log cannot be written; nothing follows `RunFinished`.

        What is held changes nothing yet: nothing is acknowledged, nothing is commanded, ranks and agents go on. A
        request to end the run may use the last of the space that is kept for the log.
        """
        if self._state.finished:
            return
        self._held = (*self._held, *events)
        if self.holding:
            self._held = drawn_together(self._held, lambda replica: self._state.replicas[replica].step)
        if not self.holding or any(isinstance(event, CancelRequested) for event in events):
            self._take_in()

    def _take_in(self) -> None:
        """Write what is held, and the decisions it leads to, in one go; then move on and act."""
        state, events, self._held = self._state, self._held, ()
        lines: list[AnyEvent] = []
        commands: list[Command] = []
        for event in events:
            state, more = self._machine.step(state, event)
            lines.append(event)
            lines.extend(command.event for command in more if isinstance(command, Record))
            commands.extend(command for command in more if not isinstance(command, Record))
        decisive = any(isinstance(line, RunCreated | RunFinished) for line in lines)
        try:
            self._writer.append(lines, sync=decisive, ending=state.ending is not None)
        except Superseded:
            _leave_to_another()
        except OSError as error:
            self._held = events
            self._hold(error)
            return
        self._state = state
        if self._attend is not None:
            self._attend(state.attendance)
        for event in events:
            self._note(event)
        if self._copies is not None:  # before an order that follows from it: who obeys that knows why
            self._copies.bring_up_to_date(self._links)
        self._wake.set()
        again, self.holding = self.holding, False
        if again:
            log.warning("the log can be written again, and the run goes on")
        for command in commands:
            self._carry_out(command)
        if again or any(isinstance(event, StepCommitted | CrowdEvent) for event in events):
            self._links.acknowledge_all()
        if state.finished:
            self._done.set()
        if more := (*self._settled_steps(), *self._room_findings(), *self._repair_findings()):
            self._enter(more)

    def _hold(self, error: OSError) -> None:
        if not self.holding:
            self.holding = True
            self._links.withhold()
            log.error("%s", holding_up(error, "the event log cannot be written, so the run waits", self._writer.path))
            self._spawn(self._wait_for_room())

    async def _wait_for_room(self) -> None:
        while self.holding:
            await asyncio.sleep(HOLD_S)
            self._take_in()

    def _room_findings(self) -> tuple[FindingRaised, ...]:
        """What is to be said when the log begins, or ceases, to live on the space that is kept for it."""
        error, path = self._writer.shortage, self._writer.path
        if (error is not None) is self._short or self._state.finished:
            return ()
        self._short = error is not None
        if error is not None:
            finding = holding_up(error, "the event log lives on space kept for it", path)
        else:
            what = "there is room for the event log again"
            finding = Finding(code="disk-has-room", what=what, severity=Severity.INFO, where=str(path))
        return (FindingRaised(at=self._clock(), finding=finding),)

    def _check_log(self) -> None:
        """See that the log is as it was left, so that a change is undone before anybody misses what is gone."""
        if self.holding:
            return
        try:
            self._writer.check()
        except Superseded:
            _leave_to_another()
        except OSError as error:
            log.warning("the event log cannot be looked at: %s", error)
        if found := self._repair_findings():
            self._enter(found)

    def _repair_findings(self) -> tuple[FindingRaised, ...]:
        """What is to be said of changes to the log that no controller made, and that were undone."""
        repairs, path = self._writer.repairs, str(self._writer.path)
        if not repairs or not self._may_say(path):
            return ()
        sizes: defaultdict[str, list[int]] = defaultdict(list)
        for repair in repairs:
            sizes[repair.what].append(repair.size_bytes)
        repairs.clear()
        return tuple(
            FindingRaised(
                at=self._clock(),
                finding=Finding(
                    code="event-log-repaired",
                    severity=Severity.WARNING,
                    what=f"the event log was changed by something else than this run: {what}",
                    where=path,
                    evidence=(f"{sum(found):,} bytes{f', {len(found)} times' if len(found) > 1 else ''}",),
                    remedy="Nothing is lost. Find what writes there: another program, a script, a sync of that folder.",
                    fault=Fault.CLUSTER,
                ),
            )
            for what, found in sizes.items()
        )

    def _may_say(self, subject: str) -> bool:
        """Whether enough time has passed since the last finding about a subject; if so, it counts from now."""
        now = time.monotonic()
        if now - self._said.get(subject, -math.inf) < SAY_S:
            return False
        self._said[subject] = now
        return True

    def _kept(self) -> list[AnyEvent]:
        """What was kept back so that many words, or many steps, are one line."""
        steps = (line for thinning in self._thinning.values() for line in thinning.give())
        return [*steps, *self._crowd.give(self._state)]

    def _write_within(self, seconds: float) -> None:
        """See to it that what is kept back now is written in time."""
        loop = asyncio.get_running_loop()
        if self._due is not None and loop.time() < self._due.when() <= loop.time() + seconds:
            return
        if self._due is not None:
            self._due.cancel()
        self._due = loop.call_later(seconds, lambda: self._spawn(self._write_kept()))

    async def _write_kept(self) -> None:
        self.feed()

    # Agents

    def agent_joined(self, peer: AgentPeer, joined: AgentJoined) -> AgentLink | None:
        """Greet an agent; None (after telling it to leave) when its node has been given up.

        Raises `NotItsOwn` for one that would speak in another's name.
        """
        if joined.source != f"node{joined.node}.{joined.generation}/{joined.incarnation}":
            raise NotItsOwn(f"node{joined.node}.{joined.generation} speaks as {joined.source!r}")
        node = self._state.nodes[joined.node] if 0 <= joined.node < len(self._state.nodes) else None
        over = self._state.finished or self._state.dismissing
        if node is None or joined.generation != node.generation or over:
            try:
                self._writer.check()  # it may be another controller that has given the node this place
            except Superseded:
                _leave_to_another()
            except OSError as error:
                log.warning("the event log cannot be looked at: %s", error)
            log.info("agent of node%s.%s is no longer wanted", joined.node, joined.generation)
            peer.send(Leave())
            return None
        link = AgentLink(peer=peer, joined=joined, clock_ahead_s=self._lead_s(joined))
        if self._copies is not None and joined.copy is not None:
            link.copied = self._copies.known_of(joined.node, joined.copy)
        self._links.add(link)
        self.feed(msgspec.structs.replace(joined, at=self._clock(), copy=None))
        return link

    def agent_said(self, link: AgentLink, messages: list[AgentEvent | Progress]) -> None:
        """Take in what an agent sent, each message once, and acknowledge what is safe.

        Raises `NotItsOwn` for a word about another node.
        """
        events: list[AnyEvent] = []
        seen = self._seen.get(link.joined.source, 0)
        replica = self._state.nodes[link.joined.node].replica
        for message in messages:
            link.check_own(message, replica=replica, world_size=self._machine.job.world_size)
            if isinstance(message, Progress):
                events.extend(self._take_progress(link, message))
            elif message.seq > seen:
                seen = self._seen[link.joined.source] = message.seq
                word = _on_our_clock(message, link.clock_ahead_s)
                if self._crowd.takes(self._state, word):
                    link.unsettled.append((message.seq, partial(self._crowd.wrote, self._crowd.rounds)))
                elif _tiding(word) not in self._told:
                    events += [*self._kept(), word]
            link.received = max(link.received, message.seq)
        if self._crowd.complete(self._state):
            events += self._kept()
        elif self._crowd:
            self._write_within(GATHER_S)
        if events or (events := self._settled_steps()):
            self._enter(events)
        if not self.holding:
            link.acknowledge()

    def agent_left(self, link: AgentLink) -> None:
        """An agent's connection has closed."""
        if not self._links.remove(link):
            return
        joined = link.joined
        self.feed(
            AgentLeft(at=self._clock(), node=joined.node, generation=joined.generation, incarnation=joined.incarnation)
        )

    def _lead_s(self, joined: AgentJoined) -> float:
        """How far an agent's clock is ahead of ours: exactly on one machine, else as far as its greeting tells."""
        exact = self._clock.lead_s(joined.clock)
        ahead_s, alike_s = (joined.at - self._clock(), CLOCK_TOLERANCE_S) if exact is None else (exact, ONE_CLOCK_S)
        return ahead_s if abs(ahead_s) > alike_s else 0.0

    def _take_progress(self, link: AgentLink, progress: Progress) -> list[AnyEvent]:
        ledger = self._ledger(progress.replica)
        if progress.attempt != ledger.attempt or not progress.steps:
            return []
        if ledger.ahead(progress.node) >= AHEAD_STEPS:
            raise NotItsOwn(f"node{progress.node} is {AHEAD_STEPS} steps ahead of others")
        last = progress.steps[-1].step
        link.unsettled.append((progress.seq, partial(self._is_written, progress.replica, progress.attempt, last)))
        steps = ledger.take(_on_our_clock(progress, link.clock_ahead_s), self._clock())
        return [line for step in steps for line in self._lines(step)]

    def _lines(self, step: StepCommitted) -> list[StepCommitted]:
        """What is written of a step now that it is committed; a drill that waits for one has it at once."""
        thinning, highest = self._thinning[step.replica], self._state.replicas[step.replica].step
        lines = thinning.take(
            step,
            age_s=step.ended - self._began,
            highest=highest,
            at_once=bool(self._state.drills),
            sparing=self._short,
        )
        if thinning.kept:
            self._write_within(LONGEST_S)
        return lines

    def _is_written(self, replica: int, attempt: int, step: int) -> bool:
        """Whether a step need not be said again: it is in the log, or its attempt is over."""
        ledger = self._ledger(replica)
        return attempt != ledger.attempt or step <= ledger.written

    def _settled_steps(self) -> list[AnyEvent]:
        """Steps that only a checkpoint proves: in a replica no longer at work, missing words may never come."""
        return [
            line
            for index, ledger in self._ledgers.items()
            if ledger.proven > ledger.committed and self._has_ended(ledger)
            for step in ledger.settle(self._clock())
            for line in self._thinning[index].take(step, age_s=0.0, highest=step.step, at_once=True)
        ]

    def _has_ended(self, ledger: StepLedger) -> bool:
        """Whether its attempt is the replica's last, and is no longer at work."""
        replica = self._state.replicas[ledger.replica]
        at_work = replica.phase in (ReplicaPhase.RUNNING, ReplicaPhase.JUDGING)
        return not at_work and replica.attempt == ledger.attempt

    def _ledger(self, index: int) -> StepLedger:
        """The ledger of a replica's attempt in hand."""
        replica = self._state.replicas[index]
        ledger = self._ledgers.get(index)
        if ledger is None or ledger.attempt != replica.attempt:
            ledger = self._ledgers[index] = StepLedger(index, replica.attempt, replica.members)
        return ledger

    # Commands

    def _carry_out(self, command: Command) -> None:
        match command:
            case SubmitNodes(places=places):
                submit = partial(self._backend.submit, places)
                self._spawn(self._insist("nodes cannot be made yet", submit, partial(self._wanted, places)))
            case ReplaceNode(place=place, reason=reason):
                replace = partial(self._backend.replace_node, place, reason)
                subject = f"node{place.node} cannot be replaced yet"
                self._spawn(self._insist(subject, replace, partial(self._wanted, (place,))))
            case Cordon(place=place):
                cordon = partial(self._backend.cordon, place)
                self._spawn(self._insist(f"the machine of node{place.node} cannot be put out of use yet", cordon))
            case Uncordon(place=place):
                uncordon = partial(self._backend.uncordon, place)
                self._spawn(self._insist(f"the machine of node{place.node} cannot be used again yet", uncordon))
            case Start(replica=replica, attempt=attempt):
                current = partial(self._current, replica, attempt)
                self._send(f"attempt {attempt} cannot be started yet", partial(self._send_start, command), current)
            case Prepare(node=node):
                self._send(f"node{node} cannot be made ready yet", partial(self._send_prepare, node))
            case Inject(drill=drill, node=None):
                self._spawn(self._break(drill))
            case Finish():
                self._spawn(self._finish())
            case _:
                nodes, order = dispatch_of(command, replica_world_size=self._machine.job.replica_world_size)
                self._links.send(nodes, lambda _: order)

    def _send(self, subject: str, send: Callable[[], None], current: Callable[[], bool] = lambda: True) -> None:
        """Send orders that are worked out for each node; try again later where that fails."""
        try:
            send()
        except Exception:

            async def again() -> None:
                send()

            self._spawn(self._insist(subject, again, current))

    def _send_start(self, command: Start) -> None:
        numbers = self._state.replicas[command.replica].members
        members = tuple(self._state.nodes[number] for number in numbers)
        self._links.send(command.nodes, self._start_orders(command, members))

    def _send_prepare(self, node: int) -> None:
        members = (self._state.nodes[node], *self._state.nodes_of(0)[1:])
        start = Start(replica=0, attempt=0, nodes=(node,), master_addr="", master_port=0, code=self._state.code)
        launches = self._start_orders(start, members)
        self._links.send((node,), lambda node: GetReady(start=launches(node)))

    def _wanted(self, places: Iterable[NodePlace]) -> bool:
        """Whether any of these nodes is still to be made: others may have been asked for in their place."""
        return any(self._state.nodes[place.node].generation == place.generation for place in places)

    def _current(self, replica: int, attempt: int) -> bool:
        return self._state.replicas[replica].attempt == attempt

    async def _insist(
        self, subject: str, act: Callable[[], Awaitable[None]], current: Callable[[], bool] = lambda: True
    ) -> None:
        """Carry a command out; try again until it succeeds, is not `current` any more, or the run ends.

        Whatever goes wrong is this command's failure and no other's: its cause is written down, and the machine, which
        waits for what the command was to bring about, decides what follows when it does not come.
        """
        written, pauses = "", _pauses()
        while not self._state.ending and current():
            try:
                await act()
                return
            except Exception as error:
                finding = failed_effect(error, subject)
                if shortage_of(error) is None:
                    log.exception("%s", subject)
            if finding.what != written and self._may_say(subject):
                self.tell(finding)
                written = finding.what
            await asyncio.sleep(next(pauses))

    async def _break(self, drill: DrillRequested) -> None:
        """Do what no agent can, said first: it may be this process that breaks."""
        log.warning("drill: %s %s %s", drill.action, drill.target, drill.index)
        node = drill.index if drill.target.numbered else -1
        done = DrillDone(
            at=self._clock(), node=node, requested_at=drill.at, target=drill.target.value, action=drill.action.value
        )
        self.feed(done)
        try:
            await self._drill(drill)
        except HoldfastError as error:
            self.tell(*error.findings)
        except Exception as error:
            log.exception("the drill failed")
            self.tell(failed_effect(error, f"the drill {drill.action} {drill.target} failed", retried=False))

    async def _finish(self) -> None:
        ending = self._state.ending
        assert ending is not None, "Finish follows the decision to end"
        conclude = partial(self._backend.conclude, ending.outcome, ending.exit_code, ending.reason)
        await self._try("the run's place cannot be told how the run ended", conclude)
        self._links.send(None, lambda _: Leave())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_S):
                await self._links.emptied()
        await self._try("what is left of the run's nodes could not be removed", self._backend.cancel)
        self.feed(
            RunFinished(at=self._clock(), outcome=ending.outcome, exit_code=ending.exit_code, reason=ending.reason)
        )

    async def _try(self, subject: str, act: Callable[[], Awaitable[None]]) -> None:
        """Do what belongs to the end of a run, which must come: after some tries the run ends without it."""
        for left in reversed(range(ENDING_TRIES)):
            try:
                await act()
                return
            except Exception as error:
                log.exception("%s", subject)
                if not left:
                    self.tell(failed_effect(error, subject, retried=False))
                    return
            await asyncio.sleep(HOLD_S)

    # Watching

    async def _watch_nodes(self) -> None:
        """Write down what becomes of nodes, until they are all to go: that they went then is no news."""
        subject = "nodes cannot be watched"
        observations, written, pauses = None, "", _pauses()
        while True:
            try:
                observations = observations or self._backend.observe()
                seen = await anext(observations)
            except StopAsyncIteration:
                return
            except Exception as error:
                log.exception("%s", subject)
                finding, observations = failed_effect(error, subject), None
                if finding.what != written and self._may_say(subject):
                    self.tell(finding)
                    written = finding.what
                await asyncio.sleep(next(pauses))
                continue
            pauses = _pauses()
            if not self._state.dismissing:
                self.feed(_as_event(seen, self._clock()))

    async def _watch_time(self) -> None:
        while True:
            self._wake.clear()
            now = self._clock()
            due = [key for key, at in self._state.deadlines.items() if at <= now]
            if due and not self.holding:
                self.feed(*(DeadlinePassed(at=now, deadline=key) for key in due))
                continue
            next_at = None if self.holding else min(self._state.deadlines.values(), default=None)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), None if next_at is None else next_at - now)

    async def _watch_clock(self) -> None:
        """Say when the wall clock is set; nothing here goes by it. Look at the log as often."""
        while True:
            await asyncio.sleep(LOOK_S)
            self._check_log()
            if jump_s := self._clock.jumped_s():
                self.tell(clock_jumped("the controller", jump_s))

    def _fold(self, event: AnyEvent) -> None:
        self._state, _ = self._machine.step(self._state, event)
        if isinstance(event, StepCommitted):
            self._thinning[event.replica].wrote(event)
        self._note(event)

    def _note(self, event: AnyEvent) -> None:
        """Keep what is not the machine's: how far each source was heard, how far each attempt's steps are known."""
        if event.source:
            self._seen[event.source] = max(self._seen.get(event.source, 0), event.seq)
        if tiding := _tiding(event):
            self._told.add(tiding)
        if isinstance(event, RunCreated):
            self._began = event.at
        if isinstance(event, StepCommitted | CheckpointCommitted):
            ledger = self._ledger(event.replica)
            if event.attempt == ledger.attempt and isinstance(event, StepCommitted):
                ledger.written = max(ledger.written, event.step)
                ledger.committed = max(ledger.committed, event.step)
            elif event.attempt == ledger.attempt:
                ledger.proven = max(ledger.proven, event.step)

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._settled)

    def _settled(self, task: asyncio.Task[None]) -> None:
        """A task fails here only where it feeds the machine what the machine holds to be impossible."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            give_way(error)


def _pauses() -> Iterator[float]:
    """Seconds to wait between the tries of what fails again and again."""
    pause_s = HOLD_S
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, LONGEST_HOLD_S)


def _as_event(seen: NodeObservation, at: float) -> AnyEvent:
    node, generation = seen.place.node, seen.place.generation
    match seen.sight:
        case Sight.MADE:
            return NodeMade(at=at, node=node, generation=generation, known_as=seen.known_as)
        case Sight.UNAVAILABLE:
            return NodeUnavailable(at=at, node=node, generation=generation, reason=seen.reason)
        case Sight.EVICTED:
            return NodeEvicted(at=at, node=node, generation=generation, reason=seen.reason)
        case Sight.GONE:
            return NodeGone(at=at, node=node, generation=generation, reason=seen.reason)


def give_way(error: BaseException) -> NoReturn:
    """What must not go unseen, such as what the machine holds to be impossible, ends this process.

    Another controller starts from the log.
    """
    log.critical("the controller failed and will be restarted from its log", exc_info=error)
    os._exit(ExitCode.INTERNAL)


def _leave_to_another() -> NoReturn:
    """Everything a controller does follows a line in the log; one that may write no more has nothing left to do."""
    log.critical("another controller has taken this run over; this one leaves, and touches nothing")
    os._exit(SUPERSEDED_STATUS)


_CLOCK_FIELDS = ("at", "last_step_at", "started", "ended")


_OF_EVERY_NODE = frozenset({"code-edited"})
"""Warnings that all nodes raise alike, since they read the same files."""


def _tiding(event: AnyEvent) -> Finding | None:
    """What an event only lets know, without where: many nodes find the same, and once is enough for who reads it."""
    if not isinstance(event, FindingRaised):
        return None
    if event.finding.severity is Severity.INFO or event.finding.code in _OF_EVERY_NODE:
        return msgspec.structs.replace(event.finding, where="")
    return None


def _on_our_clock(message: Timed, ahead_s: float) -> Timed:
    """Move the times of a message from its sender's clock to the controller's."""
    if not ahead_s:
        return message
    if isinstance(message, Progress):
        return msgspec.structs.replace(message, steps=tuple(_on_our_clock(step, ahead_s) for step in message.steps))
    times = {name: getattr(message, name) - ahead_s for name in _CLOCK_FIELDS if hasattr(message, name)}
    return msgspec.structs.replace(message, **times)
