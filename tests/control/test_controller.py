"""The controller with a backend and agents that behave: nothing lost, nothing doubled, whatever dies in between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec
import pytest
from tests.conftest import SmallDisk, fill

from holdfast.clock import Clock
from holdfast.control import controller, step_sampling
from holdfast.control.agent_connections import AgentConnection, ForeignMessage
from holdfast.control.commands import StartAttempt
from holdfast.control.controller import Controller
from holdfast.control.machine import Machine
from holdfast.control.state import NodeState, ReplicaPhase
from holdfast.errors import ExitCode, failure
from holdfast.events import (
    AgentConnected,
    AgentEvent,
    AnyEvent,
    AttemptStarted,
    CancelRequested,
    CheckpointCommitted,
    ControllerStarted,
    DeviceFault,
    DeviceFaultObserved,
    ExitReason,
    FaultAction,
    FaultInjected,
    FaultRequested,
    FaultTarget,
    FindingRaised,
    NodeTerminated,
    Outcome,
    RankExited,
    RanksStarted,
    RanksStopped,
    RankState,
    RecoveryDecided,
    RunCreated,
    RunFinished,
    ShutdownDecided,
    StepCommitted,
)
from holdfast.events.log import read_events
from holdfast.events.log_writer import EventWriter
from holdfast.findings import Finding, Owner, Severity
from holdfast.job.backend import BackendNodeState, NodeId, NodeObservation
from holdfast.job.quarantine import MachineEvidence
from holdfast.job.spec import Job, Nodes
from holdfast.protocol.orders import (
    Acknowledge,
    AnyOrder,
    NodeStep,
    Order,
    Progress,
    Shutdown,
    StartRanks,
    StopRanks,
    encode,
    order_decoder,
)

NODES = 2


class Nowhere:
    """A backend whose nodes are agents made by the test."""

    def __init__(self) -> None:
        self.made: list[NodeId] = []
        self.told: list[tuple[Outcome, int]] = []
        self.cancelled = False
        self.seen: asyncio.Queue[NodeObservation] = asyncio.Queue()

    async def submit(self, node_ids: tuple[NodeId, ...]) -> None:
        self.made.extend(node_ids)

    async def observe(self) -> AsyncIterator[NodeObservation]:
        while True:
            yield await self.seen.get()
            self.seen.task_done()

    async def replace_node(self, node_id: NodeId, reason: str) -> None:
        self.made.append(node_id)

    def generation(self, node: int, address: str) -> int | None: ...

    async def uncordon(self, node_id: NodeId) -> None: ...

    async def quarantined(self) -> tuple[Finding, ...]:
        return ()

    async def avoid_machine(
        self, node_id: NodeId, machine: str, evidence: MachineEvidence | None
    ) -> tuple[Finding, ...]:
        return ()

    async def cordon(self, node_id: NodeId) -> None: ...

    async def report_outcome(self, outcome: Outcome, exit_code: int, reason: str) -> None:
        assert not self.cancelled
        self.told.append((outcome, exit_code))

    async def cancel(self) -> None:
        """Remove every node that is left, which is then seen like any other end of one."""
        self.cancelled = True
        for place in dict.fromkeys(self.made):
            self.lose(place)
        await self.seen.join()

    def lose(self, place: NodeId) -> None:
        self.seen.put_nowait(
            NodeObservation(node_id=place, state=BackendNodeState.TERMINATED, reason="its agent was ended by SIGKILL")
        )


@dataclass
class Agent:
    """An agent with its outbox, and one connection at a time; it obeys immediately."""

    node: int
    generation: int = 0
    clock_ahead_s: float = 0.0
    outbox: dict[int, AgentEvent | Progress] = field(default_factory=dict)
    seq: int = 0
    known: int = -1
    port: int = 4000
    orders: list[AnyOrder] = field(default_factory=list)
    link: AgentConnection | None = None
    closed: bool = False
    dismissed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def source(self) -> str:
        return f"node{self.node}.{self.generation}/x"

    # The controller's end of the connection

    def send(self, order: Order) -> None:
        known = order_decoder.decode(encode(order))
        self.orders.append(known)
        match known:
            case Acknowledge(seq=safe):
                self.outbox = {seq: message for seq, message in self.outbox.items() if seq > safe}
            case StartRanks() if known.attempt > self.known:
                self.known = known.attempt
                ranks = (RankState(rank=self.node, pid=1),)
                self.put(RanksStarted(at=1.0, node=self.node, replica=0, attempt=self.known, ranks=ranks))
            case Shutdown():
                self.dismissed.set()
            case _:
                pass

    def after_sent(self, act: Callable[[], None]) -> None:
        act()

    def close(self) -> None:
        self.closed = True

    # The agent's

    def join(self, controller: Controller) -> None:
        joined = AgentConnected(
            at=100.0 + self.clock_ahead_s,
            source=self.source,
            node=self.node,
            generation=self.generation,
            incarnation="x",
            hostname="h",
            address=f"10.0.0.{self.node}",
            port=self.port,
            pid=1,
            attempt=self.known,
            unacked_seq=max(self.outbox, default=0),
        )
        self.link = controller.agent_connected(self, joined)

    def leave(self, controller: Controller) -> None:
        assert self.link is not None
        controller.agent_disconnected(self.link)
        self.link = None

    def put(self, message: AgentEvent | Progress) -> None:
        self.seq += 1
        self.outbox[self.seq] = msgspec.structs.replace(message, source=self.source, seq=self.seq)

    def speak(self, controller: Controller) -> None:
        """Say all that is not acknowledged, again where it was said before."""
        for message in list(self.outbox.values()):
            assert self.link is not None
            controller.agent_messages(self.link, [message])

    def passes(self, *steps: int) -> None:
        at = self.clock_ahead_s
        passed = tuple(NodeStep(step=step, started=at + step, ended=at + step + 1) for step in steps)
        self.put(Progress(node=self.node, replica=0, attempt=self.known, steps=passed))

    def exits(self, code: int = 0) -> None:
        self.put(
            RankExited(
                at=50.0,
                node=self.node,
                replica=0,
                attempt=self.known,
                rank=self.node,
                reason=ExitReason.CODE,
                code=code,
                has_session=True,
            )
        )

    def stops(self) -> None:
        self.port += 1
        self.put(RanksStopped(at=51.0, node=self.node, replica=0, attempt=self.known, port=self.port))


class Desk:
    """A run's log, its agents, and the controller of the moment."""

    def __init__(
        self, path: Path, *, reserve_bytes: int = 0, backend: Nowhere | None = None, failing_starts: int = 0
    ) -> None:
        self.path = path
        self.now = 100.0
        self._reserve_bytes = reserve_bytes
        self.backend = backend or Nowhere()
        self.failing_starts = failing_starts
        """How often what ranks are given cannot be worked out."""
        self.broken: list[FaultRequested] = []
        self.agents = [Agent(node) for node in range(NODES)]
        self.controller = self._controller([])
        self.controller.handle(RunCreated(at=self.now, run="r", job={}))
        self.begin()

    def _controller(self, history: list[AnyEvent]) -> Controller:
        self._writer = EventWriter(self.path, reservation_bytes=self._reserve_bytes)
        return Controller(
            machine=Machine(Job(command=("train",), nodes=Nodes(min=NODES, max=NODES))),
            writer=self._writer,
            history=history,
            backend=self.backend,
            start_orders=self._orders,
            inject_fault=self._break,
            incarnation="c",
            clock=partial(Clock, wall=lambda: self.now, monotonic=lambda: self.now),
        )

    def _orders(self, start: StartAttempt, members: tuple[NodeState, ...]) -> Callable[[int], StartRanks]:
        if self.failing_starts:
            self.failing_starts -= 1
            raise ValueError("no launch")
        return lambda node: StartRanks(replica=start.replica, attempt=start.attempt, ranks=())

    async def _break(self, drill: FaultRequested) -> None:
        self.broken.append(drill)
        if drill.target is not FaultTarget.CONTROLLER:
            raise failure(
                "fault-unavailable", "no network here can be cut", exit_code=ExitCode.CANNOT_RUN_HERE, remedy="none"
            )

    def begin(self) -> None:
        self.controller.handle(ControllerStarted(at=self.now, pid=1, incarnation="c"))

    def die(self) -> None:
        """The controller dies, and another takes over from the log; every connection is gone."""
        for task in self.controller._tasks:
            task.cancel()
        if self.controller._flush_timer is not None:
            self.controller._flush_timer.cancel()
        self._writer.close()
        for agent in self.agents:
            agent.link = None
        self.controller = self._controller(read_events(self.path))
        self.begin()

    def running(self) -> Desk:
        for agent in self.agents:
            agent.join(self.controller)
        self.speak()
        return self

    def speak(self) -> None:
        for agent in self.agents:
            if agent.link is not None:
                agent.speak(self.controller)

    def events(self, *kinds: type[AnyEvent]) -> list[AnyEvent]:
        return [event for event in read_events(self.path) if isinstance(event, kinds)]

    def steps(self) -> list[tuple[int, int]]:
        return [(step.attempt, step.step) for step in self.events(StepCommitted) if isinstance(step, StepCommitted)]

    @property
    def phase(self) -> ReplicaPhase:
        return self.controller._state.replicas[0].phase


