"""Starts and watches the replica program (tests/programs/replica_trainer.py) for benches.

It runs either in a whole run of holdfast, or alone with TorchFT's Lighthouse. Each attempt of a replica records its
commits in a file, from which the benches measure.
"""

from __future__ import annotations

import contextlib
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType

from holdfast import api
from holdfast.run_dir import RunDir

PROGRAM = Path(__file__).parents[1] / "tests" / "programs" / "replica_trainer.py"
STEP_S = 0.1
BEFORE = 20
"""Common steps before a kill."""
START_S, STALL_S = 240.0, 60.0
BEAT_S = 0.02


@dataclass(frozen=True, kw_only=True)
class RunningReplicas:
    """Replicas, and their output directory."""

    out: Path
    replicas: int

    def settle(self) -> None:
        """Wait until they have stepped together for a while."""
        wait_for(lambda: all(len(self.commits(each)) >= BEFORE for each in range(self.replicas)), START_S)

    def commits(self, replica: int, attempt: int = 0) -> list[float]:
        """Times of the commits of a replica's attempt."""
        note = self.out / f"{replica}.{attempt}.commits"
        lines = note.read_text().split("\n")[:-1] if note.exists() else []
        return [float(line.split()[1]) for line in lines]

    def gap_s(self, replica: int, since: float, watched_s: float = 2 * STEP_S) -> float:
        """The longest gap between two commits that ends after a moment, less the median before; waits for it."""
        wait_for(lambda: self.commits(replica)[-1] > since + watched_s, STALL_S)
        gaps = [(later - earlier, later) for earlier, later in pairwise(self.commits(replica))]
        usual = statistics.median(gap for gap, later in gaps if later <= since)
        return max(0.0, max(gap for gap, later in gaps if later > since) - usual)


@contextlib.contextmanager
def under_holdfast(out: Path, replicas: int, *, nccl_like: bool = False) -> Generator[tuple[RunningReplicas, RunDir]]:
    """A whole run, cancelled at the end; `nccl_like`: its replicas communicate by a group that fails like NCCL."""
    os.environ["HOLDFAST_HOME"] = str(out)
    command = (sys.executable, str(PROGRAM), f"{STEP_S}", str(out))
    overrides = (f"recovery.replicas={replicas}", *(("env.NCCL_LIKE=1",) if nccl_like else ()))
    job = api.load_job(None, command=command, nodes=replicas, name="hold", overrides=overrides)
    run = api.start(job, "local", base=out)
    try:
        yield RunningReplicas(out=out, replicas=replicas), run
    finally:
        api.cancel(run, force=True)
        for _ in api.follow(run):
            pass


@contextlib.contextmanager
def under_torchft(
    out: Path, replicas: int, lighthouse: str, env: Mapping[str, str] = MappingProxyType({})
) -> Generator[tuple[RunningReplicas, Callable[[int, int], subprocess.Popen[bytes]]]]:
    """The program as TorchFT's own launcher starts it, and a function that starts another attempt of a replica."""
    with contextlib.ExitStack() as stack:

        def start(replica: int, attempt: int) -> subprocess.Popen[bytes]:
            told = {**os.environ, **_told(replica, attempt, replicas, lighthouse), **env}
            command = (sys.executable, str(PROGRAM), f"{STEP_S}", str(out))
            log = stack.enter_context((out / f"{replica}.{attempt}.log").open("wb"))
            process = subprocess.Popen(command, env=told, stdout=log, stderr=log)
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        yield RunningReplicas(out=out, replicas=replicas), start


def free_port() -> int:
    """A free port."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return held.getsockname()[1]


def wait_for(ready: Callable[[], bool], within_s: float) -> None:
    """Wait for a condition; raise TimeoutError."""
    deadline = time.monotonic() + within_s
    while not ready():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {within_s:g} s")
        time.sleep(BEAT_S)


def _told(replica: int, attempt: int, replicas: int, lighthouse: str) -> dict[str, str]:
    return {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
        "HOLDFAST_ATTEMPT": str(attempt),
        "HOLDFAST_REPLICA": str(replica),
        "HOLDFAST_REPLICA_COUNT": str(replicas),
        "HOLDFAST_BATCH_WORLD_SIZE": str(replicas),
        "TORCHFT_LIGHTHOUSE": lighthouse,
    }
