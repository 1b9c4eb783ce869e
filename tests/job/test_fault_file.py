"""Drills in a file: all of them are requested, or the error is reported with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.errors import ExitCode, HoldfastError
from holdfast.events import FaultAction, FaultRequested, FaultTarget
from holdfast.job.fault_file import read_fault_file


def book(folder: Path, text: str) -> Path:
    path = folder / "drills.yaml"
    path.write_text(text)
    return path


def test_drills_of_a_file_are_those_of_the_command_line(tmp_path: Path) -> None:
    path = book(
        tmp_path,
        """
faults:
  - fault: kill rank:3
    at_step: 60
  - fault: stop agent 0
    for_s: 20
  - {fault: slow node:1, amount: 3, for_s: 5.5}
  - fault: kill controller
""",
    )
    assert read_fault_file(path) == (
        FaultRequested(at=0.0, action=FaultAction.KILL, target=FaultTarget.RANK, index=3, at_step=60),
        FaultRequested(at=0.0, action=FaultAction.STOP, target=FaultTarget.AGENT, index=0, for_s=20.0),
        FaultRequested(at=0.0, action=FaultAction.SLOW, target=FaultTarget.NODE, index=1, for_s=5.5, amount=3.0),
        FaultRequested(at=0.0, action=FaultAction.KILL, target=FaultTarget.CONTROLLER, index=0),
    )


def test_everything_that_is_wrong_is_said_with_its_line(tmp_path: Path) -> None:
    path = book(tmp_path, "faults:\n  - fault: smash rank:1\n  - fault: kill rnk:1\n")
    with pytest.raises(HoldfastError) as raised:
        read_fault_file(path)
    assert raised.value.exit_code is ExitCode.USAGE
    assert [(each.code, each.where) for each in raised.value.findings] == [
        ("bad-fault-action", f"{path}:2"),
        ("bad-fault-target", f"{path}:3"),
    ]


@pytest.mark.parametrize(
    "text", ["", "faults: []", "faults: 3", "faults: [{fault: ''}]", "faults: [{when: 3}]", "- kill rank:1"]
)
def test_file_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(HoldfastError) as raised:
        read_fault_file(book(tmp_path, text))
    assert raised.value.exit_code is ExitCode.USAGE
    assert raised.value.findings