Scene = Callable[[Desk], None]


def run(path: Path, scene: Scene) -> None:
    async def play() -> None:
        desk = Desk(path / "events.jsonl")
        try:
            scene(desk)
        finally:
            desk._writer.close()

    asyncio.run(play())


def test_event_sent_again_is_written_once(tmp_path: Path) -> None:
    def scene(desk: Desk) -> None:
        desk.running()
        first, _ = desk.agents
        first.exits()
        said = first.outbox.copy()
        first.speak(desk.controller)
        first.outbox = said
        first.speak(desk.controller)
        desk.die()
        first.outbox = said
        first.join(desk.controller)
        first.speak(desk.controller)
        assert len(desk.events(RankExited)) == 1
        assert len(desk.events(RanksStarted)) == NODES
        assert first.outbox == {}

    run(tmp_path, scene)


def test_what_many_nodes_only_let_know_is_told_once_and_a_warning_each_time(tmp_path: Path) -> None:
    def scene(desk: Desk) -> None:
        desk.running()
        for agent in desk.agents:
            for severity in (Severity.INFO, Severity.WARNING):
                finding = Finding(code="a", what="b", severity=severity, where=f"rank {agent.node}")
                agent.put(FindingRaised(at=1.0, finding=finding))
            edited = Finding(code="code-edited", what="c", severity=Severity.WARNING, where="train.py")
            agent.put(FindingRaised(at=1.0, finding=edited))
            agent.speak(desk.controller)
            assert agent.outbox == {}
            desk.die()
            for each in desk.agents:
                each.join(desk.controller)
        told = [event.finding for event in desk.events(FindingRaised) if isinstance(event, FindingRaised)]
        assert [each.where for each in told if each.severity is Severity.INFO] == ["rank 0"]
        assert [each.where for each in told if each.severity is Severity.WARNING] == ["rank 0", "train.py", "rank 1"]

    run(tmp_path, scene)


