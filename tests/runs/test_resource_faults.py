"""Bad luck with disks, processes and resources, for real: said clearly, nothing lost, nothing left."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.conftest import SmallDisk, fill
from tests.runs.conftest import Runs, WatchedRun
from tests.runs.test_terminal_outcomes import own_memory_group
from tests.waiting import until

from holdfast import api
from holdfast.errors import ExitCode, HoldfastError
from holdfast.events import (
    AttemptStarted,
    CheckpointCommitted,
    ControllerStarted,
    ExitReason,
    FaultAction,
    FaultTarget,
    FindingRaised,
    Outcome,
    RankExited,
    RecoveryDecided,
    ShutdownDecided,
    StepCommitted,
)
from holdfast.launch.local.controller_faults import MAX_FILL_BYTES
from holdfast.report.run_summary import format_summary


def overwrite(log: Path, kind: bytes) -> None:
    """Zero a part of the first line of a kind, as a failing disk might."""
    at = log.read_bytes().index(b'"type":"%s"' % kind)
    with log.open("r+b", buffering=0) as file:
        os.pwrite(file.fileno(), bytes(20), at)


def test_log_damaged_where_nothing_was_decided_is_gone_on_from_and_said(runs: Runs) -> None:
    watched = runs.steps(400, 0.02)
    watched.wait_for(StepCommitted)
    overwrite(watched.folder.events, b"step-committed")
    watched.drill(FaultTarget.CONTROLLER, 0, FaultAction.KILL)
    assert watched.wait_for_end().outcome is Outcome.SUCCEEDED
    assert watched.codes() == ["event-log-partially-corrupt"]
    assert len(watched.all(ControllerStarted)) == 2
    assert len(watched.all(AttemptStarted)) == 1
    assert api.summary(watched.folder).corrupt_lines == 1


def test_log_damaged_where_it_matters_ends_the_run_with_the_reason(runs: Runs) -> None:
    watched = runs.steps(10_000, 0.02)
    watched.wait_for(StepCommitted)
    overwrite(watched.folder.events, b"agent-connected")
    watched.drill(FaultTarget.CONTROLLER, 0, FaultAction.KILL)
    ended = watched.wait_for_end()
    assert (ended.outcome, ended.exit_code) == (Outcome.FAILED, ExitCode.STORAGE_FAILED)
    (stop,) = watched.all(ShutdownDecided)
    assert stop.finding is not None
    assert stop.finding.code == "event-log-corrupt"


def holds(watched: WatchedRun) -> bool:
    """Whether the controller cannot write its log: it answers every request with that."""
    try:
        watched.drill(FaultTarget.RANK, 0, FaultAction.KILL, at_step=1_000_000)
    except HoldfastError as error:
        return error.findings[0].code == "event-log-blocked"
    return False


def noted(runs: Runs) -> int:
    """How many steps rank 0 of the stepper has done."""
    return (runs.base / "checkpoints" / "steps-0.txt").read_text().count("\n")


def on_a_small_disk(runs: Runs, disk: Path, monkeypatch: pytest.MonkeyPatch, steps: int = 800) -> WatchedRun:
    """A run whose directory, except its checkpoints, is on a disk without space for its log."""
    monkeypatch.setenv("HOLDFAST_HOME", str(disk))
    overrides = (f"checkpoint.path={runs.base / 'checkpoints'}", "env.TRAINER_METRICS=100")
    watched = runs.steps(steps, 0.005, overrides=overrides)
    watched.wait_for(StepCommitted)
    fill(disk)
    until(lambda: holds(watched))
    begun = noted(runs)
    until(lambda: noted(runs) > begun)
    return watched


@pytest.mark.root
@pytest.mark.slow
def test_run_waits_for_room_for_its_log_while_its_ranks_continue(
    small_disk: SmallDisk, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = small_disk(1 << 20)
    watched = on_a_small_disk(runs, disk, monkeypatch)
    waits = api.storage_finding(watched.folder)
    assert waits is not None
    assert waits.code == "disk-full"
    subprocess.run(["mount", "-o", "remount,size=16m", disk], check=True)
    assert watched.wait_for_end().outcome is Outcome.SUCCEEDED
    steps = [step for event in watched.all(StepCommitted) for step in range(event.first, event.step + 1)]
    assert steps == list(range(1, 801))
    assert "the log can be written again" in watched.folder.controller_log.read_text()
    assert (len(watched.all(ControllerStarted)), len(watched.all(AttemptStarted))) == (1, 1)
    assert set(watched.codes()) == {"disk-full", "disk-space-recovered"}


@pytest.mark.root
@pytest.mark.slow
def test_run_that_waits_for_room_can_be_cancelled(
    small_disk: SmallDisk, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when what waits, one line a step, would be several times what is kept for a run that ends."""
    watched = on_a_small_disk(runs, small_disk(1 << 20), monkeypatch, steps=100_000)
    begun = noted(runs)
    until(lambda: noted(runs) >= begun + 500)
    api.cancel(watched.folder)
    assert watched.wait_for_end().outcome is Outcome.CANCELLED
    assert max(watched.steps()) >= begun + 500
    assert watched.steps() == list(range(1, max(watched.steps()) + 1))
    assert watched.folder.events.stat().st_size < 1 << 20


