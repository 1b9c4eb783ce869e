"""The batch script of a controller in the allocation, what Slurm says of its job, and where requests to it go."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from holdfast import api
from holdfast.errors import HoldfastError
from holdfast.host.processes import machine_id
from holdfast.job.run_spec import RunSpec
from holdfast.job.targets import ControllerPlace, SlurmSettings
from holdfast.launch.controller_http import elsewhere
from holdfast.launch.slurm import batch_step, slurm_commands
from holdfast.launch.slurm.batch_script import NOT_SHARED, controller_script
from holdfast.launch.slurm.batch_step import own_address
from holdfast.launch.slurm.own_job import OwnJob
from holdfast.launch.slurm.slurm_commands import parse_job
from holdfast.launch.slurm.slurm_target import _folder_findings
from holdfast.run_dir import RunDir

# Fields of `scontrol show job -o`, in its order.
RUNNING = (
    "JobId=7 JobState=RUNNING Reason=None ExitCode=0:0 PreemptTime=None "
    "ReqNodeList=(null) NodeList=n[1,3] BatchHost=n1 NumNodes=2"
)
AT_LIMIT = "JobId=7 JobState=COMPLETING Reason=TimeLimit ExitCode=0:15 PreemptTime=None NodeList=n1 BatchHost=n1"
PREEMPTED = "JobId=7 JobState=COMPLETING Reason=None ExitCode=0:15 PreemptTime=2026-11-28T23:01:02 NodeList=n1"
CANCELLED = "JobId=7 JobState=CANCELLED Reason=None ExitCode=0:15 PreemptTime=None NodeList=n1 BatchHost=n1 NumNodes=1"
REFUSED = "JobId=7 JobState=FAILED Reason=NonZeroExitCode ExitCode=66:0 PreemptTime=None NodeList=n1 BatchHost=n1"


def test_job_is_continued_unless_somebody_cancelled_it() -> None:
    cut_short = [parse_job(line).is_cut_short for line in (RUNNING, AT_LIMIT, PREEMPTED, CANCELLED, REFUSED)]
    assert cut_short == [True, True, True, False, False]
    assert (parse_job(RUNNING).node_list, parse_job(RUNNING).batch_host) == ("n[1,3]", "n1")
    assert parse_job(REFUSED).exit_status == NOT_SHARED


def test_start_of_a_requeued_job_differs_from_its_former_one() -> None:
    first = {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1"}
    again = {**first, "SLURM_RESTART_COUNT": "1"}
    assert OwnJob.of(first).start != OwnJob.of(again).start
    assert OwnJob.of(first).number == OwnJob.of(again).number == "7"


def test_a_former_start_does_not_requeue_the_job_that_runs_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    own = OwnJob.of({"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1"})
    requeued: list[str] = []
    monkeypatch.setattr(slurm_commands, "requeue", requeued.append)
    for restarts in (1, 0):
        monkeypatch.setattr(slurm_commands, "show", lambda _, count=restarts: parse_job(f"{RUNNING} Restarts={count}"))
        own.continue_elsewhere()
    assert requeued == ["7"]


def test_address_that_only_the_node_itself_reaches_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    own = OwnJob(number="7", restarts=0, node="n1")
    monkeypatch.setattr(batch_step, "node_address", lambda _: "127.0.0.1")
    assert own_address(own) == "127.0.0.1", "it is what slurm.conf says"
    monkeypatch.setattr(batch_step, "node_address", lambda _: "localhost")
    with pytest.raises(HoldfastError) as raised:
        own_address(own)
    assert raised.value.findings[0].code == "no-address"


def test_folder_of_nodes_is_not_that_of_the_controller(home: Path) -> None:
    assert [each.code for each in _folder_findings(str(home))] == ["bad-path"]
    assert list(_folder_findings(f"{home}-nodes")) == []


@pytest.fixture
def script(tmp_path: Path) -> str:
    """The script of a run whose folder has a name that a shell would split, and is not there."""
    job = api.load_job(None, command=("true",))
    settings = SlurmSettings(controller=ControllerPlace.ALLOCATION)
    accepted = RunSpec(job=job, base="/", created_at=1.0, fabric="tcp", target_kind="slurm", slurm=settings)
    return controller_script(accepted, RunDir(tmp_path / "it's $HOME" / "run-abc"))


def test_script_on_a_node_without_the_runs_folder_says_so(script: str, tmp_path: Path) -> None:
    done = subprocess.run(["bash"], input=script, capture_output=True, text=True, check=False)
    assert done.returncode == NOT_SHARED
    assert f"cannot read {tmp_path}/it's $HOME/run-abc: set HOLDFAST_HOME" in done.stderr


def test_script_is_started_again_by_slurm_and_shows_no_key(script: str) -> None:
    assert "#SBATCH --requeue\n" in script
    assert "#SBATCH --no-kill\n" in script
    assert "KEY" not in script


def test_requests_go_to_the_machine_that_the_record_names(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert elsewhere(run) is None
    record = {"host": "10.0.0.7", "port": 4711, "supervisor_pid": 1, "id": "a", **machine_id()}
    run.ca.touch()
    run.controller_record.write_text(json.dumps(record))
    assert elsewhere(run) is None
    run.controller_record.write_text(json.dumps(record | {"hostname": "n7"}))
    assert elsewhere(run) == ("10.0.0.7", 4711)
    run.ca.unlink()
    assert elsewhere(run) is None, "without a certificate it listens on its own loopback"
