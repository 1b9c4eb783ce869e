"""Drills that are written in a file: all of them are asked for, or what is wrong is said, with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.errors import ExitCode, HoldfastError
from holdfast.events import DrillAction, DrillRequested, DrillTarget
from holdfast.job.drillbook import read_drills


def book(folder: Path, text: str) -> Path:
    path = folder / "drills.yaml"
    path.write_text(text)
    return path


def test_drills_of_a_file_are_those_of_the_command_line(tmp_path: Path) -> None:
    path = book(
        tmp_path,
        """
drills:
  - do: kill rank:3
    at_step: 60
  - do: stop agent 0
    for_s: 20
  - {do: slow node:1, by: 3, for_s: 5.5}
  - do: kill controller
""",
    )
    assert read_drills(path) == (
        DrillRequested(at=0.0, action=DrillAction.KILL, target=DrillTarget.RANK, index=3, at_step=60),
        DrillRequested(at=0.0, action=DrillAction.STOP, target=DrillTarget.AGENT, index=0, for_s=20.0),
        DrillRequested(at=0.0, action=DrillAction.SLOW, target=DrillTarget.NODE, index=1, for_s=5.5, amount=3.0),
        DrillRequested(at=0.0, action=DrillAction.KILL, target=DrillTarget.CONTROLLER, index=0),
    )


def test_everything_that_is_wrong_is_said_with_its_line(tmp_path: Path) -> None:
    path = book(tmp_path, "drills:\n  - do: smash rank:1\n  - do: kill rnk:1\n")
    with pytest.raises(HoldfastError) as raised:
        read_drills(path)
    assert raised.value.exit_code is ExitCode.USAGE
    assert [(each.code, each.where) for each in raised.value.findings] == [
        ("bad-action", f"{path}:2"),
        ("bad-target", f"{path}:3"),
    ]


@pytest.mark.parametrize(
    "text", ["", "drills: []", "drills: 3", "drills: [{do: ''}]", "drills: [{when: 3}]", "- kill rank:1"]
)
def test_file_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(HoldfastError) as raised:
        read_drills(book(tmp_path, text))
    assert raised.value.exit_code is ExitCode.USAGE
    assert raised.value.findings
