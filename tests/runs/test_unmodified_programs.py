"""Programs that know nothing of holdfast, of every framework: started on two nodes, killed once, finished.

Their processes are forks of one that has imported what they do (tests/programs/python_forks.py).
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.runs.conftest import PREWARMED, STEP_CLOCK, Runs
from tests.runs.forked_starts import ForkedStarts

from holdfast.events import AttemptStarted, Outcome, RecoveryDecided, RunFinished, StepCommitted

UNMODIFIED = Path(__file__).parents[1] / "programs" / "unmodified"
WITHIN_S = 300.0
"""Launchers import torch and more, some of them twice, and the machine may have other work."""
IMPORTED = ("accelerate", "deepspeed", "lightning", "transformers")
AT_ONCE = 2
"""Programs that run at a time: each waits about a third of its time."""


def beside_python(program: str) -> str:
    return str(Path(sys.executable).with_name(program))


@dataclass(frozen=True, kw_only=True)
class Program:
    """One program of the suite, and what becomes of it; docs/launchers.md has the same table."""

    command: tuple[str, ...]
    resumes: bool = True
    """Whether it loads its own checkpoint; else it starts over."""
    launch: str = "per-rank"
    steps: bool = True
    """Whether it has an optimizer of torch, whose steps the step clock counts."""


PROGRAMS = {
    "ddp": Program(command=("python", "ddp_snapshot.py")),
    "shell": Program(command=("./train.sh",)),
    "plain": Program(command=("python", "plain_gpt.py"), resumes=False),
    "fsdp2": Program(command=("python", "fsdp2_dcp.py")),
    "post-local-sgd": Program(command=("python", "post_local_sgd.py"), resumes=False),
    "torchrun": Program(
        command=(beside_python("torchrun"), "elastic.py", "--dist-backend", "gloo", "--epochs", "4"), launch="per-node"
    ),
    "accelerate": Program(command=("python", "accelerate_loop.py")),
    "transformers": Program(
        command=(
            *("python", "hf_trainer.py", "--output_dir", "out", "--max_steps", "4", "--save_steps", "1"),
            *("--per_device_train_batch_size", "1", "--use_cpu", "--report_to", "none"),
        )
    ),
    "lightning": Program(command=("python", "lightning_fit.py")),
    "deepspeed": Program(command=(beside_python("deepspeed"), "deepspeed_zero.py"), launch="deepspeed"),
    "jax": Program(command=("python", "jax_env.py"), steps=False),
    "jax-own-coordinator": Program(command=("python", "jax_own.py", "PORT"), steps=False),
    "mpi4py": Program(command=("mpirun", "python", "-m", "mpi4py", "mpi_average.py"), launch="mpi", steps=False),
}


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a run of a program left behind."""

    ended: RunFinished
    attempts: list[int]
    recoveries: list[RecoveryDecided]
    logs: tuple[str, str]
    clocked_steps: int
    """Highest number of a step that the step clock counted."""
    notes: list[list[str]]
    """Of each rank: the epoch where its last process began, and its weights."""


Results = dict[str, "Future[Result]"]


def killed_once(name: str, folder: Path) -> Result:
    """Run a program of the suite in a copy of its folder, to its end."""
    program = PROGRAMS[name]
    runs = Runs(Path(shutil.copytree(UNMODIFIED, folder)))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    command = tuple({"python": sys.executable, "PORT": port}.get(word, word) for word in program.command)
    try:
        watched = runs.start(*command, overrides=(PREWARMED, *STEP_CLOCK, f"launch={program.launch}", "fabric=tcp"))
        ended = watched.wait_for_end(WITHIN_S)
        runs.close()
    finally:
        runs.kill()
    return Result(
        ended=ended,
        attempts=[event.attempt for event in watched.all(AttemptStarted)],
        recoveries=watched.all(RecoveryDecided),
        logs=(watched.log(0), watched.log(1)),
        clocked_steps=max((step.step for step in watched.all(StepCommitted) if step.step_clock), default=0),
        notes=[path.read_text().split() for path in sorted(folder.glob("rank-*.txt"))],
    )


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Results]:
    """The results to come of every program that was selected; AT_ONCE of them run at a time."""
    tests = (item for item in request.session.items if isinstance(item, pytest.Function))
    names = [str(item.callspec.params["name"]) for item in tests if item.module is request.module]
    folder = tmp_path_factory.mktemp("programs")
    short = tempfile.mkdtemp(prefix="t")
    forks = ForkedStarts()
    forks.preload(*IMPORTED)
    with pytest.MonkeyPatch.context() as patch, forks.used():
        patch.setenv("HOLDFAST_HOME", str(folder))
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("PYTHONPATH", str(UNMODIFIED))  # its sitecustomize.py
        patch.setenv("TMPDIR", short)
        patch.setattr(tempfile, "tempdir", None)
        pool = ThreadPoolExecutor(AT_ONCE)
        yield {name: pool.submit(killed_once, name, folder / name) for name in names}
        pool.shutdown(cancel_futures=True)
    forks.close()
    assert [name for name in os.listdir(short) if name.startswith("holdfast")] == []
    shutil.rmtree(short)


@pytest.mark.needs("mpirun")
@pytest.mark.parametrize("name", PROGRAMS)
def test_unmodified_program_is_killed_once_and_finishes(results: Results, name: str) -> None:
    result = results[name].result()
    assert result.ended.outcome is Outcome.SUCCEEDED, (result.ended.reason, *result.logs)
    assert result.attempts[:2] == [0, 1]
    killed, *aborted = result.recoveries
    assert killed.first_failed_rank == 1
    # On a busy machine torch's own threads may abort a process at its very end: "terminate called without an active
    # exception", without a Python frame.
    assert all(any("terminate called" in line for line in event.finding.evidence) for event in aborted)
    assert [int(first) > 0 for first, _ in result.notes] == [PROGRAMS[name].resumes] * 2
    assert result.notes[0][1] == result.notes[1][1]
    assert (result.clocked_steps > 0) == PROGRAMS[name].steps
