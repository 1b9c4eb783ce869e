"""Damaged files in a run directory: every verb answers immediately and without a traceback."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from holdfast import api
from holdfast.errors import ExitCode
from holdfast.events import Outcome, RunFinished
from holdfast.events.log import last_event
from holdfast.events.log_writer import EventWriter
from holdfast.job.run_spec import RunSpec
from holdfast.run_dir import RunDir

if TYPE_CHECKING:
    from tests.cli.conftest import Cli


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(path.name)
    finally:
        os.chdir(here)


def _huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "missing": lambda _: None,
    "empty": lambda path: path.write_bytes(b""),
    "list": lambda path: path.write_text("[]\n"),
    "wrong types": lambda path: path.write_text(
        '{"job": [], "host": 1, "port": "x", "supervisor_pid": [], "id": {}, "failed": "y", "pid": "1", "run": 3}\n'
    ),
    "binary": lambda path: path.write_bytes(bytes(range(256)) * 300),
    "deep": lambda path: path.write_bytes(b"[" * 100_000),
    "huge": _huge,
    "folder": lambda path: path.mkdir(),
    "fifo": _fifo,
    "socket": _socket,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "loop": lambda path: path.symlink_to(path),
}

FILES = (
    "job.json",
    "events.jsonl",
    "run-row.json",
    "controller.json",
    "controller.log",
    "remote.json",
    "cluster-contact.json",
    "code-upload.json",
    "token",
    "secrets.json",
    "lock",
    "control.sock",
    "nodes",
    "nodes/node0.0/agent.json",
    "nodes/node0.0/token",
    "nodes/node0.0/left",
    "nodes/node0.0/group",
    "nodes/node0.0/sockets",
    "logs/attempt-0/rank-0.log",
)


def _run(*, over: bool) -> RunDir:
    """A run without a supervisor, finished or not."""
    run = RunDir.create("test")
    accepted = RunSpec(job=api.load_job(None, command=["true"]), base="/", created_at=1.0, fabric="tcp")
    for path in (run.node_dir(0, 0), run.attempt_log_dir(0)):
        path.mkdir(parents=True)
    run.job.write_text(accepted.model_dump_json(exclude_defaults=True))
    run.token.write_text("token")
    run.secrets.write_text('{"environ": {}, "secrets": {}}')
    run.rank_log(0, 0).write_text("hello\n")
    writer = EventWriter(run.events, reservation_bytes=0)
    end = RunFinished(at=2.0, outcome=Outcome.FAILED, exit_code=1, reason="test")
    writer.append([accepted.created_event(run.run_id), *([end] if over else [])])
    writer.close()
    return run


def _damage(run: RunDir, name: str, how: str) -> None:
    path = run.path / name
    if path.is_dir():
        path.rename(run.path / "aside")
    path.unlink(missing_ok=True)
    DAMAGES[how](path)


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_every_verb_answers_whatever_a_file_is(cli: Cli, name: str) -> None:
    for how in DAMAGES:
        for over in (True, False):
            run = _run(over=over)
            _damage(run, name, how)
            for verb, *more in [("status", "-o", "json"), ("logs",), ("cancel", "--force")]:
                answer = cli(verb, run.run_id, *more)
                assert answer.code != ExitCode.INTERNAL, (how, over, verb, answer.err)
            answer = cli("ps")
            assert answer.code == 0, (how, over, answer.err)
            healthy = name not in ("events.jsonl", "remote.json")
            if healthy and not over:
                assert isinstance(last_event(run.events), RunFinished), (how, answer.err)


@pytest.mark.parametrize("how", [how for how in DAMAGES if how != "missing"])
def test_damaged_job_is_named_with_what_to_do(cli: Cli, how: str) -> None:
    run = _run(over=False)
    _damage(run, "job.json", how)
    answer = cli("attach", run.run_id)
    assert answer.code == ExitCode.STORAGE_FAILED, answer.err
    assert "run-file-corrupt" in answer.err
    assert f"holdfast cancel --force {run.run_id}" in " ".join(answer.err.split())
