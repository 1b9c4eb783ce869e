"""The transitions that matter, one at a time; test_world.py mixes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import pytest

from holdfast.control.commands import (
    Command,
    FinishRun,
    InjectFault,
    RecordEvent,
    ReplaceNode,
    Send,
    StartAttempt,
    SubmitNodes,
)
from holdfast.control.machine import Machine
from holdfast.control.policy import HANG_VERDICT_S, STOP_GRACE_S
from holdfast.control.requests import MAX_DUMP_INTERVAL_S, MIN_DUMP_INTERVAL_S, dump_interval_s
from holdfast.control.state import NodePhase, ReplicaPhase, State
from holdfast.events import (
    AgentConnected,
    AgentDisconnected,
    AnyEvent,
    AttemptStarted,
    CancelRequested,
    CheckpointRequested,
    ControllerStarted,
    ExitReason,
    FaultAction,
    FaultInjected,
    FaultRequested,
    FaultTarget,
    NodeCreated,
    NodeEvicted,
    NodePreemptionNotice,
    NodeRequested,
    NodeTerminated,
    Outcome,
    ProfileRequested,
    RankExited,
    RankHung,
    RanksStopped,
    RecoveryDecided,
    RunCreated,
    RunFinished,
    ShutdownDecided,
    StackDumpRequested,
    StepCommitted,
    TimerExpired,
)
from holdfast.job.backend import NodeId
from holdfast.job.heartbeat_timeouts import HeartbeatTimeouts
from holdfast.job.spec import Job, Launch, Nodes, Recovery
from holdfast.protocol import orders
from holdfast.protocol.orders import (
    AnnounceReplicaDown,
    AnnounceReplicaStarting,
    DumpStacks,
    ProfileSteps,
    ReportSilentRanks,
    StopRanks,
    TakeCheckpoint,
)

OneOrder = TypeVar("OneOrder", bound=orders.Order)
GRACE_S = 7.0
AWAY_S = HeartbeatTimeouts(node_grace_s=Recovery().node_grace_s).reconnect_s


class Run:
    """A machine with its state; `do` feeds it events and returns what it commands, decisions apart."""

    def __init__(
        self,
        *,
        nodes: int = 2,
        least: int | None = None,
        ranks: int = 1,
        replicas: int = 1,
        launch: Launch = Launch.PER_RANK,
        **recovery: Any,
    ) -> None:
        self.job = Job(
            command=("train",),
            nodes=Nodes(min=least or nodes, max=nodes),
            ranks_per_node=ranks,
            launch=launch,
            recovery=Recovery(**{"stop_grace_s": GRACE_S, "max_restarts": 2, "replicas": replicas, **recovery}),
        )
        self.machine = Machine(self.job)
        self.state = State()
        self.decisions: list[AnyEvent] = []
        self.do(RunCreated(at=0.0, run="r", job={}), ControllerStarted(at=0.0, pid=1, incarnation="c"))

    def do(self, *events: AnyEvent) -> list[Command]:
        done: list[Command] = []
        self.decisions = []
        for event in events:
            self.state, commands = self.machine.step(self.state, event)
            done.extend(command for command in commands if not isinstance(command, RecordEvent))
            self.decisions.extend(command.event for command in commands if isinstance(command, RecordEvent))
        return done

    def running(self) -> Run:
        """Every agent joins, and so every replica starts."""
        for node in self.state.nodes:
            self.do(joined(node.node))
        assert all(replica.phase is ReplicaPhase.RUNNING for replica in self.state.replicas)
        return self

    def phase(self, replica: int = 0) -> ReplicaPhase:
        return self.state.replicas[replica].phase


def joined(
    node: int, *, at: float = 1.0, generation: int = 0, incarnation: str = "", attempt: int = -1, port: int = 0
) -> AgentConnected:
    return AgentConnected(
        at=at,
        node=node,
        generation=generation,
        incarnation=incarnation or f"i{node}",
        hostname="h",
        address=f"10.0.0.{node}",
        port=port or 4000 + node,
        pid=1,
        attempt=attempt,
    )


def exited(
    node: int,
    *,
    code: int = 0,
    how: ExitReason = ExitReason.CODE,
    at: float = 10.0,
    attempt: int = 0,
    rank: int | None = None,
    replica: int = 0,
    stopped: bool = False,
    error: str = "",
    left: bool = False,
) -> RankExited:
    return RankExited(
        at=at,
        node=node,
        replica=replica,
        attempt=attempt,
        rank=node if rank is None else rank,
        reason=how,
        code=code,
        stopped=stopped,
        error=error,
        exited_on_request=left,
    )


def killed(node: int, **more: object) -> RankExited:
    return exited(node, how=ExitReason.SIGNAL, code=9, **more)  # type: ignore[arg-type]


def stopped(node: int, *, attempt: int = 0, port: int = 0, replica: int = 0) -> RanksStopped:
    return RanksStopped(at=11.0, node=node, replica=replica, attempt=attempt, port=port or 5000 + node)


def hung(node: int, *, at: float = 30.0) -> RankHung:
    return RankHung(at=at, node=node, replica=0, attempt=0, rank=node, last_step=3, last_step_at=at - 9, waited_s=9.0)


def left(node: int, *, at: float = 20.0) -> AgentDisconnected:
    return AgentDisconnected(at=at, node=node, generation=0, incarnation=f"i{node}")


def gone(node: int, *, at: float = 20.0, generation: int = 0) -> NodeTerminated:
    return NodeTerminated(at=at, node=node, generation=generation, reason="its agent ended")


def leaving(node: int, *, at: float = 20.0) -> NodePreemptionNotice:
    return NodePreemptionNotice(at=at, node=node, grace_s=GRACE_S)


def made(node: int, *, at: float = 0.5, generation: int = 0) -> NodeCreated:
    return NodeCreated(at=at, node=node, generation=generation)


def evicted(node: int, *, at: float = 19.0, generation: int = 0) -> NodeEvicted:
    return NodeEvicted(at=at, node=node, generation=generation, reason="its JobSet is suspended")


def stop(*nodes: int, replica: int = 0, attempt: int = 0, grace_s: float = 0.0) -> Send:
    return Send(order=StopRanks(replica=replica, attempt=attempt, grace_s=grace_s), nodes=nodes)


def look(*nodes: int, replica: int = 0, attempt: int = 0, everyone: bool = False) -> Send:
    return Send(order=ReportSilentRanks(replica=replica, attempt=attempt, all_ranks=everyone), nodes=nodes)


def fault(request: FaultRequested, node: int) -> Send:
    order = orders.InjectFault(
        requested_at=request.at,
        target=request.target,
        rank=request.index,
        index=request.index,
        action=request.action,
        at_step=request.at_step,
    )
    return Send(order=order, nodes=(node,))


def sent(commands: list[Command], kind: type[OneOrder]) -> list[tuple[OneOrder, tuple[int, ...] | None]]:
    """The orders of one kind, and the nodes that they go to."""
    return [(one.order, one.nodes) for one in commands if isinstance(one, Send) and isinstance(one.order, kind)]


# Gathering


def test_first_controller_asks_for_every_node_at_once() -> None:
    run = Run()
    places = (NodeId(node=0, generation=0), NodeId(node=1, generation=0))
    assert run.do(ControllerStarted(at=1.0, pid=2, incarnation="d")) == [SubmitNodes(node_ids=places)]
    assert run.decisions == [NodeRequested(at=1.0, node=0, generation=0), NodeRequested(at=1.0, node=1, generation=0)]


def test_last_agent_to_join_starts_the_attempt_at_the_heads_port() -> None:
    run = Run()
    assert run.do(joined(1)) == []
    start = StartAttempt(replica=0, attempt=0, nodes=(0, 1), master_addr="10.0.0.0", master_port=4000)
    assert run.do(joined(0, at=2.0)) == [start]
    assert run.decisions == [
        AttemptStarted(
            at=2.0, replica=0, attempt=0, world_size=2, master_addr="10.0.0.0", master_port=4000, nodes=(0, 1)
        )
    ]


def test_replicas_start_apart() -> None:
    run = Run(nodes=4, replicas=2)
    run.do(joined(2))
    assert [command.replica for command in run.do(joined(3)) if isinstance(command, StartAttempt)] == [1]
    assert run.phase(0) is ReplicaPhase.GATHERING


def test_agent_of_a_given_up_generation_is_ignored() -> None:
    run = Run()
    run.do(gone(1))
    before = run.state
    assert run.do(joined(1)) == []
    assert run.state == before


def test_node_lost_while_gathering_is_replaced_within_the_budget_only() -> None:
    run = Run()
    for generation in range(2):
        commands = run.do(gone(1, generation=generation))
        assert commands == [ReplaceNode(node_id=NodeId(node=1, generation=generation + 1), reason="its agent ended")]
    assert run.do(gone(1, generation=2)) == [FinishRun()]
    assert run.state.ending is not None
    assert run.state.ending.exit_code == 79


def failures(run: Run, *events: AnyEvent) -> list[tuple[str, str]]:
    """What each of these events has judged: the finding's code and what is done."""
    judged = list[tuple[str, str]]()
    for event in events:
        run.do(event)
        judged += [(one.finding.code, one.action) for one in run.decisions if isinstance(one, RecoveryDecided)]
    return judged


