"""The kernel counts what is predicted for a small layout."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.launch.local import netns

ROOT = Path(__file__).parents[2]


@pytest.mark.root
@pytest.mark.slow
def test_ddp_of_two_ranks_sends_what_is_predicted(tmp_path: Path) -> None:
    if reason := netns.unavailable():
        pytest.skip(reason)
    answer = tmp_path / "results.json"
    done = subprocess.run(
        [sys.executable, "-m", "bench.traffic", "--only", "DDP, 2", "--json", answer],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = json.loads(answer.read_text())["results"]
    assert result["met"] == "yes", done.stdout
    assert set(result["details"]) > {"DDP, 2 ranks"}
