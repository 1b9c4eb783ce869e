"""What must hold between fields that are each right by themselves."""

from __future__ import annotations

from typing import Any

import pytest
from tests.job.loading import make_job

from holdfast.findings import Severity
from holdfast.job.rules import MAX_ARGUMENT_BYTES, check_job
from holdfast.job.spec import Job

FABRICS = ("auto", "tcp", "infiniband")


def codes(**fields: Any) -> list[tuple[str, Severity, str]]:
    job = Job.model_validate({"command": ["python", "train.py"], **fields})
    return [(finding.code, finding.severity, finding.where) for finding in check_job(job, FABRICS)]


def test_ordinary_job_nothing_to_say() -> None:
    assert codes() == []
    assert codes(nodes=2, gpus_per_node=8, fabric="infiniband", env={"LR": "1"}, secrets={"T": {"env": "T"}}) == []


def test_unknown_fabric_nearest_name_offered() -> None:
    job = make_job({"command": ["a"], "fabric": "infini-band"})
    (finding,) = check_job(job, FABRICS)
    assert (finding.code, finding.remedy) == ("unknown-fabric", "Did you mean `infiniband`?")
    (finding,) = check_job(make_job({"command": ["a"], "fabric": "qqq"}), FABRICS)
    assert finding.remedy == "Use one of auto, infiniband, tcp."
    assert check_job(job, ()) == ()


def test_range_of_nodes_taken_and_what_a_kept_batch_makes_of_the_learning_rate_told() -> None:
    assert codes(nodes="2..4") == []
    assert codes(nodes="2..4", recovery={"global_batch": "scale", "learning_rate": "sqrt"}) == []
    kept = ("learning-rate-not-scaled", Severity.WARNING, "recovery.learning_rate")
    assert codes(nodes="2..4", recovery={"learning_rate": "sqrt"}) == [kept]
    assert codes(nodes=2, recovery={"replicas": 2, "global_batch": "scale", "learning_rate": "sqrt"}) == [kept]


@pytest.mark.parametrize("name", ["RANK", "MASTER_ADDR", "HOLDFAST_RUN", "PET_NNODES", "TORCHELASTIC_RUN_ID"])
def test_reserved_name_refused_wherever_it_is_set(name: str) -> None:
    assert codes(env={name: "1"}) == [("reserved-name", Severity.ERROR, f"env.{name}")]
    assert codes(secrets={name: {"env": "A"}}) == [("reserved-name", Severity.ERROR, f"secrets.{name}")]
    assert codes(fabric={"env": {name: "1"}}) == [("reserved-name", Severity.ERROR, f"fabric.env.{name}")]


def test_variable_or_argument_that_linux_would_not_start_a_program_with_refused() -> None:
    large = "x" * MAX_ARGUMENT_BYTES
    assert codes(env={"BIG": large[:-5]}) == []  # its name, "=" and the final zero byte count too
    assert codes(env={"BIG": large[:-4]}) == [("argument-list-too-long", Severity.ERROR, "env.BIG")]
    assert codes(command=["python", large]) == [("argument-list-too-long", Severity.ERROR, "command[1]")]


def test_name_set_twice_refused() -> None:
    assert codes(env={"A": "1"}, secrets={"A": {"env": "A"}}) == [("name-clash", Severity.ERROR, "secrets.A")]
    assert codes(env={"A": "1"}, fabric={"env": {"A": "1"}}) == [("name-clash", Severity.ERROR, "fabric.env.A")]


@pytest.mark.parametrize(
    ("name", "secret"), [("HF_TOKEN", True), ("WANDB_API_KEY", True), ("TOKENIZERS_PARALLELISM", False), ("KEY", False)]
)
def test_secret_among_env_warned_of(name: str, secret: bool) -> None:
    assert codes(env={name: "x"}) == ([("secret-in-env", Severity.WARNING, f"env.{name}")] if secret else [])


@pytest.mark.parametrize(
    "command",
    [
        "torchrun train.py",
        "/usr/bin/accelerate launch train.py",
        "python3 -m torch.distributed.run train.py",
        "srun python train.py",
    ],
)
def test_launcher_for_every_rank_refused_and_for_a_single_rank_warned_of(command: str) -> None:
    assert codes(command=command, nodes=2) == [("launcher-per-rank", Severity.ERROR, "command")]
    assert codes(command=command) == [("launcher-per-rank", Severity.WARNING, "command")]
    assert codes(command=command, launch="per-node") == []


