"""Faults of replicas that train together: at the end they are bit-exact, and each step counted once."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.runs.conftest import Runs, WatchedRun
from tests.runs.replica_runs import (
    REPLICA_TRAINER,
    assert_counted_once,
    attempts,
    finish_identical,
    start_and_step,
    start_replicas,
    wait_for_step,
)

from holdfast import api
from holdfast.errors import ExitCode
from holdfast.events import (
    AgentConnected,
    AttemptStarted,
    CheckpointCommitted,
    FaultAction,
    FaultTarget,
    FindingRaised,
    Outcome,
    RankExited,
    RecoveryDecided,
    StandbyPromoted,
    StandbyReady,
    StepCommitted,
    UpdateEnded,
    UpdateOutcome,
)

pytestmark = pytest.mark.slow


def kill(watched: WatchedRun, *replicas: int) -> None:
    """Kill replicas before the same step."""
    step = watched.all(StepCommitted)[-1].step
    for replica in replicas:
        watched.drill(FaultTarget.RANK, replica, FaultAction.KILL, at_step=step + 20)


def end(runs: Runs, watched: WatchedRun, replicas: int) -> None:
    finish_identical(runs, watched, replicas)
    assert_counted_once(runs, replicas)


def test_two_replicas_that_die_at_once_catch_up_from_the_third(runs: Runs) -> None:
    watched = start_and_step(runs, 3)
    kill(watched, 1, 2)
    for replica in (1, 2):
        wait_for_step(watched, replica, 1)
    end(runs, watched, 3)
    assert attempts(watched) == [(0, 0), (1, 0), (1, 1), (2, 0), (2, 1)]
    logs = [path.read_text() for path in watched.folder.path.glob("logs/replica-*/rank-*.log")]
    assert len(logs) == 5
    assert not [log for log in logs if "[INFO] [torchft::" in log]


def test_replica_that_dies_while_another_connects_to_it_is_not_waited_for(runs: Runs) -> None:
    watched = start_replicas(runs, 2, "env.DIES='1.0:computing 1.1:meeting'")
    wait_for_step(watched, 1, 2)
    end(runs, watched, 2)
    assert attempts(watched) == [(0, 0), (1, 0), (1, 1), (1, 2)]
    assert "replica-connect-failed" in watched.codes()


def test_replica_that_hangs_before_it_opens_its_session_is_started_again(runs: Runs) -> None:
    watched = start_and_step(runs, 2, "env.DIES='1.1:starting'", "recovery.step_timeout_s=1")
    kill(watched, 1)
    wait_for_step(watched, 1, 2)
    end(runs, watched, 2)
    assert attempts(watched) == [(0, 0), (1, 0), (1, 1), (1, 2)]
    hung = watched.all(RecoveryDecided)[-1].finding
    assert hung.code == "rank-hung"
    assert "it has not opened its Session" in " ".join((hung.what, *hung.evidence))


def test_donor_that_dies_while_another_catches_up_is_followed_by_the_third(runs: Runs) -> None:
    watched = start_and_step(runs, 3, "env.DIES='0.0:giving 2.0:giving'")
    kill(watched, 1)
    wait_for_step(watched, 1, 1)
    donor = next(decided.replica for decided in watched.all(RecoveryDecided) if decided.replica != 1)
    wait_for_step(watched, donor, 1)
    end(runs, watched, 3)
    assert attempts(watched) == sorted([(0, 0), (1, 0), (2, 0), (1, 1), (donor, 1)])


def test_replica_that_dies_in_the_first_step_of_all_joins_the_others_later(runs: Runs) -> None:
    watched = start_replicas(runs, 2, "env.DIES=1.0:computing")
    wait_for_step(watched, 1, 1)
    end(runs, watched, 2)
    assert attempts(watched) == [(0, 0), (1, 0), (1, 1)]
    assert watched.all(RecoveryDecided)[0].finding.code == "rank-killed"


def test_replicas_that_all_die_in_the_first_step_begin_again(runs: Runs) -> None:
    watched = start_replicas(runs, 2, "env.DIES='0.0:computing 1.0:computing'")
    for replica in (0, 1):
        wait_for_step(watched, replica, 1)
    end(runs, watched, 2)
    assert attempts(watched) == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_replica_that_dies_in_a_checkpoint_leaves_none_and_the_next_is_whole(runs: Runs) -> None:
    watched = start_replicas(runs, 2, "env.DIES='0.0:saving'", "checkpoint.every_steps=10")
    saved = watched.wait_for(CheckpointCommitted)
    wait_for_step(watched, 0, 1)
    end(runs, watched, 2)
    assert attempts(watched) == [(0, 0), (0, 1), (1, 0)]
    assert saved.step > 10
    assert not [*watched.folder.checkpoints.glob("*writing*/*")]


@pytest.fixture
def shipped(runs: Runs, tmp_path: Path) -> Path:
    """The program, in a project whose code is shipped."""
    project = tmp_path / "project"
    targets = project / ".holdfast" / "targets"
    targets.mkdir(parents=True)
    (targets / "shipped.yaml").write_text("code: shipped\n")
    runs.base = project
    shutil.copy(REPLICA_TRAINER, project / "program.py")
    return Path("program.py")


def test_replica_that_dies_in_an_update_continues_with_the_new_code_and_from_another(runs: Runs, shipped: Path) -> None:
    watched = start_replicas(
        runs, 2, "env.DIES=1.0:leaving", "checkpoint.every_steps=100000", target="shipped", program=shipped
    )
    for replica in (0, 1):
        wait_for_step(watched, replica, 0, beyond=5)
    program = runs.base / shipped
    program.write_text(program.read_text() + "\n# other code\n")
    updated = api.update(watched.folder, timeout_s=200.0)
    ended = watched.wait_for(UpdateEnded)
    assert (ended.outcome, ended.digest) == (UpdateOutcome.APPLIED, updated.digest)
    end(runs, watched, 2)
    assert attempts(watched) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    second = [event for event in watched.all(AttemptStarted) if event.attempt == 1]
    assert {event.code_digest for event in second} == {updated.digest}
    assert watched.all(RecoveryDecided)[0].finding.code == "rank-killed"


@pytest.mark.parametrize("standby", [0, 1])
def test_flapping_replica_is_backed_off_then_has_another_node(runs: Runs, standby: int) -> None:
    dies = " ".join(f"1.{attempt}:computing" for attempt in range(3))
    watched = start_replicas(runs, 2, f"env.DIES='{dies}'", f"recovery.standby={standby}")
    if standby:
        watched.wait_for(StandbyReady)
    wait_for_step(watched, 1, 3)
    end(runs, watched, 2)
    assert attempts(watched) == [(0, 0), (1, 0), (1, 1), (1, 2), (1, 3)]
    started = {event.attempt: event.at for event in watched.all(AttemptStarted) if event.replica == 1}
    failed = [decided.at for decided in watched.all(RecoveryDecided)]
    waited = [started[attempt] - failed[attempt - 1] for attempt in (2, 3)]
    assert waited[0] >= 1
    assert waited[1] >= 2
    promoted = [(event.node, event.replaces) for event in watched.all(StandbyPromoted)]
    fresh = [(event.node, event.generation) for event in watched.all(AgentConnected) if event.generation]
    assert (promoted, fresh) == (([(2, 1)], [(1, 1)]) if standby else ([], [(1, 1)]))


def test_replicas_that_are_too_few_wait_say_so_and_continue(runs: Runs) -> None:
    watched = start_and_step(runs, 2, "recovery.min_replicas=2")
    kill(watched, 1)
    few = watched.wait_for(FindingRaised, lambda event: event.finding.code == "replica-quorum-lost")
    wait_for_step(watched, 1, 1)
    end(runs, watched, 2)
    assert attempts(watched) == [(0, 0), (1, 0), (1, 1)]
    enough = next(each for each in watched.all(FindingRaised) if each.finding.code == "replica-quorum-regained")
    assert not [step for step in watched.all(StepCommitted) if few.at < step.started and step.ended < enough.at]


def test_replicas_that_are_too_few_are_cancelled_within_their_grace_and_save_what_they_have(
    runs: Runs, room_for_two: str
) -> None:
    watched = start_and_step(runs, 2, "recovery.min_replicas=2", "checkpoint.every_steps=100000", target=room_for_two)
    watched.drill(FaultTarget.NODE, 1, FaultAction.REMOVE)
    watched.wait_for(FindingRaised, lambda event: event.finding.code == "waiting-for-replicas")
    api.cancel(watched.folder)
    assert watched.wait_for_end().outcome is Outcome.CANCELLED
    (exited,) = (each for each in watched.all(RankExited) if each.replica == 0)
    assert exited.code == ExitCode.CHECKPOINTED_AND_EXITED
    assert "ignored-sigterm" not in watched.codes()
    last = max(step.step for step in watched.all(StepCommitted))
    assert [saved.step for saved in watched.all(CheckpointCommitted)] == [last]


@pytest.fixture
def room_for_two(runs: Runs) -> str:
    """A target with two nodes, so that a lost one cannot be replaced."""
    targets = runs.base / ".holdfast" / "targets"
    targets.mkdir(parents=True)
    (targets / "two.yaml").write_text("capacity: 2\n")
    return "two"