GANG = range(4)
"""More nodes than restarts in the budget, so that one failure per node would end the run."""


def test_gang_that_is_deleted_at_once_is_one_failure() -> None:
    run = Run(nodes=len(GANG)).running()
    judged = failures(
        run, *map(leaving, GANG), *map(stopped, GANG), *map(gone, GANG), *(joined(node, generation=1) for node in GANG)
    )
    assert judged == [("node-preempted", "replace the node and restart")]
    assert run.phase() is ReplicaPhase.RUNNING


def test_each_further_loss_of_the_same_slot_before_ranks_start_is_a_failure() -> None:
    run = Run(nodes=len(GANG)).running()
    judged = failures(run, *map(gone, GANG), *(gone(node, generation=1) for node in GANG))
    assert judged == [("node-lost", "replace the node and restart")] * 2
    again = failures(run, *(gone(node, generation=2) for node in GANG))
    assert again == [("node-lost", "stop")]
    assert run.state.ending is not None
    assert run.state.ending.exit_code == 79


def test_crash_whose_node_is_lost_afterwards_is_one_failure() -> None:
    run = Run().running()
    assert failures(run, killed(1), stopped(0), stopped(1), gone(1)) == [("rank-killed", "restart in place")]
    waiting = Run().running()
    waiting.do(killed(1), left(1), stopped(0))
    judged = failures(waiting, gone(1), gone(0))
    assert judged == [("rank-killed", "restart in place")]


