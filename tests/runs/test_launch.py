"""What ranks are given, shown by programs that know nothing of holdfast: a plain script, torch."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tests.runs.conftest import TORCH_FREE_TRAINER, Runs

from holdfast import api
from holdfast.events import Outcome, StepCommitted

EXAMPLES = Path(__file__).parents[2] / "examples"

PRINT_ENVIRONMENT = "import json, os; print(json.dumps(dict(os.environ)))"


@pytest.mark.slow
def test_every_rank_gets_what_torchrun_gives_and_no_more_secrets_and_writes_its_own_file(runs: Runs) -> None:
    overrides = ("ranks_per_node=2", "env={HELLO: there}", "fabric=tcp")
    watched = runs.start(sys.executable, "-c", PRINT_ENVIRONMENT, overrides=overrides)
    assert watched.wait_for_end().outcome is Outcome.SUCCEEDED
    for rank in range(4):
        environ = json.loads(watched.log(rank))
        node, local_rank = divmod(rank, 2)
        expected = {
            "RANK": rank,
            "LOCAL_RANK": local_rank,
            "WORLD_SIZE": 4,
            "LOCAL_WORLD_SIZE": 2,
            "GROUP_RANK": node,
            "NODE_RANK": node,
            "MASTER_ADDR": "127.0.0.1",
            "TORCHELASTIC_RESTART_COUNT": 0,
            "TORCHELASTIC_RUN_ID": watched.folder.run_id,
            "HELLO": "there",
            "NCCL_NET": "Socket",
        }
        assert {name: environ.get(name) for name in expected} == {name: str(value) for name, value in expected.items()}
        assert int(environ["OMP_NUM_THREADS"]) >= 1
        assert int(environ["MASTER_PORT"]) > 0


@pytest.mark.slow
def test_users_own_threads_are_respected(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "97")
    monkeypatch.setenv("NCCL_NET", "IB")
    watched = runs.start(sys.executable, "-c", PRINT_ENVIRONMENT)
    watched.wait_for_end()
    given = json.loads(watched.log(0))
    assert (given["OMP_NUM_THREADS"], given["PYTHONUNBUFFERED"], given["NCCL_NET"]) == ("97", "1", "Socket")


@pytest.mark.slow
def test_render_shows_exactly_what_ranks_are_given(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONFAULTHANDLER", "0")
    command = (
        sys.executable,
        "-c",
        "import json, os, sys; print(json.dumps([sys.argv, dict(os.environ)]))",
        "a b",
        "$c",
    )
    awkward = ('env={MESSAGE: "it\'s $HOME; `x`"}', "watch.step_clock=false")
    job = api.load_job(None, command=command, nodes=2, name="test", overrides=awkward)
    text = api.render(job, "local", base=runs.base).text
    watched = runs.start(*command, overrides=awkward)
    watched.wait_for_end()
    argv, given = json.loads(watched.log(1))
    change, *variables, typed, _ = text.split("# node1, rank 1\n")[1].split("\n")
    assert shlex.split(change) == ["cd", str(runs.base)]
    assert shlex.split(typed) == ["$", *command]
    assert argv == ["-c", *command[3:]]
    shown = dict(word.split("=", 1) for line in variables for word in shlex.split(line))
    run_time = {
        "MASTER_ADDR": "HEAD_ADDRESS",
        "MASTER_PORT": "HEAD_PORT",
        "JAX_COORDINATOR_ADDRESS": "HEAD_ADDRESS:HEAD_PORT",
        "TORCHELASTIC_RUN_ID": "RUN_ID",
        "HOLDFAST_RUN": "RUN_ID",
        "HOLDFAST_NODE": "RUN_ID/node1.0",
        "HOLDFAST_RANK_SOCKET": "RANK_SOCKET",
        "HOLDFAST_TRANSFER_MEMORY": "TRANSFER_MEMORY",
        "TORCH_FR_DUMP_TEMP_FILE": "FLIGHT_DUMP",
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": "NCCL_PIPE",
        "HOLDFAST_CHECKPOINT_PATH": str(watched.folder.path.with_name("RUN_ID") / "checkpoints"),
    }
    assert {name: shown[name] for name in run_time} == run_time
    assert {name: value for name, value in given.items() if name not in run_time and name != "LC_CTYPE"} == {
        **os.environ,
        **{name: value for name, value in shown.items() if name not in run_time},
    }
    assert run_time.keys() <= given.keys()


@pytest.mark.slow
def test_ranks_of_a_per_node_command_share_its_channel(runs: Runs) -> None:
    one = f"RANK=$((NODE_RANK * 2 + l)) {sys.executable} {TORCH_FREE_TRAINER} 20 0.01 &"
    watched = runs.start(
        "sh", "-c", f"for l in 0 1; do {one} done; wait", overrides=("launch=per-node", "ranks_per_node=2")
    )
    assert watched.wait_for_end().outcome is Outcome.SUCCEEDED
    assert [event.step for event in watched.all(StepCommitted)] == list(range(1, 21))


@pytest.mark.slow
def test_unmodified_torch_script_runs_as_under_torchrun(runs: Runs) -> None:
    watched = runs.start(sys.executable, str(EXAMPLES / "plain" / "train.py"))
    assert watched.wait_for_end().outcome is Outcome.SUCCEEDED, watched.log(0)


def test_bare_import_and_help_load_neither_torch_nor_a_cluster_client() -> None:
    look = "import sys, holdfast, holdfast.api, holdfast.cli; print([m for m in ('torch', 'kr8s') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
