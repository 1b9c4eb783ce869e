"""Does the I/O of the state machine: logs events, feeds them to the machine and executes its commands.

Decides nothing. The order is always: write the event to the log, move the state, execute the commands; so the next
controller can resume from the log wherever this one dies.

One long file, because receiving, holding back, writing, acknowledging and executing are one sequence over one state,
and must be read together.
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
from typing import NoReturn

import msgspec

import holdfast
from holdfast import events
from holdfast.clock import JUMP_POLL_S, Clock, clock_jumped
from holdfast.control.agent_connections import (
    AgentConnection,
    AgentPeer,
    AgentRegistry,
    ForeignMessage,
    clock_offset_s,
    to_controller_time,
)
from holdfast.control.commands import (
    AvoidMachine,
    CheckNode,
    Command,
    Cordon,
    FinishRun,
    InjectFault,
    PrepareNode,
    RecordEvent,
    ReplaceNode,
    Send,
    StartAttempt,
    StartProbe,
    StartReplay,
    SubmitNodes,
    Uncordon,
)
from holdfast.control.controller_findings import command_failed, disk_space_finding, repair_findings
from holdfast.control.event_batching import MAX_BATCH_DELAY_S, EventBatcher
from holdfast.control.log_replication import LogReplicator
from holdfast.control.machine import Machine
from holdfast.control.node_readings import NodeReadingsStore
from holdfast.control.run_watch import RunWatch
from holdfast.control.state import NodeState, State
from holdfast.control.step_commit import StepTracker
from holdfast.control.step_sampling import MAX_INTERVAL_S, StepSampler, first_at, merge_steps
from holdfast.errors import ExitCode, HoldfastError
from holdfast.events.log_writer import AnotherWriter, EventWriter
from holdfast.findings import Finding, Severity
from holdfast.job.backend import Backend, BackendNodeState, NodeId, NodeObservation
from holdfast.os_errors import resource_error_of, waiting_finding
from holdfast.protocol.orders import (
    AgentMessage,
    NodeReadings,
    PrepareStandby,
    ProbeNode,
    Progress,
    ReplayNode,
    Shutdown,
    StackRound,
    StartRanks,
    UnknownMessage,
)
from holdfast.protocol.orders import CheckNode as CheckNodeOrder

log = logging.getLogger("holdfast.controller")

MAX_STEPS_AHEAD = 100_000
"""Steps that one node may be ahead of others; those are kept in memory, about 60 MB."""

RETRY_S = 1.0
"""Seconds between two tries of an operation that failed with a resource error."""

MAX_RETRY_S = 30.0
"""Maximum seconds between two tries of a failed command; each wait is twice as long as the previous one."""

REPEAT_FINDING_S = 60.0
"""Minimum seconds between two findings about one subject, however often its error text changes."""

SHUTDOWN_TRIES = 5
"""Tries to remove the nodes before a run ends without it."""

AVOID_TIMEOUT_S = 15.0
"""Longest time that the run's end waits until bad machines are remembered."""

RESEND_TIMEOUT_S = 3.0
"""Maximum seconds that a run's end waits for agents of an earlier controller that have not connected to this one."""

AGENT_SHUTDOWN_S = 3.0
"""Seconds that agents have to exit by themselves before the target removes them."""


