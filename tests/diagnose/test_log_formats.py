"""The forms in which logs come: whatever stands before a line or around a file, the answer is the same."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from holdfast.diagnose.diagnosis import Diagnosis
from holdfast.diagnose.failure_classes import FailureClass
from holdfast.diagnose.log_input import LogInput
from holdfast.diagnose.pipeline import diagnose

ERROR = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.1 GiB"
XID = "NVRM: Xid (PCI:0000:1a:00): 79, pid=811, GPU has fallen off the bus."


def answered(folder: Path, data: str | bytes, name: str = "log") -> Diagnosis:
    (folder / name).write_bytes(data if isinstance(data, bytes) else data.encode())
    return diagnose(LogInput((folder,)))


@pytest.mark.parametrize(
    ("before", "rank", "node"),
    [
        ("", None, None),
        ("3: ", 3, None),
        ("[1,3]<stderr>:", 3, None),
        ("[rank3]: ", 3, None),
        ("[default3]:[rank3]: ", 3, None),
        ("[pod/worker-3/main] ", None, "worker-3"),
        ("[pod/worker-3/main] 2026-11-20T10:00:00.123456789Z [rank3]: ", 3, "worker-3"),
        ("2026-11-20T10:00:00.123456789Z stderr F [rank3]: ", 3, None),
        ("2026-11-20T10:00:00.123456789Z ", None, None),
        ("(RayWorker pid=811, ip=10.0.0.3) ", None, "10.0.0.3"),
        ("worker-3: [rank3]: ", 3, "worker-3"),
        ("Nov 20 10:00:00 n3 train[811]: ", None, "n3"),
    ],
    ids=["", "srun", "mpirun", "torch", "torchrun", "kubectl", "times", "cri", "docker", "ray", "pdsh", "journald"],
)
def test_prefix_of_any_launcher_hides_nothing(tmp_path: Path, before: str, rank: int | None, node: str | None) -> None:
    answer = answered(tmp_path, f"{before}step 3\n{before}{ERROR}\n")
    assert (answer.failure_class, answer.evidence[0].where) == (FailureClass.OOM_GPU, f"{tmp_path}/log:2")
    first = answer.first_failure
    assert (first.rank if first else None) == rank
    assert (first.node or first.host if first else None) == node


@pytest.mark.parametrize(
    "line",
    [
        f"[12345.678901] {XID}",
        f"[Thu Nov 20 10:00:00 2026] {XID}",
        f"Nov 20 10:00:00 n3 kernel: {XID}",
        f"2026-11-20T10:00:00+01:00 n3 kernel: {XID}",
        json.dumps({"_HOSTNAME": "n3", "MESSAGE": XID, "SYSLOG_IDENTIFIER": "kernel"}),
    ],
    ids=["dmesg", "dmesg -T", "journald", "journald iso", "journald json"],
)
def test_kernels_words_are_read_in_every_form(tmp_path: Path, line: str) -> None:
    answer = answered(tmp_path, f"usb 1-1: new device\n{line}\n", "dmesg.txt")
    assert (answer.failure_class, answer.confidence) == (FailureClass.GPU_XID, "certain")


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstandard.ZstdCompressor().compress], ids=["", "gz", "zst"])
def test_packed_logs_count_their_lines(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    answer = answered(tmp_path, pack(b"step 1\n" * 5000 + ERROR.encode() + b"\n"), "rank-3.log")
    assert (answer.failure_class, answer.evidence[0].where) == (FailureClass.OOM_GPU, f"{tmp_path}/rank-3.log:5001")
    assert answer.first_failure is not None
    assert answer.first_failure.rank == 3


STATUS = {
    "kind": "Pod",
    "apiVersion": "v1",
    "metadata": {"name": "train-worker-3"},
    "status": {
        "phase": "Failed",
        "containerStatuses": [
            {"name": "main", "state": {"terminated": {"reason": "OOMKilled", "exitCode": 137}}, "restartCount": 0}
        ],
    },
}
YAML = """apiVersion: v1
kind: Pod
metadata:
  name: train-worker-3
status:
  phase: Failed
  containerStatuses:
  - name: main
    restartCount: 0
    state:
      terminated:
        exitCode: 137
        reason: OOMKilled
"""
DESCRIBED = """Name:             train-worker-3
    State:          Terminated
      Reason:       OOMKilled
      Exit Code:    137
"""


@pytest.mark.parametrize(
    ("name", "data"),
    [("pod.json", json.dumps(STATUS)), ("pod.yaml", YAML), ("describe.txt", DESCRIBED)],
    ids=["json", "yaml", "text"],
)
def test_status_of_a_pod_is_read_in_every_form(tmp_path: Path, name: str, data: str) -> None:
    assert answered(tmp_path, data, name).failure_class is FailureClass.OOM_HOST


@pytest.mark.parametrize(
    ("line", "failure_class"),
    [
        ("slurmstepd: error: Detected 1 oom_kill event in StepId=81.0.", FailureClass.OOM_HOST),
        (
            "slurmstepd: error: *** STEP 81.0 ON n3 CANCELLED AT 2026-11-20T10:00:00 DUE TO TIME LIMIT ***",
            FailureClass.PREEMPTED,
        ),
        ("srun: error: Node failure on n3", FailureClass.NODE_LOST),
        ("sbatch: error: Batch job submission failed: Invalid account", FailureClass.NOT_STARTED),
        (
            "5m  Warning  FailedScheduling  pod/w-3  0/8 nodes are available: 8 Insufficient cpu.",
            FailureClass.NOT_STARTED,
        ),
        ("2m  Warning  NodeNotReady  pod/w-3  Node is not ready", FailureClass.NODE_LOST),
    ],
)
def test_schedulers_words_have_their_class(tmp_path: Path, line: str, failure_class: FailureClass) -> None:
    assert answered(tmp_path, f"{line}\n").failure_class is failure_class


def test_code_and_pages_about_errors_in_a_folder_are_no_logs(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("`NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus`\n")
    (tmp_path / "train.py").write_text('raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")\n')
    (tmp_path / "rank-1.log").write_text("KeyError: 'tokens'\n")
    answer = diagnose(LogInput((tmp_path,)))
    assert answer.failure_class is FailureClass.PROGRAM_ERROR
    assert answer.notes == ("not read: 2 files of code or documentation",)
    assert diagnose(LogInput((tmp_path / "README.md",))).failure_class is FailureClass.GPU_XID


def test_traceback_behind_a_progress_bar_of_one_endless_line_is_told_with_its_place(tmp_path: Path) -> None:
    bar = b"".join(b"\rTraining:  34%%|###4      | %d/35000 [29:59<57:10,  6.71it/s]" % step for step in range(20_000))
    rest = (
        b"\rTraceback (most recent call last):\n  File \"/home/ada/train.py\", line 42, in step\n    x\nKeyError: 'a'\n"
    )
    (tmp_path / "log").write_bytes(bar + rest)
    answer = diagnose(LogInput((tmp_path,)))
    assert "train.py:42 in step" in answer.what
    assert answer.evidence[0].where.endswith(":4")
