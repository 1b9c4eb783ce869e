"""Runs in allocations of real Slurm clusters: of this machine's Slurm, and of 24.11 with a network for each node."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest
from tests.runs.conftest import Runs, WatchedRun
from tests.runs.target_fixtures import ON_24_11, accepted, remove_sockets, slurm_target, use_cluster, write_target
from tests.waiting import until

from holdfast import api
from holdfast.events import (
    AttemptStarted,
    FaultAction,
    FaultTarget,
    NodeCreated,
    NodePreemptionNotice,
    NodeUnavailable,
    Outcome,
    StepCommitted,
)
from holdfast.launch.target_machines import MachineState
from lab.slurm_cluster import SlurmCluster

HASTY_CONTROLLER = """
import sys
if any(word.startswith("holdfast.controller") for word in sys.orig_argv):
    from holdfast.launch.slurm import slurm_backend
    slurm_backend.NEW_ALLOCATION_S = 0.0
"""
"""Has a run give an allocation with too few nodes back at once."""


Announcement = Callable[[SlurmCluster, int], AbstractContextManager[None]]
"""Has Slurm announce the end of a job, by number."""


@pytest.fixture
def slurm_runs(runs: Runs, cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runs]:
    """Runs on the target `cluster`, and on `spare`, which has a node more than the job."""
    use_cluster(cluster, monkeypatch)
    for name, spares in (("cluster", 0), ("spare", 1)):
        write_target(runs.base, name, slurm_target(cluster, runs.base, spares=spares))
    yield runs
    runs.close()
    until(lambda: cluster.command("squeue", "-h") == "")
    assert runs.left_on_hosts() == []


def steps(runs: Runs, count: int, target: str = "cluster", *overrides: str) -> WatchedRun:
    shared = f"checkpoint.path={runs.base / 'checkpoints'}"
    return runs.steps(count, 0.02, target=target, overrides=(shared, "recovery.node_grace_s=3", *overrides))


def steps_once(watched: WatchedRun) -> list[int]:
    return sorted(set(watched.steps()))


def machines(watched: WatchedRun) -> dict[int, str]:
    return {event.node: event.machine for event in watched.all(NodeCreated)}


def allocation(watched: WatchedRun) -> int:
    """The number of the run's Slurm job."""
    return int((watched.folder.path / "allocation").read_text())


def block(cluster: SlurmCluster, *options: str) -> str:
    """Submit a job that takes all nodes, and return its number."""
    words = ("--parsable", "--nodes=3", "--exclusive", "--output=/dev/null", *options)
    return cluster.command("sbatch", *words, "--wrap", "sleep 600").strip()


def test_run_continues_in_another_allocation_when_one_ends(slurm_runs: Runs, cluster: SlurmCluster) -> None:
    watched = steps(slurm_runs, 500)  # longer than Slurm takes to kill what has ignored SIGTERM
    watched.wait_for(StepCommitted)
    assert {*machines(watched).values()} == {"n1", "n3"}, "Slurm chooses nodes below one switch"
    first = allocation(watched)
    cluster.command("scancel", str(first))
    watched.wait_for(AttemptStarted)
    assert allocation(watched) > first
    assert watched.wait_for_end().outcome is Outcome.SUCCEEDED
    assert steps_once(watched) == list(range(1, 501))


@contextlib.contextmanager
def preempted(cluster: SlurmCluster, _number: int) -> Iterator[None]:
    """While it lasts, a job of a partition with a higher priority takes all nodes."""
    urgent = block(cluster, "--partition=urgent")
    yield
    cluster.command("scancel", urgent)


@contextlib.contextmanager
def limited(cluster: SlurmCluster, number: int) -> Iterator[None]:
    """Leave a job less time than the announcement of its end takes."""
    cluster.command("scontrol", "update", f"JobId={number}", "TimeLimit=00:02:00")
    yield


@pytest.mark.parametrize(
    ("cluster", "announced"),
    [("slurm", preempted), ("slurm_24_11", preempted), ("slurm_24_11", limited)],
    indirect=["cluster"],
)
def test_announced_end_of_an_allocation_costs_one_restart_in_the_next(
    slurm_runs: Runs, cluster: SlurmCluster, announced: Announcement
) -> None:
    watched = steps(slurm_runs, 1_000_000, "spare")
    watched.wait_for(StepCommitted)
    assert machines(watched) == {0: "n1", 1: "n3"}, "ranks share a switch, and the spare is below the other"
    first = allocation(watched)
    with announced(cluster, first):
        watched.wait_for(NodePreemptionNotice)
    watched.wait_for(AttemptStarted)
    assert allocation(watched) > first
    watched.wait_for(StepCommitted)
    api.cancel(watched.folder)
    assert watched.wait_for_end().outcome is Outcome.CANCELLED
    assert [event.attempt for event in watched.all(AttemptStarted)] == [0, 1]
    assert sorted((event.node, event.generation) for event in watched.all(NodeCreated)) == [
        *((0, 0), (0, 1)),
        *((1, 0), (1, 1)),
    ]
    done = steps_once(watched)
    assert done == list(range(1, done[-1] + 1))


