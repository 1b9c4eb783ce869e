"""Every launcher starts its own ranks on two nodes, for real: they reduce together, and start again when one dies."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.runs.conftest import TORCH_FREE_TRAINER, Runs, WatchedRun

from holdfast import api
from holdfast.cli import main
from holdfast.diagnose.failure_classes import FailureClass
from holdfast.diagnose.redact import Redactor, redact_diagnosis
from holdfast.events import AttemptStarted, FaultAction, FaultTarget, Outcome, RecoveryDecided, StepCommitted

WITHIN_S = 300.0
"""Launchers import torch and more, some of them twice, and the machine may have other work."""

EXAMPLES = Path(__file__).parents[2] / "examples"
LAUNCHER_ALLREDUCE = str(TORCH_FREE_TRAINER.with_name("launcher_allreduce.py"))

FAILS_ON_RANK_1 = {
    "exception": "if RANK == 1: raise ValueError('bad shard 7')",
    "exception, and a peer that reports a lost connection": (
        "import torch.distributed as dist\ndist.init_process_group('gloo')\ndist.barrier()\n"
        "if RANK == 1: raise ValueError('bad shard 7')\ndist.barrier()"
    ),
    "signal": "import signal\nif RANK == 1: os.kill(os.getpid(), signal.SIGSEGV)",
}


def beside_python(program: str) -> str:
    return str(Path(sys.executable).with_name(program))


def ranks(watched: WatchedRun) -> dict[int, dict[str, Any]]:
    """What every rank of the summing program has seen, by rank."""
    files = watched.folder.checkpoints.glob("rank-*.json")
    return {int(file.stem.removeprefix("rank-")): json.loads(file.read_text()) for file in files}


@pytest.mark.parametrize(
    ("launch", "command"),
    [
        ("per-rank", (sys.executable, LAUNCHER_ALLREDUCE, "jax")),
        ("per-rank", (sys.executable, LAUNCHER_ALLREDUCE, "megatron", "--tensor-model-parallel-size", "2")),
        ("accelerate", (beside_python("accelerate"), "launch", "--multi_gpu", LAUNCHER_ALLREDUCE, "accelerate")),
        ("deepspeed", (beside_python("deepspeed"), LAUNCHER_ALLREDUCE, "torch")),
    ],
    ids=["jax", "megatron", "accelerate", "deepspeed"],
)
def test_ranks_of_two_nodes_reduce_together(runs: Runs, launch: str, command: tuple[str, ...]) -> None:
    overrides = (
        f"launch={launch}",
        "ranks_per_node=2",
        "fabric=tcp",
        "env={HELLO: there, CUDA_DEVICE_MAX_CONNECTIONS: 1}",
    )
    watched = runs.start(*command, overrides=overrides)
    assert watched.wait_for_end(WITHIN_S).outcome is Outcome.SUCCEEDED, (watched.log(0), watched.log(2))
    said = ranks(watched)
    assert {rank: one["sum"] for rank, one in said.items()} == dict.fromkeys(range(4), 6.0)
    for one in said.values():
        assert (one["environ"]["HELLO"], one["environ"]["NCCL_NET"]) == ("there", "Socket")


def test_unmodified_torchrun_starts_its_own_ranks(runs: Runs) -> None:
    overrides = ("launch=per-node", "ranks_per_node=2")
    watched = runs.start(beside_python("torchrun"), str(EXAMPLES / "plain" / "train.py"), overrides=overrides)
    assert watched.wait_for_end().outcome is Outcome.SUCCEEDED, watched.log(0)
    assert "4" in watched.log(0)


@pytest.mark.parametrize("name", FAILS_ON_RANK_1)
def test_failure_under_torchrun_is_diagnosed_in_the_run_as_in_its_logs(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    script = tmp_path / "fails_on_one.py"
    script.write_text(f"import os\nRANK = int(os.environ['RANK'])\n{FAILS_ON_RANK_1[name]}\n")
    overrides = ("launch=per-node", "ranks_per_node=2", "nodes=1")
    watched = runs.start(beside_python("torchrun"), str(script), overrides=overrides)
    assert watched.wait_for_end(WITHIN_S).outcome is Outcome.FAILED
    for named in ([], [str(watched.folder.logs)]):
        capsys.readouterr()
        assert main(["diagnose", *named, "-o", "json"]) == 0
        found = json.loads(capsys.readouterr().out)
        undecided = [each for missing in found["next_evidence"] for each in missing["distinguishes"]]
        assert "program-error" in (found["failure_class"], *undecided[:1])
        assert name == "signal" or found["evidence"][0]["text"].endswith("ValueError: bad shard 7")


def test_accelerate_that_starts_one_process_a_node_has_its_rank(runs: Runs) -> None:
    """On CPUs it starts the program as it is, and leaves it to others to say which rank that is."""
    command = (beside_python("accelerate"), "launch", LAUNCHER_ALLREDUCE, "accelerate")
    watched = runs.start(*command, overrides=("launch=accelerate",))
    assert watched.wait_for_end(WITHIN_S).outcome is Outcome.SUCCEEDED, watched.log(0)
    assert {rank: one["sum"] for rank, one in ranks(watched).items()} == {0: 1.0, 1: 1.0}


def test_rank_killed_under_its_launcher_run_continues(runs: Runs) -> None:
    overrides = ("launch=per-node", "ranks_per_node=2")
    watched = runs.start(beside_python("torchrun"), str(TORCH_FREE_TRAINER), "40", "0.02", overrides=overrides)
    watched.drill(FaultTarget.RANK, 3, FaultAction.KILL, at_step=7)
    assert watched.wait_for_end(WITHIN_S).outcome is Outcome.SUCCEEDED, (watched.log(0), watched.log(2))
    assert [event.attempt for event in watched.all(AttemptStarted)] == [0, 1]
    (decided,) = watched.all(RecoveryDecided)
    # Ten times a second each torchrun looks at its ranks: the other node's may be the first to see one that left after.
    (said,) = [line for line in decided.finding.evidence if line.startswith("its launcher says that rank")]
    assert said == f"its launcher says that rank {decided.first_failed_rank} ended first"
    assert decided.finding.what.startswith(
        f"rank {decided.first_failed_rank} on node{(decided.first_failed_rank or 0) // 2} "
    )
    assert decided.log_owner_rank == (decided.first_failed_rank or 0) // 2 * 2
    assert watched.all(StepCommitted)[-1].step == 40


def test_rank_that_writes_into_its_launchers_file_is_named_as_it_names_itself(runs: Runs) -> None:
    lines = ("Traceback (most recent call last):", '  File "train.py", line 42, in step', "    x", "KeyError: 1")
    script = f"""