LOG_FILLER = """
import os
if os.environ["HOLDFAST_ATTEMPT"] == "0":
    while True: print("x" * 4000, flush=True)
print("there is room")
"""


@pytest.mark.root
@pytest.mark.slow
def test_rank_that_fills_the_disk_with_its_log_restarts_once_there_is_room(
    small_disk: SmallDisk, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_HOME", str(small_disk(12 << 20)))
    watched = runs.start(sys.executable, "-c", LOG_FILLER, nodes=1)
    decided = watched.wait_for(RecoveryDecided)
    assert decided.finding.code == "disk-full"
    watched.wait_for(FindingRaised, lambda event: "wait for room" in event.finding.what)
    os.truncate(watched.folder.rank_log(0, 0), 0)
    assert watched.wait_for_end().outcome is Outcome.SUCCEEDED
    assert watched.log(0, attempt=1) == "there is room\n"


def test_command_that_leaves_a_daemon_is_told_what_became_of_it(runs: Runs) -> None:
    watched = runs.steps(10, fault="daemonise@1@5")
    assert watched.wait_for_end().outcome is Outcome.SUCCEEDED
    (found,) = watched.all(FindingRaised)
    assert (found.finding.code, found.finding.where) == ("orphan-processes", "node1")
    assert "orphan-processes" in format_summary(api.summary(watched.folder))


def test_rank_that_ignores_sigterm_is_named_when_its_grace_is_over(runs: Runs) -> None:
    stubborn = "import signal; signal.signal(15, signal.SIG_IGN); print('up', flush=True); signal.pause()"
    watched = runs.start(sys.executable, "-c", stubborn, nodes=1, overrides=("recovery.stop_grace_s=0.2",))
    log = watched.folder.rank_log(0, 0)
    until(lambda: log.exists() and "up" in log.read_text())
    api.cancel(watched.folder)
    assert watched.wait_for_end().outcome is Outcome.CANCELLED
    (found,) = watched.all(FindingRaised)
    assert found.finding.code == "ignored-sigterm"
    assert "rank 0 was still there 0.2 s after SIGTERM" in format_summary(api.summary(watched.folder))


MEMORY_HOG = """
import signal, sys
from pathlib import Path
group, blocks = Path(sys.argv[1]), []
def part():
    idle = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())["total_inactive_file"]
    return (int((group / "memory.usage_in_bytes").read_text()) - int(idle)) / (400 << 20)
while part() < 0.95: blocks.append(bytearray(b"x" * (1 << 20)))
signal.pause()
"""


@pytest.mark.root
@pytest.mark.skipif(not Path("/sys/fs/cgroup/memory").is_dir(), reason="needs a cgroup v1 memory controller")
def test_memory_that_runs_short_is_told_before_anything_is_killed(runs: Runs) -> None:
    top = Path("/sys/fs/cgroup/memory")
    group, own = top / f"holdfast-mishap-{os.getpid()}", top / own_memory_group().lstrip("/")
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(400 << 20))
        # What is started from here on belongs to the group, so the run and all of its ranks do.
        (group / "cgroup.procs").write_text(str(os.getpid()))
        watched = runs.start(sys.executable, "-c", MEMORY_HOG, str(group), nodes=1)
        (own / "cgroup.procs").write_text(str(os.getpid()))
        found = watched.wait_for(FindingRaised, lambda event: event.finding.code == "memory-pressure")
        api.cancel(watched.folder, force=True)
        assert watched.wait_for_end().outcome is Outcome.CANCELLED
    finally:
        (own / "cgroup.procs").write_text(str(os.getpid()))
        until(lambda: not (group / "cgroup.procs").read_text())
        group.rmdir()
    assert found.finding.evidence[0] == f"limit of {group}"
    assert "-c import signal, sys from pathlib" in found.finding.evidence[1]
    assert watched.all(RankExited)[0].reason is ExitReason.SIGNAL


