"""The last answer to failures without a culprit: groups of nodes repeat the last steps, twice, and a bad node goes."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from tests.control.test_machine import Run, gone, joined, left
from tests.control.test_node_checks import checked, reported
from tests.control.test_node_probes import probed
from tests.control.test_rollout import step
from tests.control.test_stop_diagnose import NAN, all_stopped, damaged, in_a_row

from holdfast.control.commands import AvoidMachine, Command, ReplaceNode, Send, StartAttempt, StartReplay
from holdfast.control.policy import Action, decide
from holdfast.control.replays import REPORT_MARGIN_S, SLOWNESS, START_S, why_no_replay
from holdfast.events import ControllerStarted, NodeReplayed, Outcome, TimerExpired
from holdfast.job.quarantine import Certainty
from holdfast.job.spec import Job, Launch, Nodes, Recovery
from holdfast.protocol.orders import StopReplay
from holdfast.protocol.replay_env import MAX_STEPS
from holdfast.watch.dual_phase import Group, plan

SIX = tuple(range(6))


def failing(nodes: int = 6) -> tuple[Run, list[Command]]:
    """A run whose weights were damaged four times, and what it commands after the fourth."""
    run = Run(nodes=nodes, max_restarts=100).running()
    checks, commands = 0, list[Command]()
    everyone = tuple(range(nodes))
    for attempt in range(4):
        run.do(step(4 + attempt, attempt), damaged(attempt=attempt, at=30.0 + attempt), step(5 + attempt, attempt))
        commands = all_stopped(run, attempt)
        if attempt in (0, 2):
            checks += 1
            run.do(*(checked(node, number=checks) for node in everyone))
            run.do(*(probed(node, everyone, number=checks) for node in everyone))
    return run, commands


def replayed(node: int, number: int, digest: str = "d", *, problem: str = "", generation: int = 0) -> NodeReplayed:
    return NodeReplayed(
        at=50.0,
        node=node,
        generation=generation,
        replica=0,
        number=number,
        port=7000 + 10 * number + node,
        digest=digest,
        problem=problem,
    )


def replay_all(run: Run, groups: tuple[Group, ...], number: int, bad: set[int]) -> list[Command]:
    """Every node reports; groups with a bad node end with another state."""
    digests = {node: "d" if bad.isdisjoint(group) else f"bad{min(group)}" for group in groups for node in group}
    return run.do(*(replayed(node, number, digests[node]) for node in sorted(digests)))


def test_fourth_failure_has_groups_repeat_the_steps_and_the_bad_node_of_both_replays_is_replaced() -> None:
    run, commands = failing()
    first, second = plan(SIX)
    deadline_s = START_S + SLOWNESS * 3 * (MAX_STEPS * 1.0 + run.state.longest_first_step_s)
    assert commands == [
        StartReplay(
            replica=0, number=1, groups=first, nodes=SIX, until_step=9, deadline_s=deadline_s, checkpoints_back=1
        )
    ]
    assert run.state.timers["replay:0"] == 11.0 + deadline_s + REPORT_MARGIN_S
    (again,) = replay_all(run, first, 1, {4})
    assert isinstance(again, StartReplay)
    assert (again.number, again.groups) == (2, second)
    commands = replay_all(run, second, 2, {4})
    (avoided,) = (command for command in commands if isinstance(command, AvoidMachine))
    assert avoided.evidence is not None
    assert (avoided.node_id.node, avoided.evidence.certainty) == (4, Certainty.NAMED)
    assert [command.node_id.node for command in commands if isinstance(command, ReplaceNode)] == [4]
    (found,) = reported(run)
    assert (found.code, found.where) == ("node-failed-replay", "node4")
    assert found.evidence == (
        "first replay: node4, node5 ended with another state",
        "second replay: node1, node4 ended with another state",
    )
    assert not [key for key in run.state.timers if key.startswith("replay")]
    run.do(gone(4))
    (start,) = run.do(joined(4, generation=1, incarnation="new"))
    assert isinstance(start, StartAttempt)
    assert (start.attempt, start.nodes) == (4, SIX)
    assert start.master_port == 7020  # those before were used
    assert run.state.ending is None


def test_node_whose_group_does_not_end_ends_it_for_the_group_alone() -> None:
    run, _ = failing()
    assert run.do(replayed(4, 1, "", problem="rank 0 ended: x")) == [
        Send(order=StopReplay(replica=0, number=1), nodes=(5,))
    ]
    run.do(replayed(5, 1, "", problem="it was stopped"), *(replayed(node, 1) for node in range(4)))
    commands = replay_all(run, plan(SIX).second, 2, {4})
    assert [command.node_id.node for command in commands if isinstance(command, ReplaceNode)] == [4]
    assert "first replay: node4, node5 did not end it" in reported(run)[0].evidence


@pytest.mark.parametrize("bad", [set[int](), {*SIX}], ids=["all equal", "no group ends"])
def test_replay_that_names_nobody_says_so_and_the_same_nodes_start_again_until_the_next_failure(bad: set[int]) -> None:
    run, _ = failing()
    for number in (1, 2):
        digest = "" if bad else "d"
        commands = run.do(*(replayed(node, number, digest, problem="" if digest else "it ended") for node in SIX))
    starts = [command for command in commands if isinstance(command, StartAttempt)]
    assert [(start.nodes, start.attempt) for start in starts] == [(SIX, 4)]
    assert not [command for command in commands if isinstance(command, ReplaceNode)]
    assert [finding.code for finding in reported(run)] == ["replay-found-nothing"]
    run.do(step(9, 4), damaged(attempt=4, at=60.0))
    all_stopped(run, 4)
    assert run.state.ending is not None
    assert run.state.ending.outcome is Outcome.FAILED


def test_several_bad_nodes_that_no_group_tells_apart_are_suspects_and_stay() -> None:
    run, _ = failing(nodes=25)
    first, second = plan(range(25))
    replay_all(run, first, 1, {0, 6})
    commands = replay_all(run, second, 2, {0, 6})
    assert [type(command) for command in commands] == [StartAttempt]
    assert [(finding.code, finding.where) for finding in reported(run)] == [
        ("replay-suspects", "node0, node1, node5, node6")
    ]


def test_node_lost_in_a_replay_ends_it_and_the_run_goes_on_without_a_second_one() -> None:
    run, _ = failing()
    run.do(replayed(0, 1))
    commands = run.do(gone(3))
    assert Send(order=StopReplay(replica=0, number=1), nodes=(1, 2, 4, 5)) in commands
    stopped = run.do(*(replayed(node, 1, "", problem="it was stopped") for node in (1, 2, 4, 5)))
    assert stopped == []
    assert [finding.code for finding in reported(run)] == ["replay-found-nothing"]
    (start,) = run.do(joined(3, generation=1, incarnation="new"))
    assert isinstance(start, StartAttempt)


def test_node_that_reports_no_end_of_its_ranks_is_replaced_after_the_deadline() -> None:
    run, _ = failing()
    run.do(*(replayed(node, 1) for node in SIX[:-1]))
    commands = run.do(TimerExpired(at=run.state.timers["replay:0"], timer="replay:0"))
    assert [command.node_id.node for command in commands if isinstance(command, ReplaceNode)] == [5]
    assert [finding.code for finding in reported(run)] == ["node-failed-replay", "replay-found-nothing"]
    assert run.do(replayed(5, 1)) == []  # too late


def test_controller_that_restarts_repeats_the_orders_of_nodes_that_have_not_reported() -> None:
    run, (start,) = failing()
    assert isinstance(start, StartReplay)
    run.do(replayed(0, 1))
    run.do(ControllerStarted(at=60.0, pid=2, incarnation="d"))
    assert run.do(joined(0)) == []
    assert run.do(joined(1)) == [replace(start, nodes=(1,))]
    commands = run.do(*(joined(node) for node in range(2, 6)), *(replayed(node, 1) for node in range(1, 6)))
    assert [command.number for command in commands if isinstance(command, StartReplay)][-1] == 2


def test_agent_that_is_back_from_a_stopped_replay_ends_its_part() -> None:
    run, _ = failing()
    run.do(left(1), gone(3))
    assert Send(order=StopReplay(replica=0, number=1), nodes=(1,)) in run.do(joined(1))


@pytest.mark.parametrize(
    ("changes", "nodes", "why"),
    [
        ({}, 2, "it takes 3 nodes, and the attempt has 2"),
        ({"recovery": Recovery(replicas=2)}, 4, "several replicas"),
        ({"checkpoint": {"local": "/scratch"}}, 4, "the nodes' own disks"),
        ({"launch": Launch.MPI, "command": ("mpirun", "train")}, 4, "mpi"),
    ],
    ids=["nodes", "replicas", "disks", "launcher"],
)
def test_run_that_cannot_replay_stops_as_before_and_says_why(changes: dict[str, object], nodes: int, why: str) -> None:
    plain = {"command": ("train",), "nodes": Nodes(min=4, max=4)}
    job = Job.model_validate(plain | changes)
    assert why in why_no_replay(job, nodes)
    assert not why_no_replay(Job.model_validate(plain), 4)
    failures = tuple(replace(NAN, at=NAN.at - 60.0 * number) for number in (3, 2, 1))
    verdict = decide(replace(NAN, no_replay=why), failures, Recovery(max_restarts=100))
    assert verdict.action is Action.STOP
    assert f"no replay is possible: {why}" in verdict.finding.what


def test_replay_is_the_last_level() -> None:
    last, over = in_a_row(NAN, 5)[3:]
    assert (last.action, last.replay_nodes, last.checkpoints_back) == (Action.REPLAY, True, 1)
    assert over.action is Action.STOP