@pytest.mark.parametrize(
    ("command", "launch"),
    [("accelerate launch a.py", "accelerate"), ("ds a.py", "deepspeed"), ("mpirun --bind-to none ./a", "mpi")],
)
def test_launcher_that_reads_no_node_variables_warned_of_without_its_own_kind(command: str, launch: str) -> None:
    assert codes(command=command, launch=launch, nodes=2) == []
    assert codes(command=command, launch="per-node") == []
    unaware = [("launcher-unaware-of-nodes", Severity.WARNING, "launch")]
    assert codes(command=command, launch="per-node", nodes=2) == unaware
    assert codes(command=command) == [("launcher-per-rank", Severity.WARNING, "command")]


@pytest.mark.parametrize("command", ["python a.py", "bash -c 'deepspeed a.py'", "accelerate test", "torchrun a.py"])
@pytest.mark.parametrize("launch", ["accelerate", "deepspeed", "mpi"])
def test_kind_of_one_launcher_with_another_command_refused(command: str, launch: str) -> None:
    assert ("launcher-mismatch", Severity.ERROR, "command") in codes(command=command, launch=launch)


@pytest.mark.parametrize(
    ("launch", "command", "allowed"),
    [
        ("accelerate", "accelerate launch --num_machines 2 --num-processes=16 a.py", True),
        ("accelerate", "accelerate launch --num_machines 3 a.py", False),
        ("accelerate", "accelerate launch --multi_gpu --main-process-port=1 a.py", False),
        ("accelerate", "accelerate launch a.py --machine_rank 0", True),
        ("accelerate", "accelerate launch --mixed_precision bf16 a.py --num_machines 3", True),
        ("accelerate", "accelerate launch -m train --num_machines 3", True),
        ("accelerate", "python -m accelerate.commands.launch --machine_rank 0 a.py", False),
        ("deepspeed", "deepspeed --num_gpus 8 a.py --deepspeed", True),
        ("deepspeed", "deepspeed --no_local_rank --include node0:1 a.py", False),
        ("deepspeed", "deepspeed -H hosts a.py", False),
        ("mpi", "mpirun -np 16 --bind-to none -x A -mca pml ob1 python a.py -n 3", True),
        ("mpi", "mpirun train -n 3 -H a", True),
        ("mpi", "mpirun -np 4 python a.py", False),
        ("mpi", "mpiexec --bind-to none --hostfile hosts python a.py", False),
        ("per-node", "torchrun --nproc-per-node gpu --nnodes=2 a.py", True),
        ("per-node", "torchrun --standalone a.py", False),
        ("per-node", "python -m torch.distributed.run --nnodes=4 a.py", False),
    ],
)
def test_option_of_a_launcher_that_says_other_than_the_job_refused(launch: str, command: str, allowed: bool) -> None:
    expected = [] if allowed else [("launcher-option", Severity.ERROR, "command")]
    assert codes(command=command, launch=launch, nodes=2, gpus_per_node=8) == expected


def test_accelerate_without_gpus_told_which_launcher_to_be() -> None:
    fields = {"launch": "accelerate", "ranks_per_node": 2}
    one = [("accelerate-one-process", Severity.WARNING, "ranks_per_node")]
    assert codes(command="accelerate launch a.py", **fields) == one
    assert codes(command="accelerate launch --use_fsdp a.py", **fields) == []
    assert codes(command="accelerate launch a.py", **(fields | {"gpus_per_node": 2})) == []


def test_python_module_that_is_no_launcher_accepted() -> None:
    assert codes(command="python -m train") == []
    assert codes(command="python -m") == []


@pytest.mark.parametrize("command", ["cd a && python b", "python a > log", "python $HOME/a", "LR=1 python a"])
def test_shell_syntax_without_a_shell_warned_of(command: str) -> None:
    assert codes(command=command) == [("shell-syntax", Severity.WARNING, "command")]
    assert codes(command=["bash", "-c", command]) == []


def test_ranks_that_share_gpus_warned_of() -> None:
    assert codes(gpus_per_node=1, ranks_per_node=2) == [("shared-gpus", Severity.WARNING, "ranks_per_node")]
    assert codes(gpus_per_node=2, ranks_per_node=2) == []


def test_window_shorter_than_the_hang_deadline_warned_of() -> None:
    recovery = {"step_timeout_s": 7200}
    assert codes(recovery=recovery) == [("restart-window-too-short", Severity.WARNING, "recovery.step_timeout_s")]


def test_unprintable_words_of_the_job_are_escaped_in_findings() -> None:
    job = Job.model_validate({"command": ["train"], "fabric": "a\nb"})
    (finding,) = check_job(job, ("tcp",))
    assert finding.what == "there is no fabric `a\\nb`"
