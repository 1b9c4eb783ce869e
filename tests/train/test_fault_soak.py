"""Through 20 faults of every kind two ranks end bit-exact with two that had none."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from tests.conftest import SmallDisk
from tests.train import fault_soak

ROOT = Path(__file__).parents[2]


def run(folder: Path, *disks: Path, seed: int | None = None) -> list[str]:
    """Returns the kinds of the faults that came."""
    folder.mkdir()
    command = [sys.executable, "-m", "tests.train.fault_soak", folder, *disks, *([] if seed is None else [str(seed)])]
    variables = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False, cwd=ROOT, env=variables)
    assert done.returncode == 0, done.stderr[-5000:] + done.stdout
    return [line.split()[1] for line in done.stdout.splitlines() if line.startswith("fault ")]


@pytest.mark.root
@pytest.mark.slow
def test_state_after_20_random_faults_is_that_of_an_unfailed_run_and_each_sample_was_taken_once(
    tmp_path: Path, small_disk: SmallDisk
):
    run(tmp_path / "unfailed", *(small_disk(8 << 20) for _ in range(2)))
    came = run(tmp_path / "failed", *(small_disk(8 << 20) for _ in range(2)), seed=1)
    assert len(came) == 20
    assert min(Counter(came).values()) >= 3
    taken: list[int] = []
    for rank in range(2):
        ones, _ = torch.load(tmp_path / "unfailed" / f"{rank}.pt")
        others, samples = torch.load(tmp_path / "failed" / f"{rank}.pt")
        assert all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))
        taken += samples
    assert sorted(taken) == list(range(4 * fault_soak.STEPS))
