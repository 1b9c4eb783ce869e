"""Real runs whose ranks log what NCCL logs, and whose agents tell which fabric they got; no NCCL runs here."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path

import pytest
from bench.nccl_log_generator import Job, Version
from msgspec.structs import replace
from tests.agent.test_nccl_warnings import MEMLOCK, NO_LIBRARY, NO_NETWORK, SYSTEM_ERROR
from tests.runs.conftest import TORCH_FREE_TRAINER, Runs, WatchedRun

from holdfast import api
from holdfast.diagnose.failure_classes import FailureClass
from holdfast.errors import ExitCode
from holdfast.events import FabricObserved, FindingRaised, Outcome, RanksStarted, RecoveryDecided, StepCommitted

WITH_IB = Job(version=Version.of("2.27.7"), nodes=2, gpus=1, channels=2, nics=2)
ON_SOCKETS = replace(WITH_IB, network="Socket", gdr=False)
STEPS, STEP_S = 100_000, 0.05
VERDICT_S = 5.0


def started(runs: Runs, folder: Path, job: Job, *overrides: str, step_s: float = STEP_S) -> WatchedRun:
    """Ranks append the job's lines to the file that NCCL would, then train."""
    for rank in range(job.ranks):
        (folder / f"nccl-{rank}.log").write_bytes(b"".join(job.log(rank)))
    train = shlex.join((sys.executable, str(TORCH_FREE_TRAINER), str(STEPS), str(step_s)))
    log = f'cat {folder}/nccl-$RANK.log >> "$(echo "$NCCL_DEBUG_FILE" | sed s/%p/$$/)"'
    return runs.start("sh", "-c", f"{log}; exec {train}", overrides=("fabric=infiniband", *overrides))


def test_run_with_the_promised_fabric_says_so(runs: Runs, tmp_path: Path) -> None:
    watched = started(runs, tmp_path, WITH_IB, "fabric.on_fallback=stop")
    seen = {watched.wait_for(FabricObserved).node for _ in range(2)}
    assert seen == {0, 1}
    began = max(event.at for event in watched.all(RanksStarted))
    assert all(event.at - began < VERDICT_S for event in watched.all(FabricObserved))
    assert api.status(watched.folder).fabric == "infiniband, 2 NICs, GPUDirect, as promised"
    watched.first(StepCommitted)
    assert not watched.all(FindingRaised)


@pytest.mark.parametrize("on_fallback", ["stop", "warn"])
def test_run_on_sockets_ends_or_warns(runs: Runs, tmp_path: Path, on_fallback: str) -> None:
    step_s = 1.0 if on_fallback == "stop" else STEP_S
    watched = started(runs, tmp_path, ON_SOCKETS, f"fabric.on_fallback={on_fallback}", step_s=step_s)
    if on_fallback == "stop":
        end = watched.wait_for_end()
        assert (end.outcome, end.exit_code) == (Outcome.FAILED, ExitCode.CANNOT_RUN_HERE)
        assert "TCP sockets carry the traffic between nodes instead of infiniband" in end.reason
        assert len(watched.all(StepCommitted)) < VERDICT_S / step_s  # none on a quiet machine: it takes 0.5 s
    else:
        found = watched.wait_for(FindingRaised).finding
        assert (found.code, found.what.rpartition(": ")[2]) == ("tcp-fallback", "NCCL found no RDMA device")
        watched.wait_for(StepCommitted)
    assert api.status(watched.folder).fabric == "TCP instead of infiniband"


@pytest.mark.parametrize(
    ("lines", "failure_class"),
    [((MEMLOCK,), FailureClass.MEMLOCK), ((NO_LIBRARY, NO_NETWORK), FailureClass.TCP_FALLBACK)],
)
def test_failure_that_only_nccls_file_explains_is_diagnosed(
    runs: Runs, tmp_path: Path, lines: tuple[str, ...], failure_class: FailureClass
) -> None:
    (tmp_path / "nccl.log").write_text("".join(f"{line}\n" for line in lines))
    log = f'cat {tmp_path}/nccl.log > "$(echo "$NCCL_DEBUG_FILE" | sed s/%p/$$/)"'
    overrides = ("fabric=infiniband", "recovery.max_restarts=0", "nodes=1")
    watched = runs.start("sh", "-c", f"{log}; echo '{SYSTEM_ERROR}' >&2; exit 1", overrides=overrides)
    watched.wait_for_end()
    (decided,) = watched.all(RecoveryDecided)
    evidence = "; ".join(decided.finding.evidence)
    assert all(line in evidence for line in lines)
    answer = api.diagnose_run(watched.folder)
    assert answer.failure_class is failure_class, answer
    assert any("nodes/node0" in each.where and each.text in lines for each in answer.evidence)
    shutil.rmtree(watched.folder.nodes)  # as on a cluster, where nodes keep their files
    again = api.diagnose_run(watched.folder)
    assert again.failure_class is failure_class, again