def test_progress_is_acknowledged_when_it_is_committed_and_not_before(tmp_path: Path) -> None:
    def scene(desk: Desk) -> None:
        first, second = desk.running().agents
        first.passes(1, 2)
        first.exits()
        first.speak(desk.controller)
        assert len(first.outbox) == 2
        second.passes(1)
        second.speak(desk.controller)
        assert desk.steps() == [(0, 1)]
        assert len(first.outbox) == 2
        second.passes(2)
        second.speak(desk.controller)
        assert first.outbox == {}
        assert desk.steps() == [(0, 1), (0, 2)]

    run(tmp_path, scene)


def test_progress_of_a_dead_attempt_is_acknowledged(tmp_path: Path) -> None:
    def scene(desk: Desk) -> None:
        first, second = desk.running().agents
        for agent in desk.agents:
            agent.passes(1)
        desk.speak()
        first.passes(2)
        second.exits(1)
        for agent in desk.agents:
            agent.stops()
        desk.speak()
        assert desk.phase is ReplicaPhase.RUNNING
        desk.speak()
        assert first.outbox == {}
        assert desk.steps() == [(0, 1)]

    run(tmp_path, scene)


def test_words_before_a_reconnection_are_not_acknowledged_before_they_came_again(tmp_path: Path) -> None:
    """A successor knows from the log that it has event 3, but progress 2 died with its forerunner's memory."""

    def scene(desk: Desk) -> None:
        first, second = desk.running().agents
        first.passes(1)
        first.put(CheckpointCommitted(at=1.0, node=0, replica=0, attempt=0, step=0, path="p"))
        first.speak(desk.controller)
        desk.die()
        first.join(desk.controller)
        second.join(desk.controller)
        second.put(CheckpointCommitted(at=1.0, node=1, replica=0, attempt=0, step=0, path="p"))
        second.passes(1)
        second.speak(desk.controller)
        desk.controller.handle(StepCommitted(at=1.0, replica=0, attempt=0, step=0, started=0, ended=0))
        assert len(first.outbox) == 2
        first.speak(desk.controller)
        assert desk.steps()[-1] == (0, 1)
        assert first.outbox == {}

    run(tmp_path, scene)


def test_agent_that_connects_again_replaces_its_connection(tmp_path: Path) -> None:
    def scene(desk: Desk) -> None:
        first, _ = desk.running().agents
        former = first.link
        first.join(desk.controller)
        assert first.closed
        assert former is not None
        desk.controller.agent_disconnected(former)
        assert desk.controller._state.timers == {}
        assert [order for order in first.orders if isinstance(order, StartRanks)] != []

    run(tmp_path, scene)


def test_order_lost_with_a_connection_is_given_again(tmp_path: Path) -> None:
    def scene(desk: Desk) -> None:
        first, second = desk.agents
        first.join(desk.controller)
        second.join(desk.controller)
        second.known, second.outbox = -1, {}  # the order never reached it
        second.join(desk.controller)
        assert second.known == 0
        assert len(desk.events(AttemptStarted)) == 1

    run(tmp_path, scene)