@pytest.mark.parametrize("known", ["before", "after"])
def test_eviction_by_the_queue_costs_no_restart(known: str) -> None:
    """Whether the backend sees it before the agents get SIGTERM, or only when the attempt has been judged."""
    run = Run(nodes=len(GANG), max_restarts=1).running()
    for generation in range(3):
        told = [evicted(node, generation=generation) for node in GANG]
        parting = [*map(leaving, GANG), *(stopped(node, attempt=generation) for node in GANG)]
        judged = failures(
            run,
            *((*told, *parting) if known == "before" else (*parting, *told)),
            *(gone(node, generation=generation) for node in GANG),
            *(joined(node, generation=generation + 1) for node in GANG),
        )
        assert judged == [("node-preempted", "replace the node and restart")]
    assert run.phase() is ReplicaPhase.RUNNING
    assert failures(run, killed(1, attempt=3), *(stopped(node, attempt=3) for node in GANG))[0][1] == "restart in place"


def test_node_that_is_evicted_without_notice_costs_no_restart_where_none_is_allowed() -> None:
    run = Run(max_restarts=0).running()
    run.do(evicted(0), evicted(1), gone(0), gone(1))
    assert run.state.ending is None
    assert run.phase() is ReplicaPhase.GATHERING


@pytest.mark.parametrize("restarted", [False, True])
def test_eviction_while_nodes_are_still_joining_costs_no_restart(restarted: bool) -> None:
    """A controller that starts asks for nodes again that were made, and the backend still evicts them."""
    run = Run(max_restarts=0)
    run.do(made(0), made(1), joined(0))
    if restarted:
        run.do(ControllerStarted(at=2.0, pid=2, incarnation="d"), joined(0))
    run.do(evicted(0), evicted(1), gone(1), gone(0))
    assert run.state.ending is None
    assert run.phase() is ReplicaPhase.GATHERING


def test_eviction_of_a_node_that_has_not_joined_excuses_no_earlier_failure() -> None:
    run = Run(max_restarts=1)
    run.do(gone(1), made(1, generation=1), evicted(1, generation=1), gone(1, generation=1), joined(0))
    assert run.state.ending is None
    run.do(made(1, generation=2), gone(1, generation=2))
    assert run.state.ending is not None