@ON_24_11
def test_run_that_loses_a_node_without_a_spare_continues_in_another_allocation(
    slurm_runs: Runs, cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = slurm_runs.base / "python"
    python.mkdir()
    (python / "sitecustomize.py").write_text(HASTY_CONTROLLER)
    monkeypatch.setenv("PYTHONPATH", str(python))
    watched = steps(slurm_runs, 200)
    watched.wait_for(StepCommitted)
    first = allocation(watched)
    cluster.kill_processes(machines(watched)[1])
    watched.wait_for(AttemptStarted)
    assert allocation(watched) > first
    assert watched.wait_for_end().outcome is Outcome.SUCCEEDED
    assert steps_once(watched) == list(range(1, 201))


def test_waiting_run_says_what_slurm_says_and_a_cancelled_one_leaves_nothing(
    slurm_runs: Runs, cluster: SlurmCluster
) -> None:
    blocker = block(cluster)
    watched = steps(slurm_runs, 2000)
    waiting = watched.wait_for(NodeUnavailable, lambda event: "Resources" in event.reason)
    assert waiting.reason.endswith("pending, Resources: it is next, and waits until enough nodes are free")
    cluster.command("scancel", blocker)
    watched.wait_for(StepCommitted)
    api.cancel(watched.folder)
    assert watched.wait_for_end().outcome is Outcome.CANCELLED
    until(lambda: cluster.command("squeue", "-h") == "")
    assert list((slurm_runs.base / "nodes" / "runs").glob("*")) == []
    account = api.record(watched.folder).scheduler
    assert account is not None
    if cluster.has_accounting:
        assert [(each.state, each.nodes) for each in account.jobs] == [("CANCELLED by 0", 2)]
    else:
        assert "accounting storage is disabled" in account.missing


def test_refused_run_shows_what_slurm_says(slurm_runs: Runs, cluster: SlurmCluster) -> None:
    target = slurm_runs.base / ".holdfast" / "targets" / "wrong.yaml"
    target.write_text("kind: slurm\nslurm: {address: 127.0.0.1, partition: nowhere}\n")
    found = api.check_target(None, "wrong", base=slurm_runs.base)
    assert [finding.code for finding in found] == ["slurm-refused"]
    assert "invalid partition" in "".join(found[0].evidence)
    assert api.check_target(None, "cluster", base=slurm_runs.base) == ()


def test_rendered_script_is_accepted_by_sbatch(slurm_runs: Runs, cluster: SlurmCluster) -> None:
    job = api.load_job(None, command=("python", "train.py"), nodes=2)
    text = api.render(job, "spare", base=slurm_runs.base).text
    assert "#SBATCH --nodes=3" in text
    tested = subprocess.run(["sbatch", "--test-only"], input=text, capture_output=True, text=True, check=True)
    assert "to start at" in tested.stderr


@ON_24_11
def test_powered_off_node_is_replaced_by_a_spare(slurm_runs: Runs, cluster: SlurmCluster) -> None:
    text = slurm_target(cluster, slurm_runs.base, spares=1).replace("spares: 1", "spares: 1, gres: gpu:1")
    write_target(slurm_runs.base, "gpus", text)
    watched = steps(slurm_runs, 200, "gpus")
    watched.wait_for(StepCommitted)
    cluster.kill_node("n3")
    remove_sockets(slurm_runs.base, watched.folder.run_id, "node1.0")
    watched.wait_for(AttemptStarted)
    assert machines(watched) == {0: "n1", 1: "n2"}
    assert watched.wait_for_end().outcome is Outcome.SUCCEEDED
    assert steps_once(watched) == list(range(1, 201))
    cluster.start_node("n3")
    account = api.record(watched.folder).scheduler
    assert account is not None
    assert [(each.nodes, each.node_names, each.resources["gres/gpu"]) for each in account.jobs] == [
        (3, "n[1-3]", "3"),
        *[(2, "n[1-2]", "2")] * (len(account.jobs) - 1),
    ]


@ON_24_11
def test_cluster_is_accepted_by_a_newcomers_commands_and_by_whole_gangs(
    slurm_runs: Runs, cluster: SlurmCluster
) -> None:
    text = slurm_target(cluster, slurm_runs.base).replace("spares: 0", "spares: 0, options: [--exclusive]")
    write_target(slurm_runs.base, "whole", text)
    assert accepted(slurm_runs.base, "whole") == {"gang": "passed", "first-run": "passed"}


@ON_24_11
def test_machine_of_a_failed_gpu_is_drained_and_left_out_until_it_is_released(
    slurm_runs: Runs, cluster: SlurmCluster
) -> None:
    first = steps(slurm_runs, 4000, "spare")
    first.wait_for(StepCommitted)
    bad = machines(first)[1]
    first.drill(FaultTarget.GPU, 1, FaultAction.FAIL)
    first.wait_for(StepCommitted, lambda event: event.attempt == 1)
    assert first.codes().count("machine-cordoned") == 1
    assert f"holdfast: {first.folder.run_id}" in cluster.command("sinfo", "-h", "-R", "-n", bad, "-o", "%E")
    api.cancel(first.folder)
    first.wait_for_end()
    listed = api.machines("spare", base=slurm_runs.base).machines
    assert {each.name: each.state for each in listed} == {
        name: MachineState.QUARANTINED if name == bad else MachineState.FREE for name in ("n1", "n2", "n3")
    }
    second = slurm_runs.start("true", nodes=2, target="spare")  # and so without the spare: two nodes are left
    second.wait_for(NodeCreated)
    script = cluster.command("scontrol", "write", "batch_script", (second.folder.path / "allocation").read_text(), "-")
    assert f"#SBATCH --exclude={bad}\n" in script
    second.wait_for_end()
    assert api.release_machine(bad, "spare", base=slurm_runs.base) == ()
    assert "drain" not in cluster.command("sinfo", "-h", "-n", bad, "-o", "%T")