def test_agent_of_a_given_up_generation_is_told_to_leave(tmp_path: Path) -> None:
    def scene(desk: Desk) -> None:
        first, _ = desk.running().agents
        first.leave(desk.controller)
        desk.controller.handle(NodeTerminated(at=1.0, node=0, generation=0, reason="gone"))
        first.join(desk.controller)
        assert first.link is None
        assert first.orders[-1] == Shutdown()

    run(tmp_path, scene)


def test_agent_that_joins_a_run_at_its_end_is_told_to_leave(tmp_path: Path) -> None:
    def scene(desk: Desk) -> None:
        desk.controller.handle(CancelRequested(at=1.0))
        first, _ = desk.agents
        first.join(desk.controller)
        assert first.link is None
        assert first.orders == [Shutdown()]

    run(tmp_path, scene)


@pytest.mark.parametrize(
    "word",
    [
        RanksStopped(at=1.0, node=1, replica=0, attempt=0, port=1),
        RanksStopped(at=1.0, node=0, replica=7, attempt=0, port=1),
        Progress(node=1, replica=0, attempt=0, steps=()),
        AgentConnected(at=1, node=0, generation=0, incarnation="y", hostname="h", address="a", port=1, pid=1),
        RankExited(at=1.0, node=0, replica=0, attempt=0, rank=NODES, reason=ExitReason.CODE),
    ],
)
def test_word_about_another_node_is_refused_and_not_written(tmp_path: Path, word: AgentEvent) -> None:
    def scene(desk: Desk) -> None:
        first, _ = desk.running().agents
        before = read_events(desk.path)
        first.put(word)
        with pytest.raises(ForeignMessage):
            first.speak(desk.controller)
        assert read_events(desk.path) == before

    run(tmp_path, scene)


def test_node_far_ahead_of_the_others_is_not_kept_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller, "MAX_STEPS_AHEAD", 5)

    def scene(desk: Desk) -> None:
        first, second = desk.running().agents
        for step in range(1, 9):
            first.passes(step)
        with pytest.raises(ForeignMessage, match="5 steps ahead"):
            first.speak(desk.controller)
        first.leave(desk.controller)
        second.passes(*range(1, 9))
        second.speak(desk.controller)
        first.join(desk.controller)
        first.speak(desk.controller)
        assert desk.steps() == [(0, step) for step in range(1, 9)]

    run(tmp_path, scene)


def test_times_of_a_clock_that_is_ahead_are_moved_to_ours(tmp_path: Path) -> None:
    def scene(desk: Desk) -> None:
        desk.agents[1].clock_ahead_s = 1000.0
        desk.running()
        for agent in desk.agents:
            agent.passes(1)
        desk.speak()
        (step,) = desk.events(StepCommitted)
        assert isinstance(step, StepCommitted)
        assert (step.started, step.ended) == (1.0, 2.0)

    run(tmp_path, scene)


def test_step_proven_by_a_checkpoint_is_committed_though_a_nodes_word_died_with_it(tmp_path: Path) -> None:
    def scene(desk: Desk) -> None:
        first, _ = desk.running().agents
        for agent in desk.agents:
            agent.passes(1)
        desk.speak()
        first.passes(2, 3)
        first.put(CheckpointCommitted(at=1.0, node=0, replica=0, attempt=0, step=2, path="p"))
        first.speak(desk.controller)
        assert desk.steps() == [(0, 1)]  # node 1 may only be late
        desk.controller.handle(NodeTerminated(at=1.0, node=1, generation=0, reason="gone"))
        assert desk.steps() == [(0, 1), (0, 2)]

    run(tmp_path, scene)


def test_step_proven_by_a_checkpoint_outlives_the_controller(tmp_path: Path) -> None:
    def scene(desk: Desk) -> None:
        first, _ = desk.running().agents
        first.passes(1, 2)
        first.put(CheckpointCommitted(at=1.0, node=0, replica=0, attempt=0, step=1, path="p"))
        first.speak(desk.controller)
        desk.die()
        desk.controller.handle(NodeTerminated(at=1.0, node=1, generation=0, reason="gone"))
        first.join(desk.controller)
        first.speak(desk.controller)
        assert desk.steps() == [(0, 1)]

    run(tmp_path, scene)


def test_run_ends_with_its_agents_dismissed_and_every_node_removed(tmp_path: Path) -> None:
    async def play() -> None:
        desk = Desk(tmp_path / "events.jsonl")
        work = asyncio.ensure_future(desk.controller.run())
        await asyncio.sleep(0)
        desk.running()
        for agent in desk.agents:
            agent.exits()
            agent.stops()
        desk.speak()
        for agent in desk.agents:
            await asyncio.wait_for(agent.dismissed.wait(), 5)
            assert desk.backend.told == [(Outcome.SUCCEEDED, 0)]
            agent.leave(desk.controller)
        await asyncio.wait_for(work, 5)
        assert desk.backend.cancelled
        assert desk.controller.finished
        assert read_events(desk.path)[-1] == RunFinished(
            at=100.0, outcome=Outcome.SUCCEEDED, exit_code=0, reason="every rank finished"
        )

    asyncio.run(play())


