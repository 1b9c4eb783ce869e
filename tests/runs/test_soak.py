"""The soak that CI runs: thirty random faults in one run, none of them fatal, and nothing left."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_run_under_thirty_random_faults_recovers_from_each() -> None:
    soak = subprocess.run(
        [sys.executable, "-m", "bench.soak", "--faults", "30", "--seed", "7", "--every-s", "1.5", "--brisk"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert soak.returncode == 0, soak.stdout + soak.stderr
    assert "30 faults in" in soak.stdout
    assert "failed recoveries 0" in soak.stdout
    assert "not exactly once 0" in soak.stdout


@pytest.mark.slow
def test_replicas_under_thirty_random_faults_lose_no_step_and_end_alike() -> None:
    soak = subprocess.run(
        [
            sys.executable,
            "-m",
            "bench.soak",
            "--target",
            "replicas",
            "--faults",
            "30",
            "--seed",
            "3",
            "--every-s",
            "1.5",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert soak.returncode == 0, soak.stdout + soak.stderr
    assert "30 faults in" in soak.stdout
    assert "failed recoveries 0" in soak.stdout
