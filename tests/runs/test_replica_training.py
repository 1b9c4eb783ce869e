"""Replicas that train together through TorchFT and the run's quorum service: whatever dies, the others commit."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from tests.runs.conftest import NCCL_LIKE, PREWARMED, Runs
from tests.runs.replica_runs import attempts, finish_identical, start_and_step, start_replicas, wait_for_step
from tests.waiting import until

from holdfast import api
from holdfast.errors import ExitCode
from holdfast.events import (
    AgentConnected,
    CheckpointCommitted,
    ControllerStarted,
    FaultAction,
    FaultInjected,
    FaultTarget,
    FindingRaised,
    Outcome,
    RankExited,
    RankHung,
    RanksDrained,
    RecoveryDecided,
    StepCommitted,
)
from holdfast.host.processes import all_pids

pytestmark = pytest.mark.slow

EVERY = 5
"""Steps from one meeting of replicas to the next; the program's last step is a multiple of it."""


def commits(runs: Runs, replica: int) -> list[int]:
    """The steps that a replica's first attempt committed, as it noted them."""
    return [int(line.split()[0]) for line in (runs.base / f"{replica}.0.commits").read_text().splitlines()]


def weights(runs: Runs, replica: int, attempt: int) -> dict[int, str]:
    """A digest of them after each step that an attempt committed."""
    lines = (runs.base / f"{replica}.{attempt}.commits").read_text().splitlines()
    return {int(step): digest for step, _, digest, *_ in map(str.split, lines)}


def processes_with(words: bytes, folder: Path) -> list[int]:
    """This run's processes of a program."""
    found: list[int] = []
    for pid in all_pids():
        try:
            argv = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if words in argv and str(folder).encode() in argv:
            found.append(pid)
    return found


@pytest.mark.parametrize(
    ("replicas", "overrides", "target", "action", "code"),
    [
        (2, (PREWARMED,), FaultTarget.RANK, FaultAction.KILL, "rank-killed"),
        (3, (), FaultTarget.RANK, FaultAction.KILL, "rank-killed"),
        (2, (), FaultTarget.RANK, FaultAction.STOP, "rank-hung"),
        (2, (), FaultTarget.NODE, FaultAction.KILL, "node-lost"),
        (2, (), FaultTarget.RANK, FaultAction.RAISE, "rank-crashed"),
        (2, (), FaultTarget.RANK, FaultAction.HANG, "rank-hung"),
        (2, (), FaultTarget.COLLECTIVE, FaultAction.HANG, "rank-hung"),
        (2, (NCCL_LIKE,), FaultTarget.RANK, FaultAction.KILL, "rank-killed"),
        (3, (NCCL_LIKE,), FaultTarget.RANK, FaultAction.STOP, "rank-hung"),
    ],
)
def test_others_continue_without_a_replica_and_it_catches_up(
    runs: Runs, replicas: int, overrides: tuple[str, ...], target: FaultTarget, action: FaultAction, code: str
) -> None:
    watched = start_and_step(runs, replicas, "recovery.step_timeout_s=auto", *overrides)
    watched.drill(target, 1, action)
    decided = watched.wait_for(RecoveryDecided)
    assert (decided.replica, decided.finding.code) == (1, code)
    wait_for_step(watched, 1, 1)
    finish_identical(runs, watched, replicas)
    assert attempts(watched) == sorted([*((replica, 0) for replica in range(replicas)), (1, 1)])
    # The collective that a replica leaves by dying may succeed for one of the others alone, which passes its step on.
    others = [commits(runs, replica) for replica in range(replicas) if replica != 1]
    every = set(range(1, others[0][-1] + 1))
    assert set[int]().union(*others) == every
    for steps in others:
        assert steps == sorted(set(steps))
        assert len(every.difference(steps)) <= 1


def test_nothing_that_is_no_step_is_taken_for_a_hang(runs: Runs) -> None:
    """Each save, and the end, takes three times what a step may take; one replica saves, and the other waits for it."""
    slow = ("recovery.step_timeout_s=auto", "checkpoint.every_steps=8", "env.SLOW_S=4")
    watched = start_and_step(runs, 2, *slow)
    for _ in range(2):
        watched.wait_for(CheckpointCommitted)
    finish_identical(runs, watched, 2)
    assert watched.all(RankHung) == []
    assert attempts(watched) == [(0, 0), (1, 0)]


def test_controller_that_is_killed_costs_no_step(runs: Runs) -> None:
    watched = start_and_step(runs, 2)
    watched.drill(FaultTarget.CONTROLLER, 0, FaultAction.KILL)
    if len(watched.all(ControllerStarted)) < 2:
        watched.wait_for(ControllerStarted, lambda _: len(watched.all(ControllerStarted)) == 2)
    wait_for_step(watched, 0, 0, beyond=watched.all(StepCommitted)[-1].step)
    watched.drill(FaultTarget.RANK, 1, FaultAction.KILL)
    wait_for_step(watched, 1, 1)
    finish_identical(runs, watched, 2)
    assert attempts(watched) == [(0, 0), (1, 0), (1, 1)]