# Success


def test_run_succeeds_when_every_rank_has_ended_well() -> None:
    run = Run().running()
    assert run.do(exited(0), exited(1), stopped(0)) == []
    assert run.do(stopped(1)) == [FinishRun()]
    assert [type(decision) for decision in run.decisions] == [ShutdownDecided]
    assert run.state.ending is not None
    assert run.state.ending.outcome is Outcome.SUCCEEDED


def test_one_process_a_node_is_enough_where_the_command_starts_its_own_ranks() -> None:
    run = Run(ranks=4, launch=Launch.PER_NODE).running()
    assert run.do(exited(0, rank=0), exited(1, rank=4), stopped(0), stopped(1)) == [FinishRun()]


def test_run_continues_while_one_replica_is_done() -> None:
    run = Run(nodes=2, replicas=2).running()
    assert run.do(exited(0, rank=0), stopped(0)) == []
    assert (run.phase(0), run.phase(1)) == (ReplicaPhase.DONE, ReplicaPhase.RUNNING)
    assert run.do(exited(1, rank=0, replica=1), stopped(1, replica=1)) == [FinishRun()]


def test_node_lost_after_its_ranks_ended_well_is_replaced_and_nothing_is_stopped() -> None:
    run = Run().running()
    commands = run.do(exited(0), stopped(0), gone(0))
    assert commands == [
        Send(order=orders.Shutdown(), nodes=(0,)),
        ReplaceNode(node_id=NodeId(node=0, generation=1), reason="its agent ended"),
    ]
    assert run.phase() is ReplicaPhase.RUNNING
    assert run.do(exited(1), stopped(1)) == [FinishRun()]


def test_node_lost_when_every_rank_had_ended_well_does_not_undo_the_success() -> None:
    run = Run().running()
    run.do(exited(0), exited(1), stopped(0), gone(1))
    assert run.state.ending is not None
    assert run.state.ending.outcome is Outcome.SUCCEEDED


# Failure


def test_failed_rank_stops_every_node_at_once_without_grace() -> None:
    run = Run().running()
    assert run.do(killed(1)) == [stop(0, 1)]
    assert run.state.timers == {"stop:0": 10.0 + STOP_GRACE_S}


def test_attempt_follows_when_all_is_quiet_with_a_fresh_port() -> None:
    run = Run().running()
    run.do(killed(1), stopped(1))
    start = StartAttempt(replica=0, attempt=1, nodes=(0, 1), master_addr="10.0.0.0", master_port=5000)
    assert run.do(stopped(0)) == [start]
    assert [type(decision) for decision in run.decisions] == [RecoveryDecided, AttemptStarted]
    assert run.state.timers == {}


def test_failure_of_one_replica_leaves_the_other_alone() -> None:
    run = Run(nodes=2, replicas=2).running()
    commands = run.do(killed(1, rank=0, replica=1))
    lost = Send(order=AnnounceReplicaDown(replica=1, attempt=0), nodes=(0,))
    assert commands == [stop(1, replica=1), lost]
    assert run.phase(0) is ReplicaPhase.RUNNING
    started = run.do(stopped(1, replica=1))
    assert [(one.replica, one.attempt, one.nodes) for one in started if isinstance(one, StartAttempt)] == [(1, 1, (1,))]
    assert started[-1] == Send(order=AnnounceReplicaStarting(replica=1, attempt=1), nodes=(0,))
    assert [replica.attempt for replica in run.state.replicas] == [0, 1]


def test_verdict_to_stop_ends_the_run_with_the_jobs_code() -> None:
    run = Run().running()
    assert run.do(exited(0, code=3), stopped(0), stopped(1)) == [stop(0, 1), FinishRun()]
    assert run.state.ending is not None
    assert (run.state.ending.outcome, run.state.ending.exit_code) == (Outcome.FAILED, 3)


