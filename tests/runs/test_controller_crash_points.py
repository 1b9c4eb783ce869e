"""A controller may end between any two of its effects: what it had begun is neither lost nor done twice."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.runs.conftest import Runs, steps_done

from holdfast.events import (
    AttemptStarted,
    ControllerStarted,
    Outcome,
    RankExited,
    RecoveryDecided,
)

CRASH_POINTS = Path(__file__).parents[1] / "programs" / "crash_points"
START_EFFECTS = 39
"""Effects of a controller until the ranks of both nodes are at work, or a few more."""


def crash_controllers_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *effects: int) -> None:
    """End the controllers of the run that is started next, each after so many effects."""
    plan = tmp_path / "felled"
    plan.write_text("\n".join(map(str, effects)))
    monkeypatch.setenv("PYTHONPATH", str(CRASH_POINTS))
    monkeypatch.setenv("HOLDFAST_CRASH_POINTS", str(plan))


@pytest.mark.parametrize("first", range(0, START_EFFECTS, 3))
def test_start_is_done_once_wherever_its_controllers_end(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    crash_controllers_after(tmp_path, monkeypatch, first, first + 1, first + 2)
    watched = runs.steps(60)
    assert watched.wait_for_end().outcome is Outcome.SUCCEEDED
    assert len(watched.all(ControllerStarted)) > 1
    assert len(watched.all(AttemptStarted)) == 1
    assert watched.all(RecoveryDecided) == []
    assert watched.steps() == list(range(1, 61))
    assert steps_done(watched) == list(range(1, 61))
    assert sorted(event.rank for event in watched.all(RankExited)) == [0, 1]
