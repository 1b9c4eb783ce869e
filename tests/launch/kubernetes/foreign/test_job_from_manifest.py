"""Manifests become job files that are valid and start the same ranks."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from tests.launch.kubernetes.foreign.manifests import WORKLOADS, manifest
from tests.launch.kubernetes.foreign.test_lint_rules import CASES, LAUNCHER, ONE, Case

from holdfast.fabric.catalog import NAMES
from holdfast.findings import Severity
from holdfast.job.loader import validate_text
from holdfast.job.spec import Job, Launch
from holdfast.launch.kubernetes.foreign.job_from_manifest import job_from_manifest


def converted(kind: str, changes: dict[str, Any] | None = None) -> tuple[Job, str]:
    text = job_from_manifest(yaml.safe_dump(manifest(kind, changes)), "m.yaml")
    valid = validate_text(text, "job.yaml", (), NAMES)
    assert [finding for finding in valid.findings if finding.severity is Severity.ERROR] == []
    assert valid.job is not None
    return valid.job, text


@pytest.mark.parametrize("kind", WORKLOADS)
def test_job_has_the_nodes_and_gpus_of_the_manifest(kind: str) -> None:
    job, _ = converted(kind)
    assert (job.nodes.max, job.gpus_per_node, job.world_size) == (2, 8, 16)
    assert job.launch is (Launch.MPI if kind == "MPIJob" else Launch.PER_NODE)
    assert job.fabric.name == "infiniband"
    assert job.env == {"NCCL_NET": "IB"}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_manifest_with_a_mistake_gives_a_valid_job(case: Case) -> None:
    converted(case.kind, case.changes)


@pytest.mark.parametrize(
    ("command", "launch", "words"),
    [
        (
            ["torchrun", "--nnodes=2", "--rdzv_backend", "c10d", "x.py", "--nnodes", "1"],
            Launch.PER_NODE,
            "torchrun x.py --nnodes 1",
        ),
        (["bash", "-c", "exec torchrun --nnodes 2 \\\n  x.py"], Launch.PER_NODE, "torchrun x.py"),
        (["bash", "-c", "cd /a && torchrun x.py"], Launch.PER_NODE, "bash -c cd /a && torchrun x.py"),
        (["python", "train.py", "$(NCCL_NET)"], Launch.PER_RANK, "python train.py IB"),
        ([], Launch.PER_RANK, "python train.py"),
    ],
)
def test_launcher_is_recognised_in_words_and_scripts(command: list[str], launch: Launch, words: str) -> None:
    job, _ = converted("Job", {f"{ONE}.command": command})
    assert (job.launch, " ".join(job.command)) == (launch, words)


def test_program_without_a_launcher_keeps_one_process_in_each_pod() -> None:
    job, _ = converted("PyTorchJob", {f"{ONE}.command": ["python", "train.py"]})
    assert job.world_size == 2


def test_mpirun_loses_the_options_that_holdfast_sets() -> None:
    command = ["mpirun", "-np", "16", "--hostfile", "/etc/mpi/hostfile", "-x", "NCCL_NET", "python", "train.py"]
    job, _ = converted("MPIJob", {f"{LAUNCHER}.command": command})
    assert " ".join(job.command) == "mpirun -x NCCL_NET python train.py"


def test_secrets_are_named_and_never_copied() -> None:
    env = [
        {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "token"}}},
        {"name": "WANDB_API_KEY", "value": "s3cr3t"},
        {"name": "RANK", "value": "0"},
    ]
    job, text = converted("PyTorchJob", {f"{ONE}.env": env})
    assert set(job.secrets) == {"HF_TOKEN", "WANDB_API_KEY"}
    assert job.env == {}
    assert "s3cr3t" not in text
    assert "# Variables not carried over: RANK." in text


def test_number_of_nodes_that_is_a_placeholder_is_named() -> None:
    job, text = converted("Job", {"spec.parallelism": "$NODES"})
    assert job.nodes.max == 1
    assert "# The manifest does not have the number of nodes." in text