def _dies_before_the_second_node_reports(desk: Desk) -> None:
    """The first node's exit is in the log; its steps are not, since the second has not reported them."""
    first, second = desk.running().agents
    for agent in desk.agents:
        agent.passes(1, 2)
        agent.exits()
        agent.stops()
    first.speak(desk.controller)
    desk.die()
    second.join(desk.controller)
    second.speak(desk.controller)


def _dies_once_the_end_is_decided(desk: Desk) -> None:
    _dies_before_the_second_node_reports(desk)
    desk.die()


@pytest.mark.parametrize("scene", [_dies_before_the_second_node_reports, _dies_once_the_end_is_decided])
def test_run_waits_at_its_end_for_steps_that_agents_have_yet_to_send_again(tmp_path: Path, scene: Scene) -> None:
    async def play() -> None:
        desk = Desk(tmp_path / "events.jsonl")
        scene(desk)
        assert desk.controller._state.shutting_down
        assert desk.steps() == []
        for agent in desk.agents:
            if agent.link is None:
                agent.join(desk.controller)
                agent.speak(desk.controller)
        for agent in desk.agents:
            await asyncio.wait_for(agent.dismissed.wait(), 5)
            agent.leave(desk.controller)
        await asyncio.wait_for(desk.controller._finished.wait(), 5)
        assert desk.steps() == [(0, 1), (0, 2)]
        assert len(desk.events(RankExited)) == len(desk.events(RanksStopped)) == NODES
        desk._writer.close()

    asyncio.run(play())


def test_run_ends_without_an_agent_that_does_not_return(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller, "RESEND_TIMEOUT_S", 0.01)

    async def play() -> None:
        desk = Desk(tmp_path / "events.jsonl")
        _dies_before_the_second_node_reports(desk)
        first, second = desk.agents
        await asyncio.wait_for(second.dismissed.wait(), 5)
        first.join(desk.controller)
        assert Shutdown() in first.orders
        for agent in desk.agents:
            agent.leave(desk.controller)
        await asyncio.wait_for(desk.controller._finished.wait(), 5)
        desk._writer.close()

    asyncio.run(play())


def test_node_that_its_back_end_removes_at_the_end_is_no_news_and_one_that_went_before_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller, "AGENT_SHUTDOWN_S", 0.0)  # no agent has left when its time is up

    async def play() -> None:
        desk = Desk(tmp_path / "events.jsonl")
        work = asyncio.ensure_future(desk.controller.run())
        await asyncio.sleep(0)
        first, second = desk.running().agents
        desk.controller.handle(CancelRequested(at=1.0))
        desk.backend.lose(NodeId(node=1, generation=0))
        await asyncio.wait_for(desk.backend.seen.join(), 5)
        first.stops()
        first.speak(desk.controller)
        assert second.link is not None
        await asyncio.wait_for(work, 5)
        assert desk.backend.cancelled
        told = [
            event
            for event in read_events(desk.path)
            if isinstance(event, ShutdownDecided | NodeTerminated | RunFinished)
        ]
        assert [type(event) for event in told] == [ShutdownDecided, NodeTerminated, RunFinished]
        assert [event.node for event in told if isinstance(event, NodeTerminated)] == [1]

    asyncio.run(play())


class Clumsy(Nowhere):
    """A backend each of whose commands fails, `failures` times in all."""

    def __init__(self, failures: int) -> None:
        super().__init__()
        self.failures = failures

    def _stumble(self) -> None:
        if self.failures:
            self.failures -= 1
            raise KeyError(f"stray {self.failures}")

    async def submit(self, node_ids: tuple[NodeId, ...]) -> None:
        self._stumble()
        await super().submit(node_ids)

    async def observe(self) -> AsyncIterator[NodeObservation]:
        self._stumble()
        async for seen in super().observe():
            yield seen

    async def replace_node(self, node_id: NodeId, reason: str) -> None:
        self._stumble()
        await super().replace_node(node_id, reason)

    async def report_outcome(self, outcome: Outcome, exit_code: int, reason: str) -> None:
        self._stumble()
        await super().report_outcome(outcome, exit_code, reason)

    async def cancel(self) -> None:
        self._stumble()
        await super().cancel()


