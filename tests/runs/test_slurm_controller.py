"""Runs on real Slurm whose controller is in the allocation: the machine that starts them only submits their script."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.runs.conftest import TORCH_FREE_TRAINER, Runs, WatchedRun, leftovers_of, processes_of
from tests.runs.target_fixtures import ON_24_11, remove_sockets, slurm_target, use_cluster, write_target
from tests.runs.test_slurm_runs import allocation, block, machines, preempted, steps, steps_once
from tests.waiting import until

from holdfast import api
from holdfast.errors import HoldfastError
from holdfast.events import (
    AgentConnected,
    AttemptStarted,
    ControllerStarted,
    FaultAction,
    FaultTarget,
    NodePreemptionNotice,
    Outcome,
    RanksStarted,
    StepCommitted,
)
from holdfast.host.processes import by_env
from holdfast.run_dir import RunDir
from lab.slurm_cluster import SlurmCluster

INSIDE = "inside"
"""The target whose runs have their controller in the allocation."""


@pytest.fixture
def inside(runs: Runs, cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runs]:
    """Runs on the target `inside`."""
    use_cluster(cluster, monkeypatch)
    cluster.wait_until_idle()
    text = slurm_target(cluster, runs.base).replace("spares: 0", "controller: allocation")
    write_target(runs.base, INSIDE, text)
    yield runs
    for left in filter(lambda run: not api.is_finished(run), api.runs()):  # by a test that failed
        api.cancel(left, force=True)
    until(lambda: cluster.command("squeue", "-h") == "")
    runs.close()
    assert runs.left_on_hosts() == []


def holdfast(runs: Runs, *words: str) -> str:
    """What another process of the user prints, which has to succeed."""
    program = Path(sys.executable).with_name("holdfast")
    done = subprocess.run([program, *words], cwd=runs.base, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def remove_former_sockets(runs: Runs, watched: WatchedRun) -> None:
    """Delete what agents of the run's first job left that Slurm has killed, after `KillWait` or with their node."""
    for node in ("node0.0", "node1.0"):
        remove_sockets(runs.base, watched.folder.run_id, node)


def code(error: HoldfastError | None) -> str:
    assert error is not None
    return error.findings[0].code


def test_run_goes_on_without_the_process_that_started_it(inside: Runs, cluster: SlurmCluster) -> None:
    command = (sys.executable, str(TORCH_FREE_TRAINER), "1000000", "0.02")
    fields = ("recovery.prewarm=false", "watch.step_clock=false", f"checkpoint.path={inside.base / 'checkpoints'}")
    words = ("--on", INSIDE, "--nodes", "2", "--detach", "-o", "json", *(f"--set={each}" for each in fields))
    started = json.loads(holdfast(inside, "run", *words, "--", *command))
    watched = inside.watch(RunDir(Path(started["folder"])))
    watched.wait_for(StepCommitted)
    number, name = allocation(watched), watched.folder.run_id
    own = processes_of(watched.folder)
    assert sorted(by_env(own, SLURM_JOB_ID=str(number))) == sorted(own), "nothing of it is outside of its job"

    watched.drill(FaultTarget.CONTROLLER, 0, FaultAction.KILL)
    watched.wait_for(ControllerStarted)
    for _ in range(2):
        watched.wait_for(AgentConnected)
    watched.wait_for(StepCommitted)
    assert len(watched.all(RanksStarted)) == 2
    assert json.loads(holdfast(inside, "status", name, "-o", "json"))["phase"] == "running"
    assert "rank 1 of 2 starts at step 1\n" in holdfast(inside, "logs", name)

    cluster.command("scontrol", "update", f"JobId={number}", "TimeLimit=00:02:00")
    watched.wait_for(NodePreemptionNotice)
    cluster.command("scontrol", "update", f"JobId={number}", "TimeLimit=UNLIMITED")  # the requeued job keeps it
    assert watched.wait_for(AttemptStarted).attempt == 1
    watched.wait_for(StepCommitted)
    assert allocation(watched) == number

    holdfast(inside, "cancel", name)
    assert watched.wait_for_end().outcome is Outcome.CANCELLED
    done = steps_once(watched)
    assert done == list(range(1, done[-1] + 1))
    until(lambda: leftovers_of(watched.folder) == [])
    assert list((inside.base / "nodes" / "runs").glob("*")) == []


