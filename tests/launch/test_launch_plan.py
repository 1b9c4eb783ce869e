"""Each launcher's node rank and options, without starting one; tests/runs has the programs themselves."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from tests.launch.test_rank_env import launched

from holdfast import api


def only(**job: Any) -> Any:
    (launch,) = launched(ranks_per_node=2, **job)
    assert (launch.rank, launch.rank_count) == (2, 2)
    assert launch.env["WORLD_SIZE"] == "4"
    return launch


def test_torchrun_command_as_it_was_typed_with_variables() -> None:
    launch = only(launch="per-node", command="torchrun train.py")
    assert launch.argv == ("torchrun", "train.py")
    assert {name: value for name, value in launch.env.items() if name.startswith("PET_")} == {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "2",
        "PET_NODE_RANK": "1",
        "PET_MASTER_ADDR": "a",
        "PET_MASTER_PORT": "1",
    }


def test_accelerate_options_before_the_users_own() -> None:
    launch = only(launch="accelerate", command="python -m accelerate.commands.launch --multi_gpu train.py --lr 1")
    nodes = ("--num_machines", "2", "--num_processes", "4", "--machine_rank", "1")
    head = ("--main_process_ip", "a", "--main_process_port", "1")
    assert launch.argv[:3] == ("python", "-m", "accelerate.commands.launch")
    assert launch.argv[3:] == (*nodes, *head, "--multi_gpu", "train.py", "--lr", "1")


def test_deepspeed_options_and_the_file_they_name() -> None:
    launch = only(launch="deepspeed", command="/bin/deepspeed train.py")
    ((path, text),) = launch.files.items()
    assert text == "node0 slots=2\nnode1 slots=2\n"
    placed = f"--no_ssh --hostfile {path} --node_rank 1 --master_addr a --master_port 1".split()
    assert launch.argv == ("/bin/deepspeed", *placed, "train.py")


def test_process_that_is_its_nodes_only_rank_knows_its_rank() -> None:
    (launch,) = launched(launch="accelerate", command="accelerate launch train.py")
    assert (launch.env["RANK"], launch.env["LOCAL_RANK"]) == ("1", "0")
    (launch,) = launched(launch="per-node", command="torchrun train.py", ranks_per_node=2)
    assert "RANK" not in launch.env


def test_jax_ranks_each_take_gpus_of_their_own() -> None:
    def devices(**job: Any) -> list[str | None]:
        return [launch.env.get("JAX_LOCAL_DEVICE_IDS") for launch in launched(command="python train.py", **job)]

    assert devices(gpus_per_node=4, ranks_per_node=2) == ["0,1", "2,3"]
    assert devices(gpus_per_node=2, ranks_per_node=1) == ["0,1"]
    assert devices(ranks_per_node=2) == [None, None]


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize(
    ("launch", "command", "shown"),
    [
        (
            "accelerate",
            "accelerate launch a.py",
            "--main_process_ip HEAD_ADDRESS --main_process_port HEAD_PORT a.py",
        ),
        ("deepspeed", "deepspeed a.py", "hostfile-1 <<END\nnode0 slots=1\nnode1 slots=1\nEND\n"),
        ("mpi", "mpirun ./a", "HOLDFAST_MPI_KEY=ATTEMPT_KEY\nHOLDFAST_MPI_LISTEN=NODE1_ADDRESS:NODE1_PORT\n"),
    ],
)
def test_render_shows_what_a_launcher_is_told(tmp_path: Path, launch: str, command: str, shown: str) -> None:
    job = api.load_job(None, command=command.split(), nodes=2, overrides=(f"launch={launch}",))
    text = api.render(job, "local", base=tmp_path).text
    assert shown in text.split("# node1, rank 1\n")[1]
    assert os.fspath(tmp_path) in text
