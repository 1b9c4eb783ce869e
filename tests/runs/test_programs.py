"""Programs that know nothing of holdfast, of every framework: started on two nodes, killed once, finished."""

from __future__ import annotations

import shutil
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.runs.conftest import Runs

from holdfast.events import AttemptStarted, Outcome, RecoveryDecided

UNMODIFIED = Path(__file__).parents[1] / "programs" / "unmodified"
WITHIN_S = 300.0
"""Launchers import torch and more, some of them twice, and the machine may have other work."""


def beside_python(program: str) -> str:
    return str(Path(sys.executable).with_name(program))


@dataclass(frozen=True, kw_only=True)
class Program:
    """One program of the suite, and what becomes of it; docs/launchers.md has the same table."""

    command: tuple[str, ...]
    resumes: bool = True
    """Whether it loads a checkpoint of its own; else it begins again."""
    launch: str = "per-rank"


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
    "jax": Program(command=("python", "jax_env.py")),
    "jax-own-coordinator": Program(command=("python", "jax_own.py", "PORT")),
    "mpi4py": Program(command=("mpirun", "python", "-m", "mpi4py", "mpi_average.py"), launch="mpi"),
}


@pytest.mark.needs("mpirun")
@pytest.mark.parametrize("name", PROGRAMS)
def test_unmodified_program_is_killed_once_and_finishes(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    program = PROGRAMS[name]
    runs.base = Path(shutil.copytree(UNMODIFIED, tmp_path / "program"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    command = tuple({"python": sys.executable, "PORT": port}.get(word, word) for word in program.command)
    watched = runs.start(*command, overrides=(f"launch={program.launch}", "fabric=tcp"))
    ended = watched.end(WITHIN_S)
    assert ended.outcome is Outcome.SUCCEEDED, (ended.reason, watched.log(0), watched.log(1))
    assert [event.attempt for event in watched.all(AttemptStarted)][:2] == [0, 1]
    killed, *aborted = watched.all(RecoveryDecided)
    assert killed.first_rank == 1
    # On a busy machine torch's own threads may abort a process at its very end: "terminate called without an active
    # exception", without a Python frame.
    assert all("Fatal Python error: Aborted" in event.finding.evidence for event in aborted)
    notes = [(runs.base / f"rank-{rank}.txt").read_text().split() for rank in (0, 1)]
    assert [int(first) > 0 for first, _ in notes] == [program.resumes] * 2
    assert notes[0][1] == notes[1][1]
