"""Terminal outcomes of a run: reported once, with the right exit code, and nothing left."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest
from tests.runs.conftest import Runs, WatchedRun
from tests.waiting import until

from holdfast import api
from holdfast.errors import ExitCode, HoldfastError
from holdfast.events import (
    ExitReason,
    FindingRaised,
    NodeTerminated,
    Outcome,
    RankExited,
    RecoveryDecided,
    ShutdownDecided,
)
from holdfast.host.processes import identify

UP = "print('up', flush=True); signal.pause()"


def up(watched: WatchedRun) -> bool:
    """Whether both ranks have done what comes before `UP`."""
    logs = [watched.folder.rank_log(0, rank) for rank in (0, 1)]
    return all(log.exists() and "up" in log.read_text() for log in logs)


def test_error_before_the_first_step_is_not_retried(runs: Runs) -> None:
    watched = runs.steps(40, fault="raise@1@1")
    ended = watched.wait_for_end()
    assert (ended.outcome, ended.exit_code) == (Outcome.FAILED, 1)
    (stop,) = watched.all(ShutdownDecided)
    assert stop.finding is not None
    assert stop.finding.evidence[0] == "ValueError: bad batch at step 1"
    assert stop.finding.where.startswith(str(watched.folder.rank_log(0, 1)))
    assert len(watched.all(RecoveryDecided)) == 1


@pytest.mark.parametrize(
    ("program", "code", "says"),
    [
        ("import sys; sys.exit(75)", 75, "exited with code 75"),
        ("raise TimeoutError('shard 3 of the data set timed out')", 1, "exited with code 1"),
    ],
)
def test_error_of_a_programs_own_is_not_taken_for_what_holdfast_says_the_same_of(
    runs: Runs, program: str, code: int, says: str
) -> None:
    watched = runs.start(sys.executable, "-c", program, nodes=1)
    ended = watched.wait_for_end()
    assert (ended.outcome, ended.exit_code) == (Outcome.FAILED, code)
    assert says in ended.reason
    assert "by itself within" in ended.reason
    assert "first step" not in ended.reason
    assert [event.finding.code for event in watched.all(RecoveryDecided)] == ["rank-crashed"]


@pytest.mark.parametrize(
    ("fault", "code", "whom"),
    [("exit@1@12", 7, "each time on the same rank"), ("raise@turns@12", 1, "on ranks 0, 1 and 0")],
)
def test_same_failure_again_and_again_stops_with_the_story(runs: Runs, fault: str, code: int, whom: str) -> None:
    watched = runs.steps(40, fault=fault)
    ended = watched.wait_for_end()
    assert (ended.outcome, ended.exit_code) == (Outcome.FAILED, code)
    assert len(watched.all(RecoveryDecided)) == 3
    assert f"3 times in a row, {whom}, without a step between" in ended.reason


def test_restart_budget_of_none_ends_with_the_first_failure(runs: Runs) -> None:
    watched = runs.steps(40, fault="segv@1@12", overrides=("recovery.max_restarts=0",))
    ended = watched.wait_for_end()
    assert (ended.outcome, ended.exit_code) == (Outcome.FAILED, 128 + 11)
    assert len(watched.all(RecoveryDecided)) == 1


def test_missing_program_is_said_before_anything_starts(runs: Runs) -> None:
    with pytest.raises(HoldfastError) as caught:
        runs.start("no-such-program-anywhere")
    assert caught.value.exit_code is ExitCode.CANNOT_RUN_HERE
    assert api.runs() == []


def test_home_that_cannot_be_made_is_said_before_anything_starts(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_HOME", "/proc/nowhere")
    with pytest.raises(HoldfastError) as caught:
        runs.start(sys.executable, "-V")
    assert caught.value.exit_code is ExitCode.CANNOT_RUN_HERE
    assert [finding.code for finding in caught.value.findings] == ["unwritable-folder"]


def test_program_that_cannot_be_started_is_told_from_one_that_failed(runs: Runs, tmp_path: Path) -> None:
    program = tmp_path / "broken"
    program.write_text("#!/no/such/interpreter\n")
    program.chmod(0o755)
    watched = runs.start(str(program))
    ended = watched.wait_for_end()
    assert (ended.outcome, ended.exit_code) == (Outcome.FAILED, 127)
    assert watched.all(RankExited)[0].reason is ExitReason.NOT_STARTED


def test_cancel_gives_ranks_their_grace_and_ends_with_its_code(runs: Runs) -> None:
    watched = runs.start(sys.executable, "-c", f"import signal; {UP}")  # one that lost the other would end of that
    until(lambda: up(watched))
    api.cancel(watched.folder)
    ended = watched.wait_for_end()
    assert (ended.outcome, ended.exit_code) == (Outcome.CANCELLED, 130)
    assert [event.code for event in watched.all(RankExited)] == [15, 15]
    assert watched.all(NodeTerminated) == []


def test_forced_cancel_does_not_wait_for_a_rank_that_ignores_sigterm(runs: Runs) -> None:
    watched = runs.start(sys.executable, "-c", f"import signal; signal.signal(15, signal.SIG_IGN); {UP}")
    until(lambda: up(watched))
    api.cancel(watched.folder)
    watched.wait_for(ShutdownDecided)
    api.cancel(watched.folder, force=True)
    ended = watched.wait_for_end()
    assert (ended.outcome, ended.exit_code) == (Outcome.CANCELLED, 130)
    assert {event.code for event in watched.all(RankExited)} == {9}


def test_daemonised_children_end_with_the_run(runs: Runs) -> None:
    watched = runs.steps(10, fault="daemonise@1@5")
    assert (
        watched.wait_for_end().outcome is Outcome.SUCCEEDED
    )  # that nothing is left is looked at after every test here
    assert watched.all(NodeTerminated) == []


def test_daemon_of_an_agent_that_was_killed_keeps_no_port_from_the_next_attempt(runs: Runs, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    program = Path(__file__).parents[1] / "programs" / "orphan_daemon.py"
    watched = runs.start(sys.executable, str(program), str(tmp_path / "told"), "KILL", port, nodes=1)
    assert watched.wait_for_end().outcome is Outcome.SUCCEEDED
    assert len(watched.all(NodeTerminated)) == 1
    daemon, _ = map(int, (tmp_path / "told").read_text().split())
    assert identify(daemon) is None


@pytest.mark.parametrize(("how", "code"), [("well", 0), ("raise", 1)])
def test_rank_that_a_thread_keeps_alive_after_its_program_ends_as_the_program_did(
    runs: Runs, how: str, code: int
) -> None:
    program = Path(__file__).parents[1] / "programs" / "lingering_thread.py"
    overrides = ("recovery.exit_timeout_s=2", "recovery.max_restarts=0")
    watched = runs.start(sys.executable, str(program), "1", how, overrides=overrides)
    assert watched.wait_for_end().exit_code == code
    reported, killed = (
        event.finding for event in watched.all(FindingRaised) if event.finding.code == "rank-exit-blocked"
    )
    assert reported.where == "rank 1 on node1"
    assert reported.evidence[0].startswith("thread uploader in wait ")
    assert Path(reported.evidence[-1].removeprefix("stacks: ")).exists()
    assert "2 s" in killed.what
    (ended,) = (event for event in watched.all(RankExited) if event.rank == 1)
    assert (ended.reason, ended.code, ended.stopped) == (ExitReason.CODE, code, False)
    assert ("the evaluation has failed" in ended.error) is bool(code)


@pytest.mark.root
@pytest.mark.skipif(not Path("/sys/fs/cgroup/memory").is_dir(), reason="needs a cgroup v1 memory controller")
def test_rank_killed_for_memory_is_said_so_by_the_kernels_word(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    group = Path(f"/sys/fs/cgroup/memory/holdfast-test-{os.getpid()}")
    group.mkdir()
    own = Path("/sys/fs/cgroup/memory") / own_memory_group().lstrip("/")
    try:
        (group / "memory.limit_in_bytes").write_text(str(300 << 20))
        # What is started from here on belongs to the group, so the run and all of its ranks do.
        (group / "cgroup.procs").write_text(str(os.getpid()))
        watched = runs.steps(40, fault="allocate@1@12@0")
        (own / "cgroup.procs").write_text(str(os.getpid()))
        assert watched.wait_for_end().outcome is Outcome.SUCCEEDED
    finally:
        (own / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()
    (decided,) = watched.all(RecoveryDecided)
    assert (decided.finding.code, decided.first_failed_rank) == ("rank-out-of-memory", 1)
    assert any("oom_kill" in line or "out of memory" in line.lower() for line in decided.finding.evidence)


def own_memory_group() -> str:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return path
    return "/"
