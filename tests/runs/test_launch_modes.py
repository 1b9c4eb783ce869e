"""One program with a Session, started in three ways: the same metrics, and bit-exact weights."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.runs.conftest import Runs

from holdfast.events import Outcome, StepCommitted
from holdfast.metrics.metric_text import format_metrics

LOOP = Path(__file__).parents[1] / "train" / "loop.py"
STEPS = "6"


@pytest.mark.slow
def test_program_does_the_same_under_holdfast_under_torchrun_and_alone(runs: Runs, tmp_path: Path) -> None:
    plain = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
    environ = plain | {"OMP_NUM_THREADS": "1"}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    printed: list[str] = []
    for name, launcher in (("alone", []), ("torchrun", torchrun)):
        argv = [sys.executable, *launcher, str(LOOP), STEPS, str(tmp_path / name)]
        ran = subprocess.run(argv, env=environ, check=True, capture_output=True, text=True, timeout=280)
        (line,) = (line for line in ran.stdout.splitlines() if line.startswith("step 1: "))
        printed.append(line.split(",")[0])

    command = (sys.executable, str(LOOP), STEPS, str(tmp_path / "holdfast"))
    watched = runs.start(*command, nodes=1, overrides=("env.OMP_NUM_THREADS=1",))
    first = watched.wait_for(StepCommitted, lambda event: event.first == 1)
    assert watched.wait_for_end().outcome is Outcome.SUCCEEDED
    if first.step == 1:  # else several steps are one line of the log, with the figures of the last
        printed.append(f"step 1: {format_metrics(first.metrics)[0]}")
    assert len(set(printed)) == 1
    assert printed[0].startswith("step 1: loss ")

    weights = [torch.load(tmp_path / f"{name}.0") for name in ("alone", "torchrun", "holdfast")]
    for each in weights[1:]:
        assert all(torch.equal(mine, other) for mine, other in zip(weights[0], each, strict=True))