def test_failing_command_is_a_finding_with_its_cause_tried_again_and_never_the_end_of_the_controller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller, "RETRY_S", 0.0)
    monkeypatch.setattr(controller, "AGENT_SHUTDOWN_S", 0.0)

    async def play() -> None:
        desk = Desk(tmp_path / "events.jsonl", backend=Clumsy(failures=12), failing_starts=2)
        work = asyncio.ensure_future(desk.controller.run())
        backend = desk.backend
        async with asyncio.timeout(20):
            while len(backend.made) < NODES:  # noqa: ASYNC110 - nothing rings when they are
                await asyncio.sleep(0)
            desk.running()
            while desk.failing_starts:  # noqa: ASYNC110 - nothing rings when they are over
                await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert desk.phase is ReplicaPhase.RUNNING
            desk.speak()
            backend.lose(NodeId(node=1, generation=0))
            await backend.seen.join()
            while NodeId(node=1, generation=1) not in backend.made:  # noqa: ASYNC110
                await asyncio.sleep(0)
            desk.controller.handle(CancelRequested(at=1.0))
            desk.agents[0].stops()
            desk.agents[0].speak(desk.controller)
            assert isinstance(backend, Clumsy)
            backend.failures = controller.SHUTDOWN_TRIES * 2
            await work
        assert desk.controller.finished
        found = [event.finding for event in desk.events(FindingRaised) if isinstance(event, FindingRaised)]
        assert {finding.code for finding in found} == {"command-failed"}
        subjects = [finding.what for finding in found]
        for begins in ("nodes cannot be made yet: ", "attempt 0 cannot be started yet: ", "nodes cannot be watched: "):
            assert any(subject.startswith(begins) for subject in subjects), begins
        assert subjects[-1].startswith("the run's remaining nodes could not be removed: KeyError: 'stray ")
        assert all("stray" in finding.evidence[0] or "no launch" in finding.evidence[0] for finding in found)

    asyncio.run(play())


def test_command_that_fails_with_other_words_each_time_is_tried_ever_less_often_and_said_once_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    sleep = asyncio.sleep

    async def at_once(seconds: float) -> None:
        waited.append(seconds)
        await sleep(0)

    async def play() -> None:
        desk = Desk(tmp_path / "events.jsonl", backend=Clumsy(failures=20))
        monkeypatch.setattr(asyncio, "sleep", at_once)
        async with asyncio.timeout(20):
            while len(desk.backend.made) < NODES:
                await sleep(0)
        monkeypatch.undo()
        assert waited[:7] == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
        assert len(desk.events(FindingRaised)) == 1

    asyncio.run(play())


def test_junk_in_the_log_again_and_again_is_said_once_a_minute(tmp_path: Path) -> None:
    def scene(desk: Desk) -> None:
        for _ in range(5):
            with desk.path.open("ab") as log:
                log.write(b"junk\n")
            desk.controller._check_log()
        assert len(desk.events(FindingRaised)) == 1

    run(tmp_path, scene)


def steps_stood_for(desk: Desk) -> list[tuple[int, int]]:
    """Attempt and number of every step in the log, those that share a line one by one."""
    lines = [line for line in desk.events(StepCommitted) if isinstance(line, StepCommitted)]
    return [(line.attempt, step) for line in lines for step in range(line.first, line.step + 1)]


@pytest.fixture
def thin(monkeypatch: pytest.MonkeyPatch) -> None:
    """A log that is thinned from its third line."""
    monkeypatch.setattr(step_sampling, "FULL_RATE_LINES", 3)


@pytest.mark.usefixtures("thin")
def test_step_that_is_kept_back_is_not_acknowledged_and_survives_the_controller(tmp_path: Path) -> None:
    def scene(desk: Desk) -> None:
        first, second = desk.running().agents
        for step in range(101, 130):
            first.passes(step)
            second.passes(step)
            desk.speak()
        written = steps_stood_for(desk)
        assert len(desk.steps()) < len(written) < 29
        assert first.outbox
        desk.die()
        for agent in desk.agents:
            agent.join(desk.controller)
        desk.speak()
        desk.controller.handle(NodeTerminated(at=1000.0, node=1, generation=0, reason="gone"))
        assert steps_stood_for(desk) == [(0, step) for step in range(101, 130)]
        assert first.outbox == {}

    run(tmp_path, scene)


@pytest.mark.usefixtures("thin")
def test_what_happens_is_written_after_the_steps_before_it(tmp_path: Path) -> None:
    def scene(desk: Desk) -> None:
        first, second = desk.running().agents
        first.passes(*range(101, 121))
        second.passes(*range(101, 120))
        second.put(CheckpointCommitted(at=1.0, node=1, replica=0, attempt=0, step=119, path="p"))
        second.passes(120)
        desk.speak()
        kinds = (StepCommitted, CheckpointCommitted)
        seen = [event.step for event in desk.events(*kinds) if isinstance(event, kinds)]
        assert seen[-2:] == [119, 119]
        assert seen == sorted(seen)
        assert steps_stood_for(desk) == [(0, step) for step in range(101, 120)]
        desk.controller.handle()
        assert steps_stood_for(desk)[-1] == (0, 120)

    run(tmp_path, scene)


