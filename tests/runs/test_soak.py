"""The soak that CI runs: thirty random faults in one run, none of them fatal, and nothing left."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def soak(*options: str) -> str:
    """What a soak of thirty faults prints; its processes are forks, which saves their imports."""
    done = subprocess.run(
        [sys.executable, "-m", "bench.soak", "--faults", "30", "--every-s", "1.5", "--forked", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "30 faults in" in done.stdout
    assert "failed recoveries 0" in done.stdout
    return done.stdout


@pytest.mark.slow
def test_run_under_thirty_random_faults_recovers_from_each() -> None:
    assert "not exactly once 0" in soak("--brisk", "--seed", "7")


@pytest.mark.slow
def test_replicas_under_thirty_random_faults_lose_no_step_and_end_alike() -> None:
    soak("--target", "replicas", "--seed", "3")