import os, sys, time
if os.environ["NODE_RANK"] == "1":
    sys.exit({"".join(f"[rank3]: {line}" + chr(10) for line in lines)!r})
time.sleep(60)
"""
    watched = runs.start(sys.executable, "-c", script, overrides=("launch=per-node", "ranks_per_node=2"))
    assert watched.wait_for_end(WITHIN_S).outcome is Outcome.FAILED
    answer = api.diagnose_run(watched.folder)
    assert (answer.failure_class, answer.what) == (
        FailureClass.PROGRAM_ERROR,
        "the program raised KeyError: 1, at train.py:42 in step",
    )
    assert answer.first_failure is not None
    assert (answer.first_failure.rank, answer.first_failure.node) == (3, "node1")
    assert not answer.last_lines


def test_last_lines_are_told_where_nothing_better_is_known(runs: Runs) -> None:
    script = """
import os, sys, time
if os.environ["NODE_RANK"] == "1":
    for number in range(30): print("line", number, "token=abcdefgh1234")
    sys.exit(3)
time.sleep(60)
"""
    watched = runs.start(sys.executable, "-c", script, overrides=("launch=per-node", "ranks_per_node=2"))
    assert watched.wait_for_end(WITHIN_S).outcome is Outcome.FAILED
    redactor = Redactor()
    answer = redact_diagnosis(api.diagnose_run(watched.folder, hide=redactor.secrets), redactor)
    assert [each.text for each in answer.last_lines] == [f"line {number} token=<secret-1>" for number in range(20, 30)]
    assert "holdfast logs --rank 2" in answer.remedy[0]
