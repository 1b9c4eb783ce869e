"""Open MPI over two nodes with no ssh: every rank has what the job gives, and all ends, and starts again, together."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest
from tests.runs.conftest import TORCH_FREE_TRAINER, Runs, WatchedRun
from tests.runs.test_launchers import LAUNCHER_ALLREDUCE, WITHIN_S, ranks

from holdfast import api
from holdfast.events import AttemptStarted, FaultAction, FaultTarget, Outcome, RecoveryDecided, StepCommitted
from holdfast.fabric.catalog import CATALOG
from holdfast.host.processes import all_pids, by_env, send_signal

pytestmark = pytest.mark.needs("mpirun", "orted")

TWO_BY_TWO = ("launch=mpi", "ranks_per_node=2")

LEAVES_WELL = """
import os, signal, sys, time
from pathlib import Path
rank = os.environ["OMPI_COMM_WORLD_RANK"]
folder = Path(os.environ["HOLDFAST_CHECKPOINT_PATH"])
folder.mkdir(parents=True, exist_ok=True)
def leave(number, frame):
    time.sleep(2)  # longer than Open MPI itself would wait
    (folder / f"left-{rank}").touch()
    sys.exit()
signal.signal(signal.SIGTERM, leave)
(folder / f"here-{rank}").touch()
while True:
    time.sleep(60)
"""


def test_every_rank_of_two_nodes_has_the_environment_and_they_reduce_together(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_SECRET", "hush")
    fabric = "fabric={name: efa, env: {NCCL_DEBUG: WARN}}"
    overrides = (*TWO_BY_TWO, fabric, "env={HELLO: there}", "secrets={QUIET: {env: MY_SECRET}}")
    watched = runs.start("mpirun", sys.executable, LAUNCHER_ALLREDUCE, "mpi", overrides=overrides)
    assert watched.wait_for_end(WITHIN_S).outcome is Outcome.SUCCEEDED, (watched.log(0), watched.log(2))
    said = ranks(watched)
    assert {rank: one["sum"] for rank, one in said.items()} == dict.fromkeys(range(4), 6.0)
    for rank, one in said.items():
        expected = {
            **CATALOG["efa"].env,
            "NCCL_DEBUG": "WARN",
            "OMPI_COMM_WORLD_RANK": str(rank),
            "WORLD_SIZE": "4",
            "GROUP_RANK": str(rank // 2),
            "MASTER_ADDR": "127.0.0.1",
            "HELLO": "there",
            "QUIET": "hush",
        }
        assert {name: one["environ"].get(name) for name in expected} == expected


@pytest.mark.parametrize("target", ["local", "apart"])
def test_rank_killed_under_mpirun_run_continues(isolated_runs: Runs, target: str) -> None:
    command = ("mpirun", sys.executable, str(TORCH_FREE_TRAINER), "40", "0.02")
    watched = isolated_runs.start(*command, target=target, overrides=TWO_BY_TWO)
    watched.drill(FaultTarget.RANK, 3, FaultAction.KILL, at_step=7)
    assert watched.wait_for_end(WITHIN_S).outcome is Outcome.SUCCEEDED, (watched.log(0), watched.log(2))
    assert [event.attempt for event in watched.all(AttemptStarted)] == [0, 1]
    (decided,) = watched.all(RecoveryDecided)
    assert "its launcher says that rank 3 ended first" in decided.finding.evidence
    assert (decided.finding.what, decided.first_failed_rank) == ("rank 3 on node1 was ended by SIGKILL", 3)
    assert decided.log_owner_rank == 0
    assert watched.all(StepCommitted)[-1].step == 40
    assert [name for name in os.listdir(tempfile.gettempdir()) if name.startswith("ompi")] == []


def test_daemon_of_open_mpi_killed_run_continues(runs: Runs) -> None:
    watched = runs.start("mpirun", sys.executable, str(TORCH_FREE_TRAINER), "40", "0.05", overrides=TWO_BY_TWO)
    watched.wait_for(StepCommitted, lambda event: event.step == 7)
    (daemon,) = [pid for pid in by_env(all_pids(), HOLDFAST_RUN=watched.folder.run_id) if named(pid) == "orted"]
    send_signal(daemon, signal.SIGKILL)
    assert watched.wait_for_end(WITHIN_S).outcome is Outcome.SUCCEEDED, (watched.log(0), watched.log(2))
    (decided,) = watched.all(RecoveryDecided)
    assert decided.finding.what == "rank 2 on node1 was ended by SIGKILL"


def test_ranks_of_a_cancelled_run_have_their_grace(runs: Runs) -> None:
    watched = runs.start(
        "mpirun", sys.executable, "-c", LEAVES_WELL, overrides=(*TWO_BY_TWO, "recovery.stop_grace_s=60")
    )
    watched.wait_for(AttemptStarted)
    deadline = time.monotonic() + WITHIN_S
    while notes(watched) != {"here-0", "here-1", "here-2", "here-3"}:
        assert time.monotonic() < deadline, watched.log(0)
        time.sleep(0.05)
    api.cancel(watched.folder)
    assert watched.wait_for_end(WITHIN_S).outcome is Outcome.CANCELLED
    assert {"left-0", "left-1", "left-2", "left-3"} <= notes(watched)


def notes(watched: WatchedRun) -> set[str]:
    return {path.name for path in watched.folder.checkpoints.glob("*-*")}


def named(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""
