"""What of a run another one may continue, by its log and its target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast import api
from holdfast.errors import HoldfastError
from holdfast.events import (
    AnyEvent,
    AttemptStarted,
    CheckpointCommitted,
    Outcome,
    RunFinished,
    StepCommitted,
    UpdateRequested,
)
from holdfast.events.log import encode_line
from holdfast.job.run_spec import CodeArchive, RunSpec
from holdfast.launch.code.archive import archive_path
from holdfast.launch.new_run import new_run_dir, write_inputs
from holdfast.resume_run import read_former_run, resume_findings, resumed_job
from holdfast.run_dir import RunDir

SAVED = "/holdfast/runs/x/checkpoints/step-00000010"


def attempt(digest: str = "") -> AttemptStarted:
    return AttemptStarted(at=1.0, replica=0, attempt=0, world_size=2, master_addr="", master_port=1, code_digest=digest)


def saved(path: str = SAVED) -> CheckpointCommitted:
    return CheckpointCommitted(at=2.0, node=0, replica=0, attempt=0, step=10, path=path)


def ended(outcome: Outcome = Outcome.CANCELLED) -> RunFinished:
    return RunFinished(at=4.0, outcome=outcome, exit_code=1)


def run_of(*events: AnyEvent, kind: str = "local", target: str = "here", **accepted: Any) -> RunDir:
    """A run that is over, with this log."""
    job = api.load_job(None, command=("python", "train.py"), nodes=2, overrides=accepted.pop("overrides", ()))
    spec = RunSpec(job=job, base="/project", created_at=1.0, fabric="tcp", target_kind=kind, target=target, **accepted)
    with new_run_dir("job") as folder:
        write_inputs(folder, spec)
        folder.events.write_bytes(b"".join(map(encode_line, events)))
    return folder


def codes(run: RunDir, on: str = "there", overrides: tuple[str, ...] = ()) -> set[str]:
    """What is said of a run that is resumed on a target."""
    former = read_former_run(run)
    wanted = api.load(None, command=("python", "train.py"), nodes=2, overrides=overrides)
    loaded, resumed = resumed_job(former, wanted)
    return {each.code for each in resume_findings(former, loaded, resumed, on)} - {"run-resumed"}


@pytest.mark.parametrize(
    ("kind", "accepted", "on", "reached"),
    [
        ("local", {}, "there", True),
        ("hosts", {}, "here", False),
        ("slurm", {}, "there", False),
        ("slurm", {"checkpoint_root": "/shared"}, "there", True),
        ("hosts", {"overrides": ("checkpoint=/shared",)}, "there", True),
        ("kubernetes", {}, "here", True),
        ("kubernetes", {}, "there", False),
        ("kubernetes", {"durable_controller_disk": False}, "here", False),
        ("kubernetes", {"durable_controller_disk": False, "overrides": ("checkpoint=s3://b/r",)}, "there", True),
    ],
)
def test_checkpoints_move_as_far_as_their_place_is_shared(
    home: Path, kind: str, accepted: dict[str, Any], on: str, reached: bool
) -> None:
    url = "s3" in str(accepted)
    overrides = accepted.get("overrides", ())
    run = run_of(attempt(), saved("s3://b/r/step-00000010" if url else SAVED), ended(), kind=kind, **accepted)
    assert ("checkpoints-out-of-reach" in codes(run, on, overrides)) != reached
    assert "checkpoints-out-of-reach" not in codes(run, on, overrides=("checkpoint=/copied",))


def test_run_that_failed_may_have_left_its_newest_checkpoint_on_its_nodes(home: Path) -> None:
    store = ("checkpoint=s3://b/r",)
    events = (attempt(), saved("s3://b/r/step-00000010"))
    assert "checkpoint-not-uploaded" in codes(run_of(*events, ended(Outcome.FAILED), overrides=store))
    assert "checkpoint-not-uploaded" not in codes(run_of(*events, ended(), overrides=store))


def test_code_is_that_of_the_last_attempt_if_its_archive_is_there(home: Path) -> None:
    code = CodeArchive(digest="a" * 64, bytes=1, files=1, cwd="sub")
    update = UpdateRequested(at=1.5, digest="b" * 64, bytes=2, files=2, cwd="sub")
    run = run_of(attempt("a" * 64), update, attempt("b" * 64), saved(), ended(), code=code)
    former = read_former_run(run)
    assert former.code == CodeArchive(digest="b" * 64, bytes=2, files=2, cwd="sub")
    assert "resumed-code-not-kept" in codes(run)
    run.code.mkdir()
    archive_path(run.code, "b" * 64).touch()
    assert codes(run) == set()


def test_steps_after_the_checkpoint_and_lost_peer_copies_are_announced(home: Path) -> None:
    step = StepCommitted(at=3.0, replica=0, attempt=0, step=13, started=2.0, ended=3.0)
    former = read_former_run(run_of(attempt(), saved(), step, ended(), overrides=("recovery.peer_checkpoints=auto",)))
    loaded, resumed = resumed_job(former, api.load(None, command=("python", "train.py")))
    announced = resume_findings(former, loaded, resumed, "here")[0]
    assert announced.evidence == ("steps to compute again: 3", "copies in the memory of nodes ended with the run")


def test_run_without_a_checkpoint_of_its_own_has_that_which_it_resumed(home: Path) -> None:
    first = read_former_run(run_of(attempt(), saved(), ended()))
    second = run_of(attempt(), ended(), resumed=first.newest)
    assert read_former_run(second).newest.step == 10
    with pytest.raises(HoldfastError, match="no checkpoint"):
        read_former_run(run_of(attempt(), ended()))