@pytest.mark.usefixtures("thin")
def test_drill_that_waits_for_a_step_has_it_at_once(tmp_path: Path) -> None:
    def scene(desk: Desk) -> None:
        desk.running()
        desk.controller.handle(
            FaultRequested(at=1.0, target=FaultTarget.CONTROLLER, index=0, action=FaultAction.KILL, at_step=1000)
        )
        for agent in desk.agents:
            agent.passes(*range(101, 120))
        desk.speak()
        assert desk.steps() == [(0, step) for step in range(101, 120)]

    run(tmp_path, scene)


def _gathering(desk: Desk) -> None:
    desk.agents[0].join(desk.controller)


def _starting(desk: Desk) -> None:
    """The order to start reached one node only."""
    for agent in desk.agents:
        agent.join(desk.controller)
    desk.agents[1].known = -1
    desk.agents[1].outbox.clear()


def _running(desk: Desk) -> None:
    desk.running()
    desk.agents[0].passes(1)
    desk.speak()


def _stopping(desk: Desk) -> None:
    desk.running()
    for agent in desk.agents:
        agent.passes(1)
    desk.speak()
    desk.agents[1].exits(9)
    desk.agents[1].speak(desk.controller)


def _unsaid(desk: Desk) -> None:
    """Everything has happened on the nodes, and nothing of it has been heard."""
    desk.running()
    for agent in desk.agents:
        agent.passes(1)
        agent.exits()
        agent.stops()


@pytest.mark.parametrize("scene", [_gathering, _starting, _running, _stopping, _unsaid])
@pytest.mark.parametrize("deaths", [1, 3])
def test_controller_that_dies_in_any_phase_loses_and_doubles_nothing(tmp_path: Path, scene: Scene, deaths: int) -> None:
    def play(desk: Desk) -> None:
        scene(desk)
        for _ in range(deaths):
            before = desk.controller._state
            desk.die()
            assert desk.controller._state.replicas == before.replicas
            for agent in desk.agents:
                agent.join(desk.controller)
                agent.speak(desk.controller)
        desk.speak()
        if desk.phase is ReplicaPhase.STOPPING:
            assert any(isinstance(order, StopRanks) for order in desk.agents[0].orders)
            for agent in desk.agents:
                agent.stops()
            desk.speak()
            desk.speak()
            assert len(desk.events(RecoveryDecided)) == 1
        if desk.phase is ReplicaPhase.RUNNING:
            for agent in desk.agents:
                agent.passes(1, 2)
                agent.exits()
                agent.stops()
            desk.speak()
            desk.speak()
        assert desk.phase is ReplicaPhase.DONE
        assert len(desk.steps()) == len(set(desk.steps()))
        attempts = desk.controller._state.replicas[0].attempt + 1
        assert len(desk.events(AttemptStarted)) == attempts
        assert len(desk.events(RanksStarted)) == attempts * NODES
        said = [(event.source, event.seq) for event in read_events(desk.path) if event.seq]
        assert len(said) == len(set(said))
        assert len(desk.events(RanksStopped)) == attempts * NODES

    run(tmp_path, play)


def test_drill_no_agent_can_do_is_told_first_and_a_refusal_is_a_finding(tmp_path: Path) -> None:
    async def play() -> None:
        desk = Desk(tmp_path / "events.jsonl").running()
        asked = FaultRequested(at=5.0, target=FaultTarget.NODE, index=1, action=FaultAction.PARTITION, for_s=1.0)
        desk.controller.handle(asked)
        await asyncio.gather(*desk.controller._tasks)
        assert desk.broken == [asked]
        done, refused = desk.events(FaultInjected, FindingRaised)
        assert isinstance(done, FaultInjected)
        assert (done.node, done.requested_at) == (1, 5.0)
        assert isinstance(refused, FindingRaised)
        assert refused.finding.code == "fault-unavailable"

    asyncio.run(play())


