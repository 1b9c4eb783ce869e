"""A rank's flight recorders are asked through their pipes; only new and whole dumps count."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from threading import Thread

import pytest

from holdfast.agent import flight_dump
from holdfast.agent.flight_dump import FlightRecorders, RankCollectives
from holdfast.protocol.flight_recorder_files import DUMP_PREFIX, NCCL_PIPE_PREFIX, dump_path, nccl_pipe, session_pipe

REAL = Path(__file__).parents[1] / "incidents" / "flight" / "trace_rank_0"
"""Of torch 2.15 over Gloo: it waits in its fourth collective."""


class Recorder:
    """Answers each request to a pipe as torch or a Session does: with a copy of a dump."""

    def __init__(self, pipe: Path, dump: Path, answer: Path | None = REAL) -> None:
        os.mkfifo(pipe)
        self._pipe = os.open(pipe, os.O_RDWR)
        self._dump, self._answer = dump, answer
        Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while os.read(self._pipe, 100):
            if self._answer is not None:
                shutil.copyfile(self._answer, self._dump)  # not at once: the first part may be read


@pytest.fixture
def environ(tmp_path: Path) -> Mapping[str, str]:
    """Of a rank whose job changes nothing."""
    socket = tmp_path / "0-0-3"
    return FlightRecorders(tmp_path, 0).env_defaults(socket) | {"HOLDFAST_RANK_SOCKET": str(socket)}


def dumped(tmp_path: Path, environ: Mapping[str, str]) -> RankCollectives:
    recorders = FlightRecorders(tmp_path, 0)
    recorders.add([3], environ)
    try:
        return asyncio.run(recorders.dump(3))
    finally:
        recorders.close()


def test_session_dumps_and_its_pipe_goes_with_the_attempt(tmp_path: Path, environ: Mapping[str, str]) -> None:
    pipe = session_pipe(Path(environ["HOLDFAST_RANK_SOCKET"]), 3)
    file = dump_path(environ[DUMP_PREFIX], 3, "gloo")
    Recorder(pipe, file)
    shown = dumped(tmp_path, environ)
    assert shown.files == (str(file),) == (f"{tmp_path}/flight-attempt-0-rank-3.gloo",)
    (position,) = shown.collectives
    assert (position.group, position.enqueued, position.completed, position.pending) == ("0", 4, 3, 4)
    assert [call.op for call in position.calls] == ["all_reduce"] * 3
    assert (pipe.exists(), file.exists()) == (False, True)


def test_nccl_and_session_are_read_together(tmp_path: Path, environ: Mapping[str, str]) -> None:
    Recorder(nccl_pipe(environ[NCCL_PIPE_PREFIX], 3), dump_path(environ[DUMP_PREFIX], 3))
    Recorder(session_pipe(Path(environ["HOLDFAST_RANK_SOCKET"]), 3), dump_path(environ[DUMP_PREFIX], 3, "gloo"))
    shown = dumped(tmp_path, environ)
    assert len(shown.files) == 2
    assert {position.group for position in shown.collectives} == {"0", "0#1"}


def test_prefix_of_the_job_counts(tmp_path: Path, environ: Mapping[str, str]) -> None:
    own = {**environ, DUMP_PREFIX: f"{tmp_path}/mine-"}
    Recorder(session_pipe(Path(environ["HOLDFAST_RANK_SOCKET"]), 3), tmp_path / "mine-3.gloo")
    assert dumped(tmp_path, own).files == (f"{tmp_path}/mine-3.gloo",)


def test_dump_of_an_earlier_hang_does_not_count(
    tmp_path: Path, environ: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flight_dump, "SESSION_TIMEOUT_S", 0.1)
    file = dump_path(environ[DUMP_PREFIX], 3, "gloo")
    shutil.copyfile(REAL, file)
    os.utime(file, (time.time() - 60, time.time() - 60))
    Recorder(session_pipe(Path(environ["HOLDFAST_RANK_SOCKET"]), 3), file, answer=None)
    assert dumped(tmp_path, environ) == RankCollectives()


def test_rank_without_a_recorder_costs_no_wait(tmp_path: Path, environ: Mapping[str, str]) -> None:
    pipe = session_pipe(Path(environ["HOLDFAST_RANK_SOCKET"]), 3)
    os.mkfifo(pipe)  # a rank that has ended left it
    began = time.monotonic()
    assert dumped(tmp_path, environ) == dumped(tmp_path, {}) == RankCollectives()
    assert time.monotonic() - began < flight_dump.SESSION_TIMEOUT_S
