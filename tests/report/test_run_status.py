"""A run's status, computed from its events."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from holdfast.control.policy import Action
from holdfast.events import (
    AgentConnected,
    AgentDisconnected,
    AnyEvent,
    AttemptStarted,
    CancelRequested,
    CheckpointCommitted,
    ControllerStarted,
    ExitReason,
    FaultInjected,
    FindingRaised,
    NodeRequested,
    NodeTerminated,
    Outcome,
    ProbeAdvanced,
    RankExited,
    RankHung,
    RanksHung,
    RanksPrewarmed,
    RanksStarted,
    RanksStopped,
    RankState,
    RecoveryDecided,
    RunCreated,
    RunFinished,
    ShutdownDecided,
    StepCommitted,
)
from holdfast.events.probe_results import ProbeStage
from holdfast.findings import Finding, Owner, Severity
from holdfast.report.goodput import TimeCategory
from holdfast.report.rank_table import RankPhase
from holdfast.report.run_status import NodePhase, RunPhase, RunStatus
from holdfast.report.status_reducer import (
    IGNORE_ACTION,
    SPEED_WINDOW_STEPS,
    STOP_ACTION,
    status_from_events,
    update_status,
)

CRASHED = Finding(code="rank-crashed", what="rank 1 on node1 exited with code 1")


def requested(node: int, generation: int = 0, reason: str = "") -> NodeRequested:
    return NodeRequested(at=2, node=node, generation=generation, reason=reason)


def joined(node: int, generation: int = 0) -> AgentConnected:
    return AgentConnected(
        at=3,
        node=node,
        generation=generation,
        incarnation=f"i{node}.{generation}",
        hostname=f"host{node}",
        address="127.0.0.1",
        port=29500,
        pid=50 + node,
    )


def attempt(number: int) -> AttemptStarted:
    return AttemptStarted(
        at=4, replica=0, attempt=number, world_size=2, master_addr="127.0.0.1", master_port=29500 + number
    )


def ranks(node: int, number: int) -> RanksStarted:
    return RanksStarted(at=5, node=node, replica=0, attempt=number, ranks=(RankState(rank=node, pid=100 + node),))


def step(number: int, attempt: int = 0, **metrics: float) -> StepCommitted:
    return StepCommitted(
        at=10 + number, replica=0, attempt=attempt, step=number, started=9 + number, ended=10 + number, metrics=metrics
    )


def exited(rank: int, attempt: int = 0, code: int = 1, *, stopped: bool = False) -> RankExited:
    return RankExited(
        at=30,
        node=rank,
        replica=0,
        attempt=attempt,
        rank=rank,
        reason=ExitReason.CODE,
        code=code,
        stopped=stopped,
        last_step=2,
    )


def decided(attempt: int = 0) -> RecoveryDecided:
    return RecoveryDecided(
        at=31, replica=0, attempt=attempt, action="restart in place", failed_at=30, finding=CRASHED, first_failed_rank=1
    )


CREATED = RunCreated(at=1, run="demo-abc234", job={"name": "demo"})
CONTROLLER = ControllerStarted(at=1.5, pid=42, incarnation="c")
STARTED: list[AnyEvent] = [
    CREATED,
    CONTROLLER,
    requested(0),
    requested(1),
    joined(0),
    joined(1),
    attempt(0),
    ranks(0, 0),
    ranks(1, 0),
]


def test_life_of_a_run_that_recovers_passes_through_its_phases() -> None:
    log = [
        *STARTED,
        step(1),
        step(2),
        exited(1),
        decided(),
        attempt(1),
        ranks(0, 1),
        ranks(1, 1),
        step(2, attempt=1),
        ShutdownDecided(at=40, outcome=Outcome.SUCCEEDED, reason="every rank finished", exit_code=0),
        RunFinished(at=41, outcome=Outcome.SUCCEEDED, exit_code=0),
    ]
    phases: list[RunPhase] = []
    status = RunStatus()
    for event in log:
        status = update_status(status, event)
        if phases[-1:] != [status.phase]:
            phases.append(status.phase)
    assert phases == [
        RunPhase.PENDING,
        RunPhase.STARTING,
        RunPhase.RUNNING,
        RunPhase.RECOVERING,
        RunPhase.RUNNING,
        RunPhase.STOPPING,
        RunPhase.SUCCEEDED,
    ]
    assert (status.run, status.job, status.restarts, status.exit_code) == ("demo-abc234", "demo", 1, 0)
    assert (status.leader.step, status.leader.attempt, status.finished_at) == (2, 1, 41)


def test_replica_that_fails_after_another_has_finished_does_not_recover() -> None:
    ignored = msgspec.structs.replace(decided(), replica=1, action=IGNORE_ACTION)
    finished = RunFinished(at=40, outcome=Outcome.SUCCEEDED, exit_code=0)
    second = [msgspec.structs.replace(event, replica=1) for event in (attempt(0), ranks(1, 0), step(1))]
    status = status_from_events([*STARTED, *second, step(1), ignored])
    assert (status.phase, status.replicas[1].recovering) == (RunPhase.RUNNING, False)
    parts = update_status(status, finished).replica_accounts()[1].parts
    assert parts.get(TimeCategory.RECOVERING) is parts.get(TimeCategory.DETECTING) is None
    assert IGNORE_ACTION == Action.IGNORE
    assert STOP_ACTION == Action.STOP


def test_job_without_steps_has_recovered_when_its_ranks_run_again() -> None:
    assert status_from_events([*STARTED, exited(1), decided(), attempt(1)]).phase is RunPhase.RECOVERING
    assert status_from_events([*STARTED, exited(1), decided(), attempt(1), ranks(0, 1)]).phase is RunPhase.RUNNING


PROBING = ProbeAdvanced(at=6, node=0, generation=0, replica=0, number=1, stage=ProbeStage.PAIRS, elapsed_s=2.0)


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ([CREATED], "no controller has taken the run over yet"),
        ([CREATED, CONTROLLER], "no node has been requested yet"),
        (
            [CREATED, CONTROLLER, requested(0), requested(1), joined(0)],
            "1 of 2 nodes are there; waiting for node1.0 (requested)",
        ),
        (
            [*STARTED, decided(), requested(1, 1, "its machine died")],
            "1 of 2 nodes are there; waiting for node1.1 (requested because its machine died)",
        ),
        (
            [
                CREATED,
                CONTROLLER,
                requested(0),
                joined(0),
                AgentDisconnected(at=6, node=0, generation=0, incarnation="i0.0"),
            ],
            "0 of 1 nodes are there; waiting for node0.0 (unreachable)",
        ),
        (
            [CREATED, CONTROLLER, requested(0), joined(0), PROBING],
            "nodes are probed before their ranks start: all-reduce between pairs of nodes",
        ),
        ([CREATED, CONTROLLER, requested(0), joined(0), PROBING, *STARTED], ""),
        (STARTED, ""),
    ],
)
def test_waiting_run_shows_what_it_waits_for(events: list[AnyEvent], words: str) -> None:
    assert status_from_events(events).waiting_for == words


def test_phase_of_a_rank_shows_how_it_ended() -> None:
    hung = RankHung(
        at=30, node=0, replica=0, attempt=0, rank=0, last_step=2, last_step_at=12, waited_s=18, top_frame="all_reduce"
    )
    ranks_of = status_from_events([*STARTED, hung, exited(1)]).leader.ranks
    assert (ranks_of[0].phase, ranks_of[0].detail) == (RankPhase.HUNG, "no step for 18 s in all_reduce")
    assert (ranks_of[1].phase, ranks_of[1].detail, ranks_of[1].last_step) == (
        RankPhase.FAILED,
        "exited with code 1",
        2,
    )
    stopped = RanksStopped(at=31, node=0, replica=0, attempt=0, port=29501)
    assert status_from_events([*STARTED, stopped]).leader.ranks[0].phase is RankPhase.STOPPED
    assert status_from_events([*STARTED, exited(1, stopped=True)]).leader.ranks[1].phase is RankPhase.STOPPED
    assert status_from_events([*STARTED, exited(1, code=0)]).leader.ranks[1].phase is RankPhase.EXITED


def test_rank_that_was_reported_hung_runs_again_after_the_replicas_next_step() -> None:
    reports: list[AnyEvent] = [
        RankHung(at=30, node=0, replica=0, attempt=0, rank=0, last_step=2, last_step_at=12, waited_s=18),
        RanksHung(at=31, replica=0, attempt=0, ranks=((1, 1),)),
    ]
    hanging = status_from_events([*STARTED, *reports])
    earlier = update_status(hanging, step(3))
    assert [rank.phase for rank in earlier.leader.ranks.values()] == [RankPhase.HUNG] * 2
    later = update_status(earlier, msgspec.structs.replace(step(4), ended=32))
    assert [(rank.phase, rank.detail, rank.last_step) for rank in later.leader.ranks.values()] == [
        (RankPhase.RUNNING, "", None)
    ] * 2


def test_ranks_are_prewarmed_while_their_node_has_their_zygotes() -> None:
    warm = [RanksPrewarmed(at=12, node=node, replica=0, ranks=(node,)) for node in (0, 1)]
    status = status_from_events([*STARTED, *warm, *warm])
    assert status.leader.prewarmed == {0, 1}
    assert update_status(status, joined(1)).leader.prewarmed == {0, 1}
    disabled = RanksPrewarmed(at=13, node=1, replica=0, ranks=())
    assert update_status(status, disabled).leader.prewarmed == {0}
    again = msgspec.structs.replace(joined(1), incarnation="restarted")
    assert update_status(status, again).leader.prewarmed == {0}
    assert update_status(status, requested(1, 1)).leader.prewarmed == {0}
    renumbered = msgspec.structs.replace(ranks(1, 1), ranks=(RankState(rank=0, pid=7),))
    assert status_from_events([attempt(1), renumbered], status).leader.prewarmed == frozenset()
    assert status_from_events([attempt(1), ranks(0, 1), ranks(1, 1)], status).leader.prewarmed == {0, 1}


def test_lost_node_takes_its_ranks_with_it() -> None:
    status = status_from_events([*STARTED, NodeTerminated(at=20, node=1, generation=0, reason="its machine died")])
    assert status.nodes[1].phase is NodePhase.GONE
    assert [rank.phase for rank in status.leader.ranks.values()] == [RankPhase.RUNNING, RankPhase.LOST]
    assert status_from_events([*STARTED, requested(1, 1)]).leader.ranks[1].phase is RankPhase.LOST


def test_run_that_is_over_has_no_nodes() -> None:
    status = status_from_events([*STARTED, RunFinished(at=41, outcome=Outcome.SUCCEEDED, exit_code=0)])
    assert {node.phase for node in status.nodes.values()} == {NodePhase.GONE}


def test_event_of_an_older_generation_or_attempt_changes_nothing() -> None:
    status = status_from_events([*STARTED, requested(1, 1), joined(1, 1), attempt(1), ranks(0, 1), ranks(1, 1)])
    late: list[AnyEvent] = [
        NodeTerminated(at=20, node=1, generation=0, reason="old"),
        AgentDisconnected(at=20, node=1, generation=0, incarnation="i1.0"),
        joined(1, 0),
        step(9, attempt=0),
        exited(1, attempt=0),
        ranks(1, 0),
        RanksStopped(at=20, node=1, replica=0, attempt=0, port=1),
    ]
    for event in late:
        assert update_status(status, event) == status


def test_new_controller_has_no_connections_yet() -> None:
    status = status_from_events([*STARTED, replace_pid(CONTROLLER, 77)])
    assert status.controller_pid == 77
    assert {node.phase for node in status.nodes.values()} == {NodePhase.UNREACHABLE}


def replace_pid(event: ControllerStarted, pid: int) -> ControllerStarted:
    return ControllerStarted(at=event.at + 60, pid=pid, incarnation="d")


def test_speed_is_measured_over_the_latest_steps_of_the_attempt() -> None:
    many = [
        step(number, loss=1 / number, tokens=512.0, total_steps=100.0) for number in range(1, SPEED_WINDOW_STEPS + 31)
    ]
    status = status_from_events([*STARTED, *many])
    assert len(status.leader.recent_steps) == SPEED_WINDOW_STEPS
    assert status.tokens_per_s == pytest.approx(512)
    assert status.leader.seconds_per_step == pytest.approx(1)
    assert status.leader.remaining_s == pytest.approx(50)
    assert status.leader.loss == pytest.approx(1 / 50)
    assert status_from_events([*STARTED, *many, attempt(1)]).tokens_per_s is None


def test_what_the_latest_checkpoint_cost_is_known_after_steps_that_had_none() -> None:
    stalled = msgspec.structs.replace(step(1), checkpoint_s=0.25)
    assert status_from_events([*STARTED, stalled, step(2)]).leader.metrics == {"checkpoint_stall_s": 0.25}
    assert status_from_events([*STARTED, step(1)]).leader.metrics == {}


def test_speed_is_right_where_the_log_holds_only_some_steps() -> None:
    thinned = [step(number, tokens=512.0) for number in (10, 20, 30)]
    assert status_from_events([*STARTED, *thinned]).tokens_per_s == pytest.approx(512)


def test_tokens_of_a_step_of_several_replicas_count_once_and_are_those_of_all_their_devices() -> None:
    one = step(1, tokens=512.0, replicas=2.0)
    other = msgspec.structs.replace(one, replica=1)
    status = status_from_events([*STARTED, msgspec.structs.replace(attempt(0), replica=1), one, other])
    assert status.tokens_per_s == pytest.approx(512)
    assert status.tokens_per_s_per_device == pytest.approx(512 / 4)
    alone = step(2, tokens=256.0, replicas=1.0)
    assert status_from_events([alone], status).devices == 2


def test_speed_is_unknown_where_the_clock_stood_still() -> None:
    still = StepCommitted(at=10, replica=0, attempt=0, step=1, started=10, ended=10, metrics={"tokens": 5.0})
    assert status_from_events([*STARTED, still]).tokens_per_s is None


def test_finding_raised_twice_in_a_row_is_recorded_once() -> None:
    stop = ShutdownDecided(at=32, outcome=Outcome.FAILED, reason="crashed", exit_code=1, finding=CRASHED)
    other = Finding(code="slow-disk", what="slow")
    status = status_from_events([*STARTED, FindingRaised(at=20, finding=other), decided(), stop])
    assert status.findings == (other, CRASHED)
    assert status.findings_at == (20, 32)
    recovered = status_from_events([*STARTED, FindingRaised(at=20, finding=other), decided()])
    assert recovered.findings == (other, msgspec.structs.replace(CRASHED, severity=Severity.WARNING))
    assert recovered.findings_at == (20, 31)
    assert (status.phase, status.exit_code, status.reason) == (RunPhase.STOPPING, 1, "crashed")


def test_cancel_and_checkpoint_are_seen() -> None:
    checkpoint = CheckpointCommitted(at=20, node=0, replica=0, attempt=0, step=2, path="/c/2", size_bytes=7)
    status = status_from_events([*STARTED, checkpoint, CancelRequested(at=21)])
    assert status.phase is RunPhase.STOPPING
    assert status.checkpoint is not None
    assert (status.checkpoint.step, status.checkpoint.path, status.checkpoint.size_bytes) == (2, "/c/2", 7)


def test_job_without_a_name_is_named_after_its_run() -> None:
    assert status_from_events([RunCreated(at=1, run="big-job-abc234", job={})]).job == "big-job"


def test_empty_status_is_pending() -> None:
    assert RunStatus().phase is RunPhase.PENDING
    assert replace(RunStatus(), outcome=Outcome.FAILED).phase is RunPhase.STOPPING


def test_failure_caused_by_a_drill_is_attributed_to_it_once() -> None:
    killed = Finding(code="rank-killed", what="rank 1 on node1 was ended by SIGKILL", owner=Owner.CLUSTER)
    drill = FaultInjected(at=5, node=1, requested_at=5, target="rank 1", action="kill")

    def failed(at: float) -> tuple[AnyEvent, ...]:
        decided = RecoveryDecided(at=at, replica=0, attempt=0, action="stop", failed_at=at, finding=killed)
        stop = ShutdownDecided(at=at, outcome=Outcome.FAILED, reason="no more restarts", exit_code=70, finding=killed)
        return decided, stop

    (finding,) = status_from_events([drill, *failed(6)]).findings
    assert finding.what.endswith("injected by a drill: kill rank 1")
    assert finding.owner is Owner.USER
    assert status_from_events([*failed(6), drill]).findings == (killed,)