@ON_24_11
def test_run_goes_on_with_monarch_without_the_process_that_started_it(inside: Runs) -> None:
    command = (sys.executable, str(TORCH_FREE_TRAINER), "1000000", "0.02")
    fields = ("orchestrator=monarch", f"checkpoint.path={inside.base / 'checkpoints'}")
    words = ("--on", INSIDE, "--nodes", "2", "--detach", "-o", "json", *(f"--set={each}" for each in fields))
    started = json.loads(holdfast(inside, "run", *words, "--", *command))
    watched = inside.watch(RunDir(Path(started["folder"])))
    watched.wait_for(StepCommitted)
    watched.drill(FaultTarget.CONTROLLER, 0, FaultAction.KILL)
    watched.wait_for(ControllerStarted)
    for _ in range(2):
        watched.wait_for(AgentConnected)
    watched.wait_for(StepCommitted)
    holdfast(inside, "cancel", watched.folder.run_id)
    assert watched.wait_for_end().outcome is Outcome.CANCELLED
    done = steps_once(watched)
    assert done == list(range(1, done[-1] + 1))
    until(lambda: leftovers_of(watched.folder) == [])


@ON_24_11
def test_lost_first_node_takes_the_controller_to_another_one(inside: Runs, cluster: SlurmCluster) -> None:
    watched = steps(inside, 300, INSIDE)
    watched.wait_for(StepCommitted)
    first, lost = allocation(watched), watched.folder.read_controller_record()["hostname"]
    assert lost == machines(watched)[0]
    cluster.kill_node(lost)
    try:
        watched.wait_for(AttemptStarted)
        remove_former_sockets(inside, watched)
        assert allocation(watched) == first
        assert lost not in {machines(watched)[0], watched.folder.read_controller_record()["hostname"]}
        assert watched.wait_for_end().outcome is Outcome.SUCCEEDED
    finally:
        cluster.start_node(lost)
    unreported = sorted({*range(1, 301)} - {*steps_once(watched)})
    if unreported:  # the controller went with the machine before it had written the last steps before a checkpoint
        assert unreported == list(range(unreported[0], unreported[-1] + 1))
        assert unreported[-1] < 300


@ON_24_11
def test_job_that_is_cancelled_in_slurm_ends_and_can_be_submitted_again(inside: Runs, cluster: SlurmCluster) -> None:
    watched = steps(inside, 1_000_000, INSIDE)
    watched.wait_for(StepCommitted)
    cluster.command("scancel", str(allocation(watched)))
    until(lambda: api.is_orphaned(watched.folder))
    remove_former_sockets(inside, watched)
    assert code(api.controller_dead(watched.folder)) == "allocation-ended"

    blocker = block(cluster)
    assert api.restart_controller(watched.folder)
    until(lambda: (seen := api.pending_reason(watched.folder)) is not None and seen.code == "allocation-pending")
    assert not api.is_orphaned(watched.folder)
    shown = holdfast(inside, "status", watched.folder.run_id)
    assert "no controller; last known: running" in shown
    assert "[allocation-pending]" in shown
    program = Path(sys.executable).with_name("holdfast")
    with subprocess.Popen([program, "attach", watched.folder.run_id], stdout=subprocess.PIPE, text=True) as attached:
        assert attached.stdout is not None
        assert any("is pending" in line for line in attached.stdout)  # else it would wait for events without a word
        assert "was cancelled while it waited" in holdfast(inside, "cancel", watched.folder.run_id)
        assert "cancelled" in attached.stdout.read()
    assert watched.wait_for_end().outcome is Outcome.CANCELLED
    cluster.command("scancel", blocker)


@pytest.fixture
def hasty_preemption(cluster: SlurmCluster) -> Iterator[None]:
    """Slurm kills what it preempts without a time of grace."""
    cluster.command("scontrol", "update", "PartitionName=main", "GraceTime=0")
    yield
    cluster.command("scontrol", "update", "PartitionName=main", "GraceTime=30")


@ON_24_11
@pytest.mark.usefixtures("hasty_preemption")
def test_job_that_is_preempted_without_grace_is_requeued(inside: Runs, cluster: SlurmCluster) -> None:
    watched = steps(inside, 1_000_000, INSIDE)
    watched.wait_for(StepCommitted)
    number = allocation(watched)
    with preempted(cluster, number):
        until(lambda: (seen := api.pending_reason(watched.folder)) is not None and seen.code == "allocation-pending")
    watched.wait_for(AttemptStarted)
    remove_former_sockets(inside, watched)
    assert allocation(watched) == number
    api.cancel(watched.folder)
    assert watched.wait_for_end().outcome is Outcome.CANCELLED


@pytest.fixture
def unshared() -> Iterator[str]:
    """A folder that nodes do not see: they have another operating system, with its own /var."""
    made = tempfile.mkdtemp(dir="/var/lib")
    yield made
    shutil.rmtree(made)


@ON_24_11
def test_folder_that_nodes_do_not_see_is_named(
    unshared: str, inside: Runs, cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_HOME", unshared)
    watched = steps(inside, 10, INSIDE)
    with pytest.raises(HoldfastError) as refused:
        watched.wait_for_end()
    assert code(refused.value) == "run-folder-not-shared"
    assert "n1" in refused.value.findings[0].what
    api.cancel(watched.folder, force=True)
    assert api.is_finished(watched.folder)