def test_rank_that_a_launcher_names_is_on_the_node_that_has_it() -> None:
    run = Run(ranks=2, launch=Launch.MPI).running()
    run.do(msgspec.structs.replace(killed(0, rank=0), first_failed_rank=3))
    assert [(one.node, one.first_failed_rank) for one in run.state.replicas[0].rank_failures] == [(1, 3)]
    nobody = Run(ranks=2, launch=Launch.MPI).running()
    nobody.do(msgspec.structs.replace(killed(0, rank=0), first_failed_rank=4))
    assert [(one.node, one.first_failed_rank) for one in nobody.state.replicas[0].rank_failures] == [(0, -1)]


@pytest.mark.parametrize("late", [killed(0), stopped(0), hung(0)])
def test_late_word_of_a_dead_attempt_changes_nothing(late: AnyEvent) -> None:
    run = Run().running()
    run.do(killed(1), stopped(1), stopped(0))
    before = run.state
    assert run.do(late) == []
    assert run.state == before


def test_node_that_does_not_end_its_ranks_in_time_is_lost() -> None:
    run = Run().running()
    run.do(killed(1), stopped(1))
    commands = run.do(TimerExpired(at=30.0, timer="stop:0"))
    reason = "it could not end its ranks in time"
    assert commands == [ReplaceNode(node_id=NodeId(node=0, generation=1), reason=reason)]
    assert run.phase() is ReplicaPhase.GATHERING


def test_nodes_lost_together_are_judged_once() -> None:
    run = Run().running()
    run.do(killed(1), TimerExpired(at=30.0, timer="stop:0"))
    assert [type(decision) for decision in run.decisions] == [RecoveryDecided, NodeRequested, NodeRequested]
    assert len(run.state.replicas[0].failures) == 1


def test_lost_node_stops_the_others_and_is_asked_for_again_at_once() -> None:
    run = Run().running()
    commands = run.do(gone(1))
    again = ReplaceNode(node_id=NodeId(node=1, generation=1), reason="its agent ended")
    assert commands == [Send(order=orders.Shutdown(), nodes=(1,)), stop(0), again]
    assert run.do(gone(1)) == []


def test_agent_of_a_node_that_is_gone_is_told_to_shut_down_unless_it_leaves_by_itself() -> None:
    shutdown = Send(order=orders.Shutdown(), nodes=(1,))
    assert shutdown in Run().running().do(gone(1))
    run = Run().running()
    run.do(leaving(1))
    assert shutdown not in run.do(gone(1)), "its ranks save"
    run.do(stopped(0))
    (decided,) = (event for event in run.decisions if isinstance(event, RecoveryDecided))
    assert decided.finding.code == "node-preempted"
    assert decided.finding.evidence[-1] == "its agent ended"


def test_node_that_is_taken_away_gives_every_rank_its_grace_and_is_replaced_once_it_is_gone() -> None:
    run = Run().running()
    assert run.do(leaving(1)) == [stop(0, 1, grace_s=GRACE_S)]
    assert run.do(exited(0, code=75, at=21.0, left=True), stopped(0)) == []
    (replaced,) = run.do(gone(1, at=22.0))
    assert isinstance(replaced, ReplaceNode)
    (decided,) = (event for event in run.decisions if isinstance(event, RecoveryDecided))
    assert decided.finding.code == "node-preempted"
    assert run.state.nodes[1].generation == 1


def test_nothing_is_started_on_a_node_that_is_taken_away_without_ranks() -> None:
    run = Run()
    run.do(joined(0), leaving(0), joined(1))
    assert run.phase() is ReplicaPhase.GATHERING


def test_ranks_stopped_by_their_own_agent_are_no_success() -> None:
    run = Run(nodes=1).running()
    run.do(exited(0, stopped=True), stopped(0))
    assert run.phase() is ReplicaPhase.RUNNING
    assert run.state.replicas[0].attempt == 1
    assert run.state.replicas[0].failures[0].kind == "node-lost"


# Agents that come and go


def test_agent_back_in_time_is_told_nothing() -> None:
    run = Run().running()
    run.do(left(1))
    assert run.state.timers == {"reconnect:1": 20.0 + AWAY_S}
    assert run.do(joined(1, at=25.0, attempt=0)) == []
    assert run.state.timers == {}
    assert run.phase() is ReplicaPhase.RUNNING


def test_agent_away_for_too_long_is_lost_since_it_left() -> None:
    run = Run().running()
    run.do(left(1), TimerExpired(at=20.0 + AWAY_S, timer="reconnect:1"), stopped(0))
    assert run.state.nodes[1].phase is NodePhase.REQUESTED
    assert run.state.replicas[0].failures[0].at == 20.0