@pytest.mark.root
def test_full_disk_holds_everything_and_loses_nothing(small_disk: SmallDisk) -> None:
    async def play() -> None:
        disk = small_disk(256 << 10)
        desk = Desk(disk / "events.jsonl").running()
        ballast = fill(disk)
        first, second = desk.agents
        for step in range(1, 101):
            first.passes(step)
            second.passes(step)
            desk.speak()
        assert desk.controller.write_blocked
        committed = len(desk.steps())
        assert committed < 100
        first.exits(code=1)
        desk.speak()
        unsafe = first.outbox.copy()
        assert unsafe
        assert desk.controller.unwritten_s() > 0
        assert StopRanks not in map(type, second.orders)
        first.leave(desk.controller)
        first.join(desk.controller)
        first.speak(desk.controller)
        assert first.outbox == unsafe

        ballast.unlink()
        async with asyncio.timeout(60):
            await asyncio.gather(*desk.controller._tasks)
        assert not desk.controller.write_blocked
        assert steps_stood_for(desk) == [(0, step) for step in range(1, 101)]
        assert len(desk.events(RankExited)) == 1
        assert desk.controller.unwritten_s() == 0
        assert first.outbox == second.outbox == {}
        assert StopRanks in map(type, second.orders)

    asyncio.run(play())


@pytest.mark.root
def test_full_disk_with_space_kept_is_said_in_the_log_and_lets_the_run_be_cancelled(small_disk: SmallDisk) -> None:
    async def play() -> None:
        disk = small_disk(1 << 20)
        desk = Desk(disk / "events.jsonl", reserve_bytes=512 << 10).running()
        fill(disk)
        first, second = desk.agents
        step = 0
        while not desk.controller.write_blocked:
            step += 1
            first.passes(step)
            second.passes(step)
            first.put(FindingRaised(at=1.0, finding=Finding(code="a-code", what="x" * 1000)))
            desk.speak()
        told = [event for event in desk.events(FindingRaised) if isinstance(event, FindingRaised)]
        (said,) = [event for event in told if event.finding.code == "disk-full"]
        assert any(line.startswith(f"tmpfs on {disk}: 0 of ") for line in said.finding.evidence)
        desk.controller.handle(CancelRequested(at=1.0))
        assert not desk.controller.write_blocked
        assert len(steps_stood_for(desk)) == step
        assert StopRanks in map(type, second.orders)

    asyncio.run(play())


@pytest.mark.root
def test_pending_message_is_not_acknowledged(small_disk: SmallDisk) -> None:
    async def play() -> None:
        disk = small_disk(256 << 10)
        desk = Desk(disk / "events.jsonl").running()
        ballast = fill(disk)
        first, _ = desk.agents
        said = 0
        while not desk.controller.write_blocked:
            assert first.outbox == {}
            said += 1
            first.put(FindingRaised(at=1.0, finding=Finding(code="a-code", what="x" * 1000)))
            first.speak(desk.controller)
        assert len(first.outbox) == 1
        ballast.unlink()
        async with asyncio.timeout(60):
            await asyncio.gather(*desk.controller._tasks)
        assert first.outbox == {}
        assert len(desk.events(FindingRaised)) == said

    asyncio.run(play())


class SlowToRemember(Nowhere):
    """A backend that takes a while to remember a bad machine, and fails the first time."""

    def __init__(self) -> None:
        super().__init__()
        self.tries = 0
        self.remembered: list[tuple[NodeId, str]] = []

    async def avoid_machine(
        self, node_id: NodeId, machine: str, evidence: MachineEvidence | None
    ) -> tuple[Finding, ...]:
        self.tries += 1
        await asyncio.sleep(0)
        if self.tries == 1:
            raise OSError("not yet")
        assert not self.told, "the run has not ended before it is remembered"
        assert evidence is not None
        self.remembered.append((node_id, evidence.finding.code))
        return (msgspec.structs.replace(GPU_FAILED, code="machine-quarantined", severity=Severity.WARNING),)


GPU_FAILED = Finding(code="gpu-failed", what="GPU 3 is lost", owner=Owner.CLUSTER)


def test_machine_whose_fault_ends_the_run_is_remembered_before_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller, "RETRY_S", 0.0)
    monkeypatch.setattr(controller, "AGENT_SHUTDOWN_S", 0.0)

    async def play() -> None:
        backend = SlowToRemember()
        desk = Desk(tmp_path / "events.jsonl", backend=backend)
        work = asyncio.ensure_future(desk.controller.run())
        await asyncio.sleep(0)
        for generation in (0, 1):
            agent = Agent(0, generation)
            agent.join(desk.controller)
            fault = DeviceFault.GPU
            desk.controller.handle(
                DeviceFaultObserved(at=desk.now, node=0, generation=generation, fault=fault, finding=GPU_FAILED)
            )
        await asyncio.wait_for(work, 10)
        (ended,) = (event for event in read_events(desk.path) if isinstance(event, ShutdownDecided))
        assert ended.finding is not None
        assert ended.finding.code == "node-check-failed"
        lost = {NodeId(node=0, generation=generation) for generation in (0, 1)}
        assert set(backend.remembered) == {(node_id, "gpu-failed") for node_id in lost}
        codes = [event.finding.code for event in read_events(desk.path) if isinstance(event, FindingRaised)]
        assert "machine-quarantined" in codes

    asyncio.run(play())
