"""What `prune` deletes, and what stays with the reason."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from holdfast import api
from holdfast.cli import main
from holdfast.errors import HoldfastError
from holdfast.events import Outcome, RunCreated, RunFinished
from holdfast.events.log_writer import EventWriter
from holdfast.job.run_spec import RunSpec
from holdfast.job.spec import Job
from holdfast.run_dir import RunDir

NOW = time.time()
DAY_S = 86400.0


def run_that_ended(days_ago: float | None, name: str) -> RunDir:
    """A run that ended then; None for one that is not over."""
    run = RunDir.create(name)
    accepted = RunSpec(job=Job(command=("train",)), base="/", created_at=1.0, fabric="tcp")
    run.job.write_text(accepted.model_dump_json(exclude_defaults=True))
    end = RunFinished(at=NOW - (days_ago or 0) * DAY_S, outcome=Outcome.SUCCEEDED, exit_code=0)
    writer = EventWriter(run.events)
    writer.append([accepted.created_event(run.run_id), *([] if days_ago is None else [end])])
    writer.close()
    return run


def test_old_folders_are_deleted_and_the_rest_stays_with_the_reason(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, young, going = run_that_ended(40, "old"), run_that_ended(2, "young"), run_that_ended(None, "going")
    with_data = run_that_ended(40, "with-data")
    (with_data.checkpoints / "step-1").mkdir(parents=True)
    (with_data.checkpoints / "step-1" / "shard").write_bytes(b"x" * 5000)
    held = run_that_ended(40, "held")
    lock = held.lock()
    assert lock is not None
    newer = run_that_ended(40, "newer")
    newer_log = EventWriter(newer.path / "of-newer")
    newer_log.append([RunCreated(at=1.0, run="x", job={}, format=99)])
    newer_log.close()
    (newer.path / "of-newer").rename(newer.events)
    everything = {old, young, going, with_data, held, newer}

    assert main(("prune", "--dry-run")) == 0
    listed = capsys.readouterr().out
    assert f"{old.run_id} would be deleted, " in listed
    assert young.run_id not in listed
    assert set(api.runs()) == everything

    assert main(("prune",)) == 0
    shown = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert set(api.runs()) == everything - {old}
    assert shown[old.run_id].endswith(f" MiB: {old.path}")
    assert "is not over" in shown[going.run_id]
    assert "has checkpoints" in shown[with_data.run_id]
    assert "is alive" in shown[held.run_id]
    assert "cannot be read" in shown[newer.run_id]
    os.close(lock)

    assert main(("prune", "--older-than", "1d")) == 0
    assert set(api.runs()) == {going, with_data, newer}
    assert main(("prune", with_data.run_id, going.run_id)) == 0
    assert set(api.runs()) == {going, newer}


def test_unknown_run_or_age_deletes_nothing(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_that_ended(40, "old")
    assert main(("prune", "--older-than", "-1d")) == 2
    assert "bad-age" in capsys.readouterr().err
    with pytest.raises(HoldfastError, match="there is no run 'old'"):
        api.prune("local", older_than_s=0.0, named=[run.run_id, "old"])
    assert api.runs() == [run]