def test_agent_that_missed_its_start_is_started_when_it_returns() -> None:
    run = Run().running()
    run.do(left(1))
    commands = run.do(joined(1, at=25.0, attempt=-1))
    assert commands == [StartAttempt(replica=0, attempt=0, nodes=(1,), master_addr="10.0.0.0", master_port=4000)]


def test_agent_that_missed_its_stop_is_stopped_when_it_returns() -> None:
    run = Run().running()
    run.do(left(1), killed(0))
    assert run.do(joined(1, at=25.0, attempt=0)) == [stop(1)]


def test_agent_reborn_among_running_ranks_fails_the_attempt() -> None:
    run = Run().running()
    assert run.do(joined(1, at=25.0, incarnation="new")) == [stop(0)]
    assert not run.state.nodes[1].has_processes


def test_old_incarnations_leaving_does_not_send_the_new_one_away() -> None:
    run = Run()
    run.do(joined(1), joined(1, incarnation="new"), left(1))
    assert run.state.nodes[1].phase is NodePhase.JOINED


def test_attempt_waits_for_an_agent_that_is_away() -> None:
    run = Run().running()
    assert run.do(killed(0), stopped(1), left(1), stopped(0)) == [stop(0, 1)]
    assert run.phase() is ReplicaPhase.GATHERING
    assert [type(command) for command in run.do(joined(1, at=25.0, attempt=0))] == [StartAttempt]


# Hangs


def test_hang_waits_for_the_other_ranks_word() -> None:
    run = Run().running()
    assert run.do(hung(0)) == [look(0, 1)]
    assert run.state.timers == {"hang-verdict:0": 30.0 + HANG_VERDICT_S}
    assert run.do(hung(1, at=31.0)) == [stop(0, 1)]


def test_hang_is_judged_without_the_others_when_time_is_up() -> None:
    run = Run().running()
    assert run.do(hung(0), TimerExpired(at=38.0, timer="hang-verdict:0")) == [look(0, 1), stop(0, 1)]


def test_agent_that_returns_while_a_hang_is_judged_looks_at_its_silent_ranks_too() -> None:
    run = Run().running()
    run.do(left(1), hung(0))
    assert run.do(joined(1, at=31.0, attempt=0)) == [look(1)]


def test_rank_that_dies_while_a_hang_is_judged_stops_all_at_once() -> None:
    run = Run().running()
    assert run.do(hung(0), killed(1, at=31.0)) == [look(0, 1), stop(0, 1)]


GAVE_UP = "RuntimeError: [..] Timed out waiting 2000ms for recv operation to complete"


def test_ranks_are_looked_at_before_they_are_stopped_where_one_gave_up_waiting() -> None:
    run = Run().running()
    gave_up = exited(0, code=1, error=GAVE_UP)
    assert run.do(gave_up) == [look(0, 1, everyone=True)]
    assert run.state.timers == {"hang-verdict:0": 10.0 + HANG_VERDICT_S}
    assert run.do(hung(1, at=11.0)) == [stop(0, 1)]


@pytest.mark.parametrize("reports", [[], [hung(1, at=10.4)]], ids=["nothing", "a report"])
def test_step_that_was_under_way_is_no_reason_to_wait_for_a_rank_that_gave_up(reports: list[RankHung]) -> None:
    run = Run(nodes=3).running()
    late = StepCommitted(at=11.0, replica=0, attempt=0, step=1, started=9, ended=11)
    run.do(exited(0, code=1, error=GAVE_UP), *reports, late)
    assert run.phase() is ReplicaPhase.HANG_SUSPECTED


@pytest.mark.parametrize(
    "end",
    [exited(1, code=1, error=GAVE_UP, at=11.0), killed(1, at=11.0), TimerExpired(at=18.0, timer="hang-verdict:0")],
    ids=["gave up too", "died", "said nothing"],
)
def test_look_after_one_gave_up_ends_with_the_word_of_the_last_or_its_time(end: AnyEvent) -> None:
    run = Run().running()
    assert run.do(exited(0, code=1, error=GAVE_UP), end) == [look(0, 1, everyone=True), stop(0, 1)]


