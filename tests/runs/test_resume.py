"""A run that resumes another one, on the same target or another: exact, from the job, code and checkpoints of that."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.runs.conftest import TORCH_FREE_TRAINER, Runs, WatchedRun
from tests.runs.target_fixtures import hosts_target, slurm_target, use_cluster, write_target
from tests.waiting import until

from holdfast import api
from holdfast import runs as python_runs
from holdfast.cli import main
from holdfast.errors import ExitCode, HoldfastError
from holdfast.events import CheckpointCommitted, FaultAction, FaultTarget, Outcome, RunCreated, StepCommitted
from holdfast.findings import Finding, Severity
from lab.slurm_cluster import SlurmCluster
from lab.ssh_hosts import SshHosts

LOOP = Path(__file__).parents[1] / "train" / "loop.py"
"""Every kind of random number affects its weights."""
ENDLESS = "1000000000"
MONARCH = "orchestrator=monarch"


@pytest.fixture
def project(runs: Runs, tmp_path: Path) -> Path:
    """A project with its own copy of the program, which a leg may change."""
    runs.base = tmp_path / "project"
    runs.base.mkdir()
    shutil.copy(LOOP, runs.base / "loop.py")
    return runs.base


@pytest.fixture
def sites(runs: Runs, project: Path, hosts: SshHosts) -> Iterator[Runs]:
    """The same with a target of two hosts."""
    write_target(project, "lab", hosts_target(hosts, "alpha", "beta"))
    yield runs
    runs.close()
    assert runs.left_on_hosts() == []


def start(runs: Runs, *overrides: str) -> WatchedRun:
    """A run whose ranks save to a folder that all machines share, and that ends with its first failure."""
    shared = f"checkpoint={{path: {runs.base.parent / 'shared'}, every_steps: 50}}"
    own = (shared, "env.OMP_NUM_THREADS=1", "recovery.max_restarts=0", *overrides)
    return runs.start(sys.executable, "loop.py", ENDLESS, "weights", overrides=own)


def saved_and_cancelled(watched: WatchedRun) -> int:
    """The step at which a run was cancelled."""
    watched.wait_for(StepCommitted)
    api.cancel(watched.folder)
    assert watched.wait_for_end().outcome is Outcome.CANCELLED
    return watched.all(CheckpointCommitted)[-1].step


def resume(runs: Runs, former: WatchedRun, on: str, *overrides: str, nodes: int | None = None) -> WatchedRun:
    return runs.watch(python_runs.Run(former.folder).resume(on=on, nodes=nodes, overrides=overrides).folder)


def to_step(steps: int, weights: Path) -> str:
    """The override by which the program ends at a step, and leaves its weights."""
    return f"command={json.dumps([sys.executable, 'loop.py', str(steps), str(weights)])}"


def weights_of(path: Path, ranks: int = 2) -> list[torch.Tensor]:
    return [tensor for rank in range(ranks) for tensor in torch.load(f"{path}.{rank}")]


def unbroken(runs: Runs, folder: Path, steps: int) -> list[torch.Tensor]:
    """The weights after so many steps of a training that nothing interrupts."""
    words = (str(LOOP), str(steps), str(folder / "unbroken"))
    watched = runs.start(sys.executable, *words, overrides=("env.OMP_NUM_THREADS=1", "recovery.max_restarts=0"))
    assert watched.wait_for_end().outcome is Outcome.SUCCEEDED
    assert resumed_from(watched)[0] == ""
    return weights_of(folder / "unbroken")


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def resumed_from(watched: WatchedRun) -> tuple[str, int]:
    created = watched.first(RunCreated)
    return created.resumed_run, created.resumed_step


def test_training_that_moves_to_hosts_and_back_is_bit_exact_and_keeps_its_code(sites: Runs, tmp_path: Path) -> None:
    """To hosts, back, to isolated nodes, and with Monarch here and there."""
    here = start(sites)
    first = saved_and_cancelled(here)
    there = resume(sites, here, "lab")
    (sites.base / "loop.py").write_text("raise SystemExit('not the code of the run')")
    assert resumed_from(there) == (here.folder.run_id, first)
    second = there.wait_for(CheckpointCommitted).step
    until(lambda: f"resumed after step {first}" in there.log(0), "what ranks print comes back later than their steps")
    there.drill(FaultTarget.RANK, 1, FaultAction.KILL)
    assert there.wait_for_end().outcome is Outcome.FAILED
    last = there.all(CheckpointCommitted)[-1].step
    assert last >= second > first
    write_target(sites.base, "isolated", "code: shipped\nisolation: netns\n")
    for on, *own in (("local",), ("isolated",), ("local", MONARCH), ("lab", MONARCH)):
        last += 60
        former, there = there, resume(sites, there, on, to_step(last, tmp_path / "moved"), *own)
        assert there.wait_for_end().outcome is Outcome.SUCCEEDED
        assert resumed_from(there) == (former.folder.run_id, former.all(CheckpointCommitted)[-1].step)
    assert_equal(weights_of(tmp_path / "moved"), unbroken(sites, tmp_path, last))


def test_training_that_moves_to_slurm_is_bit_exact(
    runs: Runs, project: Path, slurm: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_cluster(slurm, monkeypatch)
    write_target(project, "cluster", slurm_target(slurm, tmp_path))
    here = start(runs)
    step = saved_and_cancelled(here)
    there = resume(runs, here, "cluster", to_step(step + 60, tmp_path / "moved"))
    assert there.wait_for_end().outcome is Outcome.SUCCEEDED
    assert resumed_from(there) == (here.folder.run_id, step)
    with_monarch = resume(runs, there, "cluster", to_step(step + 120, tmp_path / "moved"), MONARCH)
    assert with_monarch.wait_for_end().outcome is Outcome.SUCCEEDED
    assert resumed_from(with_monarch)[0] == there.folder.run_id
    assert_equal(weights_of(tmp_path / "moved"), unbroken(runs, tmp_path, step + 120))


def test_other_world_size_is_announced_and_resumes(
    runs: Runs, project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = start(runs)
    step = saved_and_cancelled(here)
    words = ("--nodes", "1", "--set", to_step(step + 1, tmp_path / "alone"), "-d", "-o", "json")
    assert main(["run", "--resume", here.folder.run_id, *words]) == 0
    told = capsys.readouterr()
    alone = runs.watch(api.find_run(json.loads(told.out)["run"]))
    assert alone.wait_for_end().outcome is Outcome.SUCCEEDED
    assert "saved by 2 ranks and 1 resume from it" in told.err
    assert f"resumed after step {step}" in alone.log(0)
    assert api.status(alone.folder).resumed_run == here.folder.run_id
    assert len(weights_of(tmp_path / "alone", ranks=1)) == 4


def refused(runs: Runs, former: WatchedRun, on: str, *overrides: str) -> Finding:
    """The error that keeps a run from being resumed on a target."""
    with pytest.raises(HoldfastError) as error:
        resume(runs, former, on, *overrides)
    (found,) = [each for each in error.value.findings if each.severity is Severity.ERROR]
    return found


def test_what_cannot_move_is_said_before_anything_starts(
    sites: Runs, hosts: SshHosts, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own_disk = (sys.executable, str(TORCH_FREE_TRAINER), "5", "0.01")
    on_hosts = sites.start(*own_disk, nodes=1, target="lab")
    live = sites.steps(100_000, 0.02)
    live.wait_for(CheckpointCommitted)
    assert refused(sites, live, "lab").code == "run-not-over"
    assert main(["run", "--resume", live.folder.run_id, "--", "true"]) == ExitCode.USAGE
    assert "[resume-and-job]" in capsys.readouterr().err
    assert on_hosts.wait_for_end().outcome is Outcome.SUCCEEDED
    there = refused(sites, on_hosts, "local")
    assert (there.code, "own disk" in there.what) == ("checkpoints-out-of-reach", True)
    assert refused(sites, on_hosts, "local", f"checkpoint.path={tmp_path}").code == "resumed-checkpoint-missing"
    api.cancel(live.folder, force=True)
    live.wait_for_end()
    hidden = tmp_path / "hidden"
    (live.folder.checkpoints).rename(hidden)
    assert refused(sites, live, "local").code == "resumed-checkpoint-missing"
    with pytest.raises(HoldfastError) as error:
        resume(sites, live, "lab")
    assert [each.what.split()[0] for each in error.value.findings if each.code == "resumed-checkpoint-missing"] == [
        "alpha",
        "beta",
    ]
    none = sites.start(sys.executable, "-c", "pass", overrides=("recovery.peer_checkpoints=auto",))
    none.wait_for_end()
    nothing = refused(sites, none, "lab")
    assert (nothing.code, len(nothing.evidence)) == ("nothing-to-resume", 1)
    assert len(api.runs()) == 3
