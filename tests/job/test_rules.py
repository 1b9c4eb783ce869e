"""What must hold between fields that are each right by themselves."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.findings import Severity
from holdfast.job.document import make_job
from holdfast.job.rules import check_job
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


def test_range_of_nodes_not_built_yet() -> None:
    assert codes(nodes="2..4") == [("not-yet", Severity.ERROR, "nodes")]


@pytest.mark.parametrize("name", ["RANK", "MASTER_ADDR", "HOLDFAST_RUN", "PET_NNODES", "TORCHELASTIC_RUN_ID"])
def test_reserved_name_refused_wherever_it_is_set(name: str) -> None:
    assert codes(env={name: "1"}) == [("reserved-name", Severity.ERROR, f"env.{name}")]
    assert codes(secrets={name: {"env": "A"}}) == [("reserved-name", Severity.ERROR, f"secrets.{name}")]
    assert codes(fabric={"env": {name: "1"}}) == [("reserved-name", Severity.ERROR, f"fabric.env.{name}")]


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
def test_launcher_for_every_rank_warned_of(command: str) -> None:
    assert codes(command=command) == [("launcher-per-rank", Severity.WARNING, "command")]
    assert codes(command=command, launch="per-node") == []


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
    recovery = {"step_deadline_s": 7200}
    assert codes(recovery=recovery) == [("window-too-short", Severity.WARNING, "recovery.step_deadline_s")]


def test_unprintable_words_of_the_job_are_escaped_in_findings() -> None:
    job = Job.model_validate({"command": ["train"], "fabric": "a\nb"})
    (finding,) = check_job(job, ("tcp",))
    assert finding.what == "there is no fabric `a\\nb`"