def test_run_that_may_open_few_files_opens_all_it_may_and_leaves_its_ranks_as_they_were(runs: Runs) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = len(os.listdir("/proc/self/fd")) + 100  # what other tests of this process still hold must fit as well
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, before[1]))
    try:
        watched = runs.start("sh", "-c", "ulimit -Sn; read line < /dev/null; sleep 0.1", nodes=2)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    controller = watched.wait_for(ControllerStarted).pid
    limits = Path(f"/proc/{controller}/limits").read_text()
    assert f"Max open files            {before[1]} " in limits
    assert watched.wait_for_end().outcome is Outcome.SUCCEEDED
    assert watched.log(0) == f"{few}\n"


@pytest.mark.root
def test_drilled_disk_that_stays_full_ends_the_run_with_the_reason(small_disk: SmallDisk, runs: Runs) -> None:
    disk = small_disk(1 << 20)
    watched = runs.steps(10_000, overrides=(f"checkpoint.path={disk}",))
    watched.wait_for(CheckpointCommitted)
    watched.drill(FaultTarget.CHECKPOINTS, 0, FaultAction.FILL)
    ended = watched.wait_for_end()  # the stepper writes its steps there, so every attempt dies of it
    assert (ended.outcome, ended.exit_code) == (Outcome.FAILED, ExitCode.STORAGE_FAILED)
    assert {event.finding.code for event in watched.all(RecoveryDecided)} == {"disk-full"}
    until(lambda: not (disk / "drill.ballast").exists())


@pytest.mark.root
def test_drilled_disk_of_the_run_has_room_again_when_its_time_is_up(
    small_disk: SmallDisk, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = small_disk(8 << 20)
    monkeypatch.setenv("HOLDFAST_HOME", str(disk))
    watched = runs.steps(2000, 0.002, overrides=(f"checkpoint.path={runs.base / 'c'}", "env.TRAINER_METRICS=100"))
    watched.wait_for(StepCommitted)
    watched.drill(FaultTarget.RUN_DIR, 0, FaultAction.FILL, for_s=2.0)
    for _ in range(2):
        watched.wait_for(FindingRaised, lambda event: event.finding.code != "run-slow")
    assert watched.codes() == ["disk-full", "disk-space-recovered"]
    api.cancel(watched.folder, force=True)
    assert watched.wait_for_end().outcome is Outcome.CANCELLED


def test_drill_fills_no_large_disk(runs: Runs) -> None:
    if shutil.disk_usage(runs.base).free <= MAX_FILL_BYTES:
        pytest.skip("needs a disk with more than 4 GiB free")
    watched = runs.steps(10_000)
    watched.wait_for(StepCommitted)
    watched.drill(FaultTarget.RUN_DIR, 0, FaultAction.FILL)
    found = watched.wait_for(FindingRaised)
    assert found.finding.code == "fault-unavailable"
    assert not (watched.folder.path / "drill.ballast").exists()
    api.cancel(watched.folder, force=True)
    watched.wait_for_end()