@pytest.mark.parametrize("action", [FaultAction.KILL, FaultAction.STOP])
def test_quorum_service_that_is_lost_comes_back_at_its_port(runs: Runs, action: FaultAction) -> None:
    watched = start_and_step(runs, 2)
    (service,) = processes_with(b"holdfast.lighthouse", watched.folder.path)
    watched.drill(FaultTarget.LIGHTHOUSE, 0, action)
    watched.wait_for(FaultInjected)
    until(lambda: processes_with(b"holdfast.lighthouse", watched.folder.path) not in ([], [service]))
    watched.drill(FaultTarget.RANK, 1, FaultAction.KILL)
    wait_for_step(watched, 1, 1)
    finish_identical(runs, watched, 2)
    assert attempts(watched) == [(0, 0), (1, 0), (1, 1)]


def test_replicas_that_are_cancelled_leave_after_the_same_step_with_a_checkpoint_of_it(runs: Runs) -> None:
    watched = start_and_step(runs, 2, "checkpoint.every_steps=100000")
    api.cancel(watched.folder)
    finished = watched.wait_for_end()
    assert (finished.outcome, finished.exit_code) == (Outcome.CANCELLED, ExitCode.CANCELLED)
    assert [exited.code for exited in watched.all(RankExited)] == [ExitCode.CHECKPOINTED_AND_EXITED] * 2
    last = watched.all(CheckpointCommitted)[-1].step
    assert [commits(runs, replica)[-1] for replica in range(2)] == [last - 1] * 2  # it ends within the last commit
    assert {step.replica for step in watched.all(StepCommitted) if step.step == last} == {0, 1}


def test_replicas_that_are_too_few_wait_and_continue(runs: Runs) -> None:
    watched = start_and_step(runs, 2, "recovery.min_replicas=2")
    watched.drill(FaultTarget.RANK, 1, FaultAction.KILL)
    wait_for_step(watched, 1, 1)
    finish_identical(runs, watched, 2)
    assert attempts(watched) == [(0, 0), (1, 0), (1, 1)]


@pytest.mark.parametrize(
    ("method", "group"), [("local_sgd", ()), ("diloco", (NCCL_LIKE,))], ids=["local_sgd", "diloco-nccl-like"]
)
def test_replicas_that_meet_now_and_then_are_equal_there_and_one_that_is_lost_between_comes_back(
    runs: Runs, method: str, group: tuple[str, ...]
) -> None:
    watched = start_and_step(runs, 2, f"recovery.outer_sync={{method: {method}, every: {EVERY}}}", *group)
    watched.drill(FaultTarget.RANK, 1, FaultAction.KILL, at_step=3 * EVERY + 2)
    wait_for_step(watched, 1, 1)
    finish_identical(runs, watched, 2)
    assert attempts(watched) == [(0, 0), (1, 0), (1, 1)]
    survivor, lost, back = (weights(runs, *attempt) for attempt in ((0, 0), (1, 0), (1, 1)))
    for other in (lost, back):
        shared = survivor.keys() & other.keys()
        met = {step for step in shared if step % EVERY == 0}
        assert met
        assert {step for step in shared if survivor[step] == other[step]} == met


def test_two_replicas_that_differ_resume_from_the_checkpoint_that_they_agreed_on(runs: Runs) -> None:
    watched = start_replicas(
        runs, 2, "recovery.verify_every_steps=5", "checkpoint.every_steps=2", "checkpoint.keep=1", "env.FLIPS=1.0/12"
    )
    watched.wait_for(FindingRaised, lambda raised: raised.finding.code == "replicas-diverged")
    for replica in range(2):
        wait_for_step(watched, replica, 1)
    finish_identical(runs, watched, 2)
    assert attempts(watched) == [(replica, attempt) for replica in range(2) for attempt in range(2)]
    for replica in range(2):
        assert max(weights(runs, replica, 0)) == 15  # the comparison precedes the next step
        assert min(weights(runs, replica, 1)) == 11


def test_replica_whose_node_is_taken_away_leaves_after_its_step_and_the_others_continue(runs: Runs) -> None:
    watched = start_and_step(runs, 2, "checkpoint.every_steps=100000", "recovery.stop_grace_s=120")
    os.kill(next(event.pid for event in watched.all(AgentConnected) if event.node == 0), signal.SIGTERM)
    watched.wait_for(RanksDrained)
    exited = watched.wait_for(RankExited)
    assert (exited.replica, exited.code) == (0, ExitCode.CHECKPOINTED_AND_EXITED)
    assert watched.wait_for(RecoveryDecided).finding.code == "node-preempted"
    wait_for_step(watched, 0, 1)
    saved = watched.all(CheckpointCommitted)
    assert [event.step for event in saved] == [commits(runs, 0)[-1] + 1]  # it ends within the last commit
    finish_identical(runs, watched, 2)
    assert attempts(watched) == [(0, 0), (0, 1), (1, 0)]
    assert [event.finding.code for event in watched.all(FindingRaised) if "sigterm" in event.finding.code] == []
