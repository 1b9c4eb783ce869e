"""`holdfast validate` and `holdfast init --from` with manifests that others wrote."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from holdfast.errors import ExitCode

if TYPE_CHECKING:
    from tests.cli.conftest import Cli
    from tests.golden import Golden

MANIFEST = """\
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata:
  name: llama
  labels: {kueue.x-k8s.io/queue-name: train}
spec:
  runPolicy: {backoffLimit: 10}
  pytorchReplicaSpecs:
    Worker:
      replicas: 4
      template:
        metadata:
          annotations: {kueue.x-k8s.io/podset-required-topology: example.com/block}
        spec:
          containers:
          - name: pytorch
            image: example.com/llama:1.4
            command: [torchrun, --nnodes=4, --nproc_per_node=8, train.py, --lr=1e-4]
            env:
            - {name: NCCL_SOCKET_IFNAME, value: ens5}
            - {name: NCCL_NET, value: IB}
            - {name: OMP_NUM_THREADS, value: 8}
            - name: HF_TOKEN
              valueFrom: {secretKeyRef: {name: hf, key: token}}
            resources:
              limits: {nvidia.com/gpu: 8, rdma/ib: 1, cpu: 90, memory: 900Gi}
            volumeMounts:
            - {name: data, mountPath: /data}
          volumes:
          - name: data
            persistentVolumeClaim: {claimName: train}
"""


@pytest.fixture
def manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("llama.yaml").write_text(MANIFEST)
    return Path("llama.yaml")


def test_validate_lists_mistakes_with_patches(cli: Cli, manifest: Path, golden: Golden) -> None:
    golden(cli.transcript(["validate", str(manifest)]))


def test_validate_gives_patches_as_json(cli: Cli, manifest: Path) -> None:
    answer = cli("validate", str(manifest), "-o", "json")
    assert answer.code == ExitCode.INVALID_JOB
    (file,) = answer.data
    assert not file["valid"]
    assert all(finding["patch"] for finding in file["findings"])
    (patch,) = file["patches"]
    assert patch["object"] == "PyTorchJob llama"
    assert {operation["op"] for operation in patch["patch"]} == {"add", "replace"}


def test_validate_refuses_to_set_fields_of_a_manifest(cli: Cli, manifest: Path) -> None:
    answer = cli("validate", str(manifest), "--set", "nodes=2")
    assert answer.code == ExitCode.USAGE
    assert "[not-a-job-file]" in answer.out


def test_validate_still_reads_job_files(cli: Cli, manifest: Path) -> None:
    Path("job.yaml").write_text("command: [python, -c, pass]\n")
    answer = cli("validate", "job.yaml", str(manifest), "-o", "json")
    assert answer.code == ExitCode.INVALID_JOB
    assert [file["valid"] for file in answer.data] == [True, False]


TARGET = """\
kind: kubernetes
volume: {claim: train, folders: [datasets]}
fabric: infiniband
fabric_device: {resource: rdma/ib, per_node: 1}
"""


def test_init_converts_a_manifest_to_a_job_that_its_cluster_can_run(
    cli: Cli, manifest: Path, golden: Golden, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "any")
    made = cli("init", "job.yaml", "--from", str(manifest))
    assert made.code == ExitCode.OK
    golden(Path("job.yaml").read_text())
    Path("train.py").touch()
    Path(".holdfast/targets").mkdir(parents=True)
    Path(".holdfast/targets/cluster.yaml").write_text(TARGET)
    (answer,) = cli("validate", "--on", "cluster", "job.yaml", "-o", "json").data
    assert [finding for finding in answer["findings"] if finding.get("severity", "error") == "error"] == []
    assert answer["valid"]


def test_init_from_a_file_without_a_training_job_names_what_it_has(cli: Cli, manifest: Path) -> None:
    manifest.write_text("apiVersion: v1\nkind: Service\nmetadata: {name: a}\n")
    answer = cli("init", "job.yaml", "--from", str(manifest))
    assert answer.code == ExitCode.INVALID_JOB
    assert "[manifest-not-checked]" in answer.out + answer.err
    assert not Path("job.yaml").exists()
