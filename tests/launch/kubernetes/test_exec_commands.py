"""What exec commands in a controller's pod send of a directory that ranks can write to."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
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


@contextlib.contextmanager
def reader(folder: RunDir) -> Iterator[subprocess.Popen[bytes]]:
    """A client that follows a run, and has read all of it once."""
    command = [sys.executable, "-m", exec_commands.__name__, str(folder.path), "follow"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"{}\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"{}\n"
        yield process
        process.kill()


def test_pod_stays_until_all_readers_and_the_machine_that_started_the_run_have_the_log(tmp_path: Path) -> None:
    folder = RunDir(tmp_path)
    with reader(folder) as first:
        first.communicate(exec_commands.COPIED)
        assert not folder.synced.exists(), "the machine that started the run does not have it"
    with reader(folder) as other, reader(folder) as starter:
        assert starter.stdin is not None
        assert other.stdout is not None
        starter.stdin.write(exec_commands.SYNCED)
        starter.stdin.flush()
        for _ in range(10):  # polls of the other, which has not said that it is done
            assert other.stdout.readline() == b"{}\n"
        assert not folder.synced.exists()
        other.communicate(exec_commands.COPIED)
        assert starter.wait() == 0
        assert folder.synced.exists()


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
