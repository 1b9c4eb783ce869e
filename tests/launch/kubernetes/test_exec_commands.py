"""What exec commands in a controller's pod send of a directory that ranks can write to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.launch.kubernetes.incluster import exec_commands
from holdfast.run_dir import RunDir


def followed(folder: RunDir) -> dict[str, bytes]:
    """The files that one look sends."""
    command = [sys.executable, "-m", exec_commands.__name__, str(folder.path), "follow"]
    said = subprocess.run(command, input=b'{"events.jsonl": 0}\ndone', capture_output=True, check=True).stdout
    found = dict[str, bytes]()
    while said:
        head, said = said.split(b"\n", 1)
        if piece := json.loads(head):
            found[piece["name"]] = found.get(piece["name"], b"") + said[: piece["bytes"]]
            said = said[piece["bytes"] :]
    return found


def test_no_link_leads_exec_commands_to_the_logs_of_another_run(tmp_path: Path) -> None:
    ours, theirs = RunDir(tmp_path / "ours"), RunDir(tmp_path / "theirs")
    for folder in (ours, theirs):
        log = folder.path / "logs" / "attempt-0" / "rank-0.log"
        log.parent.mkdir(parents=True)
        log.write_text(f"of {folder.run_id}\n")
    (ours.path / "logs" / "attempt-1").symlink_to("../../theirs/logs/attempt-0")
    (ours.path / "logs" / "attempt-0" / "rank-1.log").symlink_to("../../../theirs/logs/attempt-0/rank-0.log")
    os.mkfifo(ours.path / "logs" / "attempt-0" / "rank-2.log")
    (ours.path / "logs" / "no-folder").touch()
    assert followed(ours) == {"logs/attempt-0/rank-0.log": b"of ours\n"}


@pytest.mark.parametrize("name", ["attempt-1/rank-0.log", "attempt-0/rank-1.log"])
def test_link_that_takes_a_files_place_after_the_look_is_refused(tmp_path: Path, name: str) -> None:
    real = tmp_path / "attempt-0" / "rank-0.log"
    real.parent.mkdir()
    real.write_text("x")
    (tmp_path / "attempt-1").symlink_to("attempt-0")
    (tmp_path / "attempt-0" / "rank-1.log").symlink_to("rank-0.log")
    os.close(exec_commands.open_no_symlink(str(real), os.O_RDONLY))
    with pytest.raises(OSError, match=r"Not a directory|a link"):
        exec_commands.open_no_symlink(str(tmp_path / name), os.O_RDONLY)