class Controller:
    """Runs one job from its log, its state machine and its backend.

    `start_orders` expands a StartAttempt among these nodes into the launch of each rank, and `probe_orders` a numbered
    probe; they are injected because launching is outside `control`. So are `inject_fault`, which injects faults that no
    agent can, and `on_rendezvous`, which receives each replica's rendezvous address. `log_replicator` replicates the
    log to nodes if it may be lost with its machine.
    """

    def __init__(
        self,
        *,
        machine: Machine,
        writer: EventWriter,
        history: Iterable[events.AnyEvent],
        backend: Backend,
        start_orders: Callable[[StartAttempt, tuple[NodeState, ...]], Callable[[int], StartRanks]],
        inject_fault: Callable[[events.FaultRequested], Awaitable[None]],
        check_order: CheckNodeOrder | None = None,
        probe_orders: Callable[[StartAttempt, tuple[NodeState, ...], int], Callable[[int], ProbeNode]] | None = None,
        on_rendezvous: Callable[[Mapping[int, str]], None] | None = None,
        log_replicator: LogReplicator | None = None,
        incarnation: str,
        clock: Callable[..., Clock] = Clock,
    ) -> None:
        self._machine = machine
        self._writer = writer
        self._backend = backend
        self._start_orders = start_orders
        self._inject_outside = inject_fault
        self._check_order = check_order
        self._probe_orders = probe_orders
        self._on_rendezvous = on_rendezvous
        self._log_replicator = log_replicator
        self._incarnation = incarnation
        self._agents = AgentRegistry()
        self.node_readings = NodeReadingsStore(self._agents)
        self._step_trackers: dict[int, StepTracker] = {}
        self._step_samplers: defaultdict[int, StepSampler] = defaultdict(StepSampler)
        self._run_watch = RunWatch()
        self._batcher = EventBatcher()
        self._last_seq: dict[str, int] = {}
        self._reported_info: set[Finding] = set()
        """Informational findings already reported, without their location."""
        self._last_reported_at: dict[str, float] = {}
        """When a finding about a subject was last written (monotonic seconds)."""
        self._pending: tuple[events.AnyEvent, ...] = ()
        """Events that wait for the log."""
        self._space_low = False
        self.write_blocked = False
        """Whether the log cannot be written at the moment."""
        self._state = State()
        self._created_at = 0.0
        self._flush_timer: asyncio.TimerHandle | None = None
        self._wake = asyncio.Event()
        self._finished = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._avoiding: list[asyncio.Task[None]] = []
        """What remembers bad machines: the run's end waits for it."""
        former, latest = None, 0.0
        for event in history:
            self._replay(event)
            latest = max(latest, event.at)
            if isinstance(event, events.ControllerStarted):
                former = event.clock
        self._clock = clock(former, not_before=latest)

    @property
    def finished(self) -> bool:
        return self._state.finished

    async def run(self) -> None:
        """Take over the run and run it to its end."""
        now = self._clock.sample
        self.handle(
            events.ControllerStarted(
                at=now.at, pid=os.getpid(), incarnation=self._incarnation, clock=now, version=holdfast.__version__
            )
        )
        self._spawn(self._watch_nodes())
        self._spawn(self._watch_timers())
        self._spawn(self._watch_clock())
        self._retry("the quarantined machines cannot be avoided yet", self._avoid_quarantined)
        await self._finished.wait()
        for task in self._tasks:
            task.cancel()

    def handle_request(self, request: events.RequestEvent) -> None:
        """Handle a user's request as an event of this controller, dated now."""
        self.handle(msgspec.structs.replace(request, at=self._clock(), source="", seq=0))

    def report(self, *findings: Finding) -> None:
        """Log findings that by themselves change nothing."""
        self.handle(*self._found(*findings))

    def _found(self, *findings: Finding) -> tuple[events.FindingRaised, ...]:
        return tuple(events.FindingRaised(at=self._clock(), finding=finding) for finding in findings)

    def handle(self, *happened: events.AnyEvent) -> None:
        """Handle events after those held back, or hold them while the log cannot be written."""
        self._enqueue([*self._unflushed(), *happened])

    def _enqueue(self, happened: Sequence[events.AnyEvent]) -> None:
        """Handle only these events, or hold them while the log cannot be written; nothing follows `RunFinished`.

        Held events change nothing yet: nothing is acknowledged or commanded; ranks and agents continue. A request to
        end the run may use the last of the space reserved for the log.
        """
        if self._state.finished:
            return
        self._pending = (*self._pending, *happened)
        if self.write_blocked:
            self._pending = merge_steps(self._pending, lambda replica: self._state.replicas[replica].highest_step)
        if not self.write_blocked or any(isinstance(event, events.CancelRequested) for event in happened):
            self._commit()

    def _commit(self) -> None:
        """Write held events and the decisions they lead to in one batch; then act on them."""
        state, batch, self._pending = self._state, self._pending, ()
        lines: list[events.AnyEvent] = []
        commands: list[Command] = []
        for event in batch:
            state, more = self._machine.step(state, event)
            lines.append(event)
            lines.extend(command.event for command in more if isinstance(command, RecordEvent))
            commands.extend(command for command in more if not isinstance(command, RecordEvent))
        decisive = any(isinstance(line, events.RunCreated | events.RunFinished) for line in lines)
        try:
            self._writer.append(lines, sync=decisive, ending=state.ending is not None)
        except AnotherWriter:
            _exit_superseded()
        except OSError as error:
            self._pending = batch
            self._block_writes(error)
            return
        self._state = state
        if self._on_rendezvous is not None:
            self._on_rendezvous(state.rendezvous_by_replica)
        for event in batch:
            self._track(event)
        # before orders that follow from it: an agent that executes an order has its cause in the log replica
        if self._log_replicator is not None:
            self._log_replicator.replicate(self._agents)
        self._wake.set()
        was_blocked, self.write_blocked = self.write_blocked, False
        if was_blocked:
            log.warning("the log can be written again, and the run continues")
        for command in commands:
            self._execute(command)
        if was_blocked or any(isinstance(event, events.StepCommitted | events.BatchedEvent) for event in batch):
            self._agents.acknowledge_all()
        if state.finished:
            self._finished.set()
        if more := (*self._checkpointed_steps(), *self._disk_space_findings(), *self._repair_findings()):
            self._enqueue(more)

    def _block_writes(self, error: OSError) -> None:
        if not self.write_blocked:
            self.write_blocked = True
            self._agents.pause_acks()
            log.error(
                "%s", waiting_finding(error, "the event log cannot be written, so the run waits", self._writer.path)
            )
            self._spawn(self._retry_writes())

    async def _retry_writes(self) -> None:
        while self.write_blocked:
            await asyncio.sleep(RETRY_S)
            self._commit()

    def _disk_space_findings(self) -> tuple[events.FindingRaised, ...]:
        """Findings for when the log begins, or ceases, to use the space reserved for it."""
        error, path = self._writer.space_error, self._writer.path
        if (error is not None) is self._space_low or self._state.finished:
            return ()
        self._space_low = error is not None
        return self._found(disk_space_finding(error, path))

    def _check_log(self) -> None:
        """Verify that the log is unchanged, so that a foreign change is undone before any reader misses an event."""
        if not self.write_blocked:
            self._check_writer()
            if found := self._repair_findings():
                self._enqueue(found)

    def _check_writer(self) -> None:
        try:
            self._writer.check()
        except AnotherWriter:
            _exit_superseded()
        except OSError as error:
            log.warning("the event log cannot be looked at: %s", error)

    def _repair_findings(self) -> tuple[events.FindingRaised, ...]:
        """Findings about undone changes to the log that no controller made."""
        repairs, path = self._writer.repairs, str(self._writer.path)
        if not repairs or not self._may_report(path):
            return ()
        findings = repair_findings(repairs, path)
        repairs.clear()
        return self._found(*findings)

    def _may_report(self, subject: str) -> bool:
        """Whether enough time has passed since the last finding about a subject; if so, the time restarts."""
        now = time.monotonic()
        if now - self._last_reported_at.get(subject, -math.inf) < REPEAT_FINDING_S:
            return False
        self._last_reported_at[subject] = now
        return True

    def _unflushed(self) -> list[events.AnyEvent]:
        """Events held back so that many messages, or many steps, become one line."""
        steps = (line for sampler in self._step_samplers.values() for line in sampler.flush())
        return [*steps, *self._batcher.flush(self._state)]

    def unwritten_s(self) -> float:
        """Age in seconds of the oldest event that is not in the log yet; 0 if all are."""
        steps = (sampler.pending for sampler in self._step_samplers.values() if sampler.pending is not None)
        waiting = (*steps, *self._pending, *self._batcher.held)
        return max(0.0, self._clock() - min(map(first_at, waiting))) if waiting else 0.0

    def _flush_within(self, seconds: float) -> None:
        """Ensure that the events held back now are written within `seconds`."""
        loop = asyncio.get_running_loop()
        if self._flush_timer is not None and loop.time() < self._flush_timer.when() <= loop.time() + seconds:
            return
        if self._flush_timer is not None:
            self._flush_timer.cancel()
        self._flush_timer = loop.call_later(seconds, lambda: self._spawn(self._flush()))

    async def _flush(self) -> None:
        self.handle()

    # Agents

    def agent_connected(self, peer: AgentPeer, joined: events.AgentConnected) -> AgentConnection | None:
        """Handle an agent's hello; returns None, after ordering it to shut down, if its node has been replaced.

        One that reconnects while the run shuts down changes nothing by that: only what it resends is missing.
        Raises `ForeignMessage` for a source that does not match the node.
        """
        if joined.source != f"node{joined.node}.{joined.generation}/{joined.incarnation}":
            raise ForeignMessage(f"node{joined.node}.{joined.generation} sends as {joined.source!r}")
        node = self._state.nodes[joined.node] if 0 <= joined.node < len(self._state.nodes) else None
        replaced = node is None or joined.generation != node.generation
        if node is None or replaced or self._state.finished or (self._state.shutting_down and node.is_missing):
            self._check_writer()  # another controller may have given the node this slot
            log.info("agent of node%s.%s is no longer wanted", joined.node, joined.generation)
            peer.send(Shutdown())
            return None
        connection = AgentConnection(peer=peer, joined=joined, clock_offset_s=clock_offset_s(self._clock, joined))
        if self._log_replicator is not None and joined.log_replica is not None:
            connection.replicated_bytes = self._log_replicator.position_of(joined.node, joined.log_replica)
        self._agents.add(connection)
        if not self._state.shutting_down:
            self.handle(msgspec.structs.replace(joined, at=self._clock(), log_replica=None, unacked_seq=0))
        return connection

    def agent_messages(self, connection: AgentConnection, messages: list[AgentMessage | UnknownMessage]) -> None:
        """Handle an agent's messages, each once, and acknowledge those that are in the log, or unknown.

        Raises `ForeignMessage` for a message about another node.
        """
        happened: list[events.AnyEvent] = []
        seen = self._last_seq.get(connection.joined.source, 0)
        replica = self._state.nodes[connection.joined.node].replica
        for message in messages:
            connection.check_origin(message, replica=replica, world_size=self._machine.job.world_size)
            if isinstance(message, Progress):
                happened.extend(self._on_progress(connection, message))
            elif isinstance(message, UnknownMessage):
                log.warning("%s sent a message that this version does not know: %s", message.source, message.type)
            elif isinstance(message, NodeReadings):
                self.node_readings.add(message)
            elif isinstance(message, StackRound):
                state = self._state.replicas[message.replica]
                happened.extend(self._run_watch.add_stacks(message, self._machine.job, state, self._clock()))
            elif message.seq > seen:
                seen = self._last_seq[connection.joined.source] = message.seq
                word = to_controller_time(message, connection.clock_offset_s)
                if self._batcher.offer(self._state, word):
                    connection.unacked.append((message.seq, partial(self._batcher.is_flushed, self._batcher.rounds)))
                elif _info_key(word) not in self._reported_info:
                    happened += [*self._unflushed(), word]
            connection.last_received_seq = max(connection.last_received_seq, message.seq)
        if self._batcher.is_complete(self._state):
            happened += self._unflushed()
        elif self._batcher:
            self._flush_within(MAX_BATCH_DELAY_S)
        if happened or (happened := self._checkpointed_steps()):
            self._enqueue(happened)
        self._agents.note_received(connection)
        if not self.write_blocked:
            connection.acknowledge()

    def agent_disconnected(self, connection: AgentConnection) -> None:
        """Handle a closed agent connection."""
        if not self._agents.remove(connection):
            return
        joined = connection.joined
        self.handle(
            events.AgentDisconnected(
                at=self._clock(), node=joined.node, generation=joined.generation, incarnation=joined.incarnation
            )
        )

    def _on_progress(self, connection: AgentConnection, progress: Progress) -> list[events.AnyEvent]:
        tracker = self._step_tracker(progress.replica)
        if progress.attempt != tracker.attempt or not progress.steps:
            return []
        if tracker.ahead(progress.node) >= MAX_STEPS_AHEAD:
            raise ForeignMessage(f"node{progress.node} is {MAX_STEPS_AHEAD} steps ahead of others")
        last = progress.steps[-1].step
        connection.unacked.append((progress.seq, partial(self._is_written, progress.replica, progress.attempt, last)))
        steps = tracker.add(to_controller_time(progress, connection.clock_offset_s), self._clock())
        observed = self._run_watch.add_phases(progress, self._clock())
        observed += [one for step in steps for one in self._run_watch.add_step(step, nodes=len(tracker.nodes))]
        return [*(line for step in steps for line in self._sampled(step)), *observed]

    def _sampled(self, step: events.StepCommitted) -> list[events.StepCommitted]:
        """The log lines of a newly committed step; a step that a fault waits for is logged immediately."""
        sampler, highest = self._step_samplers[step.replica], self._state.replicas[step.replica].highest_step
        lines = sampler.add(
            step,
            age_s=step.ended - self._created_at,
            highest=highest,
            at_once=bool(self._state.pending_faults),
            low_space=self._space_low,
        )
        if sampler.pending:
            self._flush_within(MAX_INTERVAL_S)
        return lines

    def _is_written(self, replica: int, attempt: int, step: int) -> bool:
        """Whether a step need not be sent again: it is in the log, or its attempt is over."""
        tracker = self._step_tracker(replica)
        return attempt != tracker.attempt or step <= tracker.written

    def _checkpointed_steps(self) -> list[events.AnyEvent]:
        """Steps that only a checkpoint proves: in a replica that no longer runs, missing messages may never arrive."""
        return [
            line
            for index, tracker in self._step_trackers.items()
            if tracker.checkpointed > tracker.committed and self._has_ended(tracker)
            for step in tracker.commit_checkpointed(self._clock())
            for line in self._step_samplers[index].add(step, age_s=0.0, highest=step.step, at_once=True)
        ]

    def _has_ended(self, tracker: StepTracker) -> bool:
        """Whether its attempt is the replica's last, and no longer running."""
        replica = self._state.replicas[tracker.replica]
        return not replica.is_running and replica.attempt == tracker.attempt

    def _step_tracker(self, index: int) -> StepTracker:
        """The step tracker of a replica's current attempt."""
        replica = self._state.replicas[index]
        tracker = self._step_trackers.get(index)
        if tracker is None or tracker.attempt != replica.attempt:
            tracker = self._step_trackers[index] = StepTracker(index, replica.attempt, replica.members)
        return tracker

    # Commands

    def _execute(self, command: Command) -> None:
        match command:
            case Send(order=order, nodes=nodes):
                self._agents.send(nodes, lambda _: order)
            case StartAttempt(replica=replica, attempt=attempt):
                current = partial(self._is_current_attempt, replica, attempt)
                subject = f"attempt {attempt} cannot be started yet"
                self._send_or_retry(subject, partial(self._send_start, command), current)
            case CheckNode(node=node, number=number):
                if self._check_order is not None:
                    order = msgspec.structs.replace(self._check_order, number=number)
                    self._agents.send((node,), lambda _: order)
            case StartProbe(replica=replica, number=number):
                subject = f"the nodes of replica {replica} cannot be probed yet"
                probing = partial(self._is_probing, replica, number)
                self._send_or_retry(subject, partial(self._send_probe, command), probing)
            case StartReplay(replica=replica, number=number):
                subject = f"the nodes of replica {replica} cannot replay steps yet"
                replaying = partial(self._is_replaying, replica, number)
                self._send_or_retry(subject, partial(self._send_replay, command), replaying)
            case PrepareNode(node=node):
                self._send_or_retry(f"node{node} cannot be made ready yet", partial(self._send_prepare, node))
            case SubmitNodes(node_ids=node_ids):
                requested = partial(self._is_still_requested, node_ids)
                self._retry("nodes cannot be made yet", partial(self._backend.submit, node_ids), requested)
            case ReplaceNode(node_id=node_id, reason=reason):
                requested = partial(self._is_still_requested, (node_id,))
                replace = partial(self._backend.replace_node, node_id, reason)
                self._retry(f"node{node_id.node} cannot be replaced yet", replace, requested)
            case AvoidMachine(node_id=node_id):
                subject = f"the machine of node{node_id.node} cannot be avoided yet"
                avoid = partial(self._avoid_machine, command)
                self._avoiding.append(self._spawn(self._retry_until_done(subject, avoid, lambda: True, at_end=True)))
            case Cordon(node_id=node_id):
                subject = f"the machine of node{node_id.node} cannot be put out of use yet"
                self._retry(subject, partial(self._backend.cordon, node_id))
            case Uncordon(node_id=node_id):
                subject = f"the machine of node{node_id.node} cannot be used again yet"
                self._retry(subject, partial(self._backend.uncordon, node_id))
            case InjectFault(fault=fault):
                self._spawn(self._inject_fault(fault))
            case FinishRun():
                self._spawn(self._finish())
            case RecordEvent():
                pass  # it is in the log by now

    async def _avoid_quarantined(self) -> None:
        self.report(*await self._backend.quarantined())

    async def _avoid_machine(self, command: AvoidMachine) -> None:
        self.report(*await self._backend.avoid_machine(command.node_id, command.machine, command.evidence))

    def _retry(
        self, subject: str, act: Callable[[], Awaitable[None]], current: Callable[[], bool] = lambda: True
    ) -> None:
        self._spawn(self._retry_until_done(subject, act, current))

    def _send_or_retry(
        self, subject: str, send: Callable[[], None], current: Callable[[], bool] = lambda: True
    ) -> None:
        """Send orders that are computed per node; retry later if that fails."""
        try:
            send()
        except Exception:

            async def again() -> None:
                send()

            self._retry(subject, again, current)

    def _send_start(self, command: StartAttempt) -> None:
        numbers = self._state.replicas[command.replica].members
        members = tuple(self._state.nodes[number] for number in numbers)
        self._agents.send(command.nodes, self._start_orders(command, members))

    def _send_probe(self, command: StartProbe) -> None:
        members = tuple(self._state.nodes[number] for number in command.members)
        start = StartAttempt(
            replica=command.replica,
            attempt=0,
            nodes=command.members,
            master_addr=members[0].address,
            master_port=members[0].port,
        )
        if self._probe_orders is not None:
            self._agents.send(command.members, self._probe_orders(start, members, command.number))

    def _is_probing(self, replica: int, number: int) -> bool:
        probe = self._state.replicas[replica].probe
        return probe is not None and probe.number == number

    def _send_replay(self, command: StartReplay) -> None:
        """Start each group like a separate attempt, whose first node has rank 0."""
        for group in command.groups:
            members = tuple(self._state.nodes[number] for number in group)
            start = StartAttempt(
                replica=command.replica,
                attempt=self._state.replicas[command.replica].attempt,
                nodes=group,
                master_addr=members[0].address,
                master_port=members[0].port,
                code=command.code,
                checkpoints_back=command.checkpoints_back,
            )
            starts = self._start_orders(start, members)
            self._agents.send(
                tuple(node for node in group if node in command.nodes),
                lambda node, starts=starts, group=group: ReplayNode(
                    replica=command.replica,
                    number=command.number,
                    start=starts(node),
                    nodes=group,
                    until_step=command.until_step,
                    deadline_s=command.deadline_s,
                ),
            )

    def _is_replaying(self, replica: int, number: int) -> bool:
        replay = self._state.replicas[replica].replay
        return replay is not None and replay.number == number

    def _send_prepare(self, node: int) -> None:
        members = (self._state.nodes[node], *self._state.nodes_of(0)[1:])
        start = StartAttempt(replica=0, attempt=0, nodes=(node,), master_addr="", master_port=0, code=self._state.code)
        launches = self._start_orders(start, members)
        self._agents.send((node,), lambda node: PrepareStandby(start=launches(node)))

    def _is_still_requested(self, node_ids: Iterable[NodeId]) -> bool:
        """Whether any of these nodes is still to be created: later generations may have been requested instead."""
        return any(self._state.nodes[node_id.node].generation == node_id.generation for node_id in node_ids)

    def _is_current_attempt(self, replica: int, attempt: int) -> bool:
        return self._state.replicas[replica].attempt == attempt

    async def _retry_until_done(
        self, subject: str, act: Callable[[], Awaitable[None]], current: Callable[[], bool], *, at_end: bool = False
    ) -> None:
        """Execute a command; retry until it succeeds, is no longer `current`, or the run ends; `at_end`: once then too.

        A failure affects only this command: its cause is logged, and the machine, which waits for the command's effect,
        decides what follows if it does not come.
        """
        written, pauses = "", _retry_delays()
        while (at_end or not self._state.ending) and current():
            at_end = at_end and not self._state.ending
            try:
                await act()
                return
            except Exception as error:
                finding = command_failed(error, subject)
                if resource_error_of(error) is None:
                    log.exception("%s", subject)
            if finding.what != written and self._may_report(subject):
                self.report(finding)
                written = finding.what
            await asyncio.sleep(next(pauses))

    async def _inject_fault(self, fault: events.FaultRequested) -> None:
        """Inject a fault that no agent can, logged first: the fault may hit this process."""
        log.warning("drill: %s %s %s", fault.action, fault.target, fault.index)
        node = fault.index if fault.target.is_numbered else -1
        done = events.FaultInjected(
            at=self._clock(), node=node, requested_at=fault.at, target=fault.target.value, action=fault.action.value
        )
        self.handle(done)
        try:
            await self._inject_outside(fault)
        except HoldfastError as error:
            self.report(*error.findings)
        except Exception as error:
            log.exception("the drill failed")
            self.report(command_failed(error, f"the drill {fault.action} {fault.target} failed", retried=False))

    async def _finish(self) -> None:
        ending = self._state.ending
        assert ending is not None, "FinishRun follows the decision to end"
        outcome, code, reason = ending.outcome, ending.exit_code, ending.reason
        if self._avoiding:
            await asyncio.wait(self._avoiding, timeout=AVOID_TIMEOUT_S)
        present = {node.node for node in self._state.nodes if not node.is_missing}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RESEND_TIMEOUT_S):
                await self._agents.wait_resent(present)
        conclude = partial(self._backend.report_outcome, outcome, code, reason)
        await self._try_at_shutdown("the target cannot be notified how the run ended", conclude)
        self._agents.dismiss()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(AGENT_SHUTDOWN_S):
                await self._agents.wait_empty()
        await self._try_at_shutdown("the run's remaining nodes could not be removed", self._backend.cancel)
        self.handle(events.RunFinished(at=self._clock(), outcome=outcome, exit_code=code, reason=reason))

    async def _try_at_shutdown(self, subject: str, act: Callable[[], Awaitable[None]]) -> None:
        """Do a step of the run's end; after `SHUTDOWN_TRIES` tries the run ends without it."""
        for left in reversed(range(SHUTDOWN_TRIES)):
            try:
                await act()
                return
            except Exception as error:
                log.exception("%s", subject)
                if not left:
                    self.report(command_failed(error, subject, retried=False))
                    return
            await asyncio.sleep(RETRY_S)

    # Watching

    async def _watch_nodes(self) -> None:
        """Log the backend's observations of nodes, until all are to be removed."""
        subject = "nodes cannot be watched"
        observations, written, pauses = None, "", _retry_delays()
        while True:
            try:
                observations = observations or self._backend.observe()
                seen = await anext(observations)
            except StopAsyncIteration:
                return
            except Exception as error:
                log.exception("%s", subject)
                finding, observations = command_failed(error, subject), None
                if finding.what != written and self._may_report(subject):
                    self.report(finding)
                    written = finding.what
                await asyncio.sleep(next(pauses))
                continue
            pauses = _retry_delays()
            if isinstance(seen, Finding):
                self.report(seen)
            elif not self._state.shutting_down:
                self.handle(_to_event(seen, self._clock()))

    async def _watch_timers(self) -> None:
        while True:
            self._wake.clear()
            now = self._clock()
            due = [key for key, at in self._state.timers.items() if at <= now]
            if due and not self.write_blocked:
                self.handle(*(events.TimerExpired(at=now, timer=key) for key in due))
                continue
            next_at = None if self.write_blocked else min(self._state.timers.values(), default=None)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), None if next_at is None else next_at - now)

    async def _watch_clock(self) -> None:
        """Report a changed wall clock, which affects nothing here; check the log at the same interval."""
        while True:
            await asyncio.sleep(JUMP_POLL_S)
            self._check_log()
            if jump_s := self._clock.jumped_s():
                self.report(clock_jumped("the controller", jump_s))

    def _replay(self, event: events.AnyEvent) -> None:
        self._state, _ = self._machine.step(self._state, event)
        if isinstance(event, events.StepCommitted):
            self._step_samplers[event.replica].on_written(event)
        self._track(event)

    def _track(self, event: events.AnyEvent) -> None:
        """Track what the machine does not: the last message of each source, the written steps of each attempt."""
        if event.source:
            self._last_seq[event.source] = max(self._last_seq.get(event.source, 0), event.seq)
        if info := _info_key(event):
            self._reported_info.add(info)
        if isinstance(event, events.RunCreated):
            self._created_at = event.at
        if isinstance(event, events.FindingRaised | events.StragglerObserved):
            self._run_watch.note(event)
        if isinstance(event, events.StepCommitted | events.CheckpointCommitted):
            tracker = self._step_tracker(event.replica)
            if event.attempt == tracker.attempt and isinstance(event, events.StepCommitted):
                tracker.written = max(tracker.written, event.step)
                tracker.committed = max(tracker.committed, event.step)
            elif event.attempt == tracker.attempt:
                tracker.checkpointed = max(tracker.checkpointed, event.step)

    def _spawn(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        """A task fails here only if it feeds the machine an event that the machine holds to be impossible."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            crash(error)


def _retry_delays() -> Iterator[float]:
    """Seconds between the tries of an operation that fails repeatedly."""
    pause_s = RETRY_S
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, MAX_RETRY_S)


def _to_event(seen: NodeObservation, at: float) -> events.AnyEvent:
    node, generation = seen.node_id.node, seen.node_id.generation
    match seen.state:
        case BackendNodeState.CREATED:
            return events.NodeCreated(
                at=at, node=node, generation=generation, backend_id=seen.backend_id, machine=seen.machine
            )
        case BackendNodeState.UNAVAILABLE:
            return events.NodeUnavailable(at=at, node=node, generation=generation, reason=seen.reason)
        case BackendNodeState.EVICTED:
            return events.NodeEvicted(at=at, node=node, generation=generation, reason=seen.reason)
        case BackendNodeState.TERMINATED:
            return events.NodeTerminated(at=at, node=node, generation=generation, reason=seen.reason)


def crash(error: BaseException) -> NoReturn:
    """Exit this process after an unexpected error, such as an event that the machine holds to be impossible.

    The next controller resumes from the log.
    """
    log.critical("the controller failed and will be restarted from its log", exc_info=error)
    os._exit(ExitCode.INTERNAL)


def _exit_superseded() -> NoReturn:
    """Exit: everything a controller does follows a log line, and this one may write no more."""
    log.critical("another controller has taken this run over; this one leaves, and touches nothing")
    os._exit(ExitCode.SUPERSEDED)


_OF_EVERY_NODE = frozenset({"code-edited"})
"""Warnings that all nodes raise alike, since they read the same files."""


def _info_key(event: events.AnyEvent) -> Finding | None:
    """The finding of an informational event, without location: many nodes find the same, and one report is enough."""
    if not isinstance(event, events.FindingRaised):
        return None
    if event.finding.severity is Severity.INFO or event.finding.code in _OF_EVERY_NODE:
        return msgspec.structs.replace(event.finding, where="")
    return None