def test_launcher_that_gave_up_speaks_for_all_its_ranks() -> None:
    run = Run(ranks=4, launch=Launch.PER_NODE).running()
    ends = exited(0, rank=0, code=1, error=GAVE_UP), exited(1, rank=4, code=1, error=GAVE_UP)
    assert run.do(*ends) == [look(0, 1, everyone=True), stop(0, 1)]


def test_ranks_that_end_well_while_a_hang_is_judged_have_succeeded() -> None:
    run = Run().running()
    assert run.do(hung(0), exited(0), exited(1), stopped(0), stopped(1)) == [look(0, 1), FinishRun()]
    assert run.state.ending is not None
    assert run.state.ending.outcome is Outcome.SUCCEEDED
    assert run.state.timers == {}


def test_judgement_awaited_in_one_attempt_does_not_reach_the_next() -> None:
    run = Run().running()
    run.do(hung(0), killed(1, at=31.0), stopped(0), stopped(1))
    assert run.do(TimerExpired(at=38.0, timer="hang-verdict:0")) == []
    assert (run.phase(), run.state.replicas[0].attempt) == (ReplicaPhase.RUNNING, 1)


# People


@pytest.mark.parametrize(("force", "grace_s"), [(False, GRACE_S), (True, 0.0)])
def test_cancel_stops_ranks_with_the_grace_it_has(force: bool, grace_s: float) -> None:
    run = Run().running()
    assert run.do(CancelRequested(at=10.0, force=force)) == [stop(0, 1, grace_s=grace_s)]
    assert run.state.timers == {"stop:0": 10.0 + grace_s + STOP_GRACE_S}
    assert run.do(exited(0, stopped=True), exited(1, stopped=True), stopped(0), stopped(1)) == [FinishRun()]
    assert run.state.ending is not None
    assert run.state.ending.exit_code == 130


def test_second_cancel_changes_nothing_unless_forced() -> None:
    run = Run().running()
    run.do(CancelRequested(at=10.0))
    assert run.do(CancelRequested(at=11.0)) == []
    assert run.do(CancelRequested(at=12.0, force=True)) == [stop(0, 1)]
    assert run.decisions == []
    assert run.state.timers == {"stop:0": 12.0 + STOP_GRACE_S}


def test_cancel_while_gathering_finishes_at_once() -> None:
    run = Run()
    assert run.do(joined(0), CancelRequested(at=2.0)) == [FinishRun()]
    assert run.do(joined(1), CancelRequested(at=3.0, force=True)) == []


def test_failure_after_a_cancel_does_not_change_the_outcome() -> None:
    run = Run().running()
    run.do(CancelRequested(at=10.0), exited(0, code=1), stopped(0), gone(1))
    assert run.state.ending is not None
    assert run.state.ending.outcome is Outcome.CANCELLED
    assert run.state.done


def test_finished_run_takes_nothing_more() -> None:
    run = Run()
    run.do(CancelRequested(at=2.0), RunFinished(at=3.0, outcome=Outcome.CANCELLED, exit_code=130))
    before = run.state
    assert run.do(joined(0), gone(1), ControllerStarted(at=4.0, pid=1, incarnation="d")) == []
    assert run.state == before


def test_checkpoint_is_asked_of_everybody() -> None:
    assert Run().running().do(CheckpointRequested(at=5.0)) == [Send(order=TakeCheckpoint())]


def test_step_profile_is_requested_from_all_ranks() -> None:
    assert Run().running().do(ProfileRequested(at=5.0)) == [Send(order=ProfileSteps())]
    assert Run().running().do(StackDumpRequested(at=5.0)) == [Send(order=DumpStacks())]
    assert Run().running().do(StackDumpRequested(at=5.0, native=True)) == [Send(order=DumpStacks(native=True))]


def test_stacks_of_a_slow_replica_are_dumped_some_steps_apart() -> None:
    run = Run(nodes=4, replicas=2).running()
    (send,) = run.do(StackDumpRequested(at=5.0, rounds=5, replica=1))
    assert send == Send(order=DumpStacks(requested_at=5.0, rounds=5, interval_s=MIN_DUMP_INTERVAL_S), nodes=(2, 3))
    assert len(run.do(StackDumpRequested(at=6.0, rounds=5))) == 2
    assert run.do(StackDumpRequested(at=6.0, rounds=5, replica=7)) == []
    # spread over a step: multiples of the golden ratio
    assert dump_interval_s(0.5) == pytest.approx(4.618 * 0.5, rel=1e-3)
    assert dump_interval_s(1e6) == MAX_DUMP_INTERVAL_S


@pytest.mark.parametrize(
    ("target", "index", "node"), [(FaultTarget.RANK, 3, 1), (FaultTarget.NODE, 1, 1), (FaultTarget.AGENT, 0, 0)]
)
def test_drill_is_given_to_its_node_and_again_when_that_returns(target: FaultTarget, index: int, node: int) -> None:
    run = Run(ranks=2).running()
    drill = FaultRequested(at=5.0, target=target, index=index, action=FaultAction.KILL, at_step=9)
    assert run.do(drill) == [fault(drill, node)]
    assert run.do(joined(node, attempt=0)) == [fault(drill, node)]
    run.do(FaultInjected(at=6.0, node=node, requested_at=5.0, target="x", action="kill"))
    assert run.do(joined(node, attempt=0)) == []


@pytest.mark.parametrize(
    ("action", "target"),
    [(FaultAction.KILL, FaultTarget.CONTROLLER), (FaultAction.PARTITION, FaultTarget.NODE)],
)
def test_drill_that_no_agent_can_do_waits_for_its_step_and_is_done_once(
    action: FaultAction, target: FaultTarget
) -> None:
    run = Run().running()
    drill = FaultRequested(at=5.0, target=target, index=0, action=action, at_step=2)
    step = StepCommitted(at=6.0, replica=0, attempt=0, step=1, started=5.0, ended=6.0)
    assert run.do(drill, step) == []
    second = StepCommitted(at=7.0, replica=0, attempt=0, step=2, started=6.0, ended=7.0)
    assert run.do(second) == [InjectFault(fault=drill)]
    assert run.do(second) == []


# A controller's successor


def start_over(run: Run, at: float) -> list[Command]:
    return run.do(ControllerStarted(at=at, pid=2, incarnation="d"))


def test_successor_gives_every_agent_its_time_to_return() -> None:
    run = Run().running()
    run.do(left(0, at=5.0))
    assert start_over(run, 500.0) == []
    assert run.state.timers == {"reconnect:0": 500.0 + AWAY_S, "reconnect:1": 500.0 + AWAY_S}


def test_successor_gives_ranks_their_time_to_end_anew() -> None:
    run = Run().running()
    run.do(CancelRequested(at=10.0))
    start_over(run, 500.0)
    assert run.state.timers["stop:0"] == 500.0 + GRACE_S + STOP_GRACE_S


def test_successor_waits_anew_for_word_of_a_hang() -> None:
    run = Run().running()
    run.do(hung(0))
    start_over(run, 500.0)
    assert run.state.timers["hang-verdict:0"] == 500.0 + HANG_VERDICT_S


def test_successor_asks_again_for_nodes_that_are_not_there() -> None:
    run = Run()
    run.do(joined(0), gone(1))
    places = [command.node_id for command in start_over(run, 500.0) if isinstance(command, ReplaceNode)]
    assert places == [NodeId(node=1, generation=1)]


def test_successor_asks_for_no_node_while_the_run_ends() -> None:
    run = Run().running()
    run.do(CancelRequested(at=10.0), gone(1))
    assert not any(isinstance(command, SubmitNodes | ReplaceNode) for command in start_over(run, 500.0))


def test_successor_finishes_what_was_ended() -> None:
    run = Run()
    run.do(CancelRequested(at=2.0))
    assert start_over(run, 3.0) == [FinishRun()]


@pytest.mark.parametrize(
    "story",
    [
        lambda: [joined(0), joined(1)],
        lambda: [joined(0), joined(1), killed(1), stopped(1)],
        lambda: [joined(0), joined(1), hung(0), left(1)],
        lambda: [joined(0), gone(1), CancelRequested(at=9.0)],
        lambda: [joined(0), joined(1), leaving(1), stopped(0), gone(1)],
    ],
)
def test_log_with_its_decisions_gives_the_state_back(story: Callable[[], list[AnyEvent]]) -> None:
    run = Run()
    log: list[AnyEvent] = [RunCreated(at=0.0, run="r", job={}), ControllerStarted(at=0.0, pid=1, incarnation="c")]
    for event in story():
        run.do(event)
        log.extend([event, *run.decisions])
    assert run.machine.replay(log) == run.state
