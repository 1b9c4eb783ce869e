"""Documents come to the lines in which logs tell the same, each at its place and about whom it is."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from holdfast.diagnose.log_chunk import LogChunk, LogSource
from holdfast.diagnose.structured.structured_files import kind_of, to_chunks


def told(name: str, data: bytes) -> list[LogChunk]:
    kind = kind_of(f"/pile/{name}", data[:4096])
    assert kind is not None
    return list(to_chunks(kind, LogSource(name=f"/pile/{name}"), data))


def texts(name: str, data: bytes) -> list[str]:
    return [block.data.decode().rstrip("\n") for block in told(name, data)]


POD: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "worker-3"},
    "status": {
        "phase": "Failed",
        "conditions": [{"type": "PodScheduled", "status": "True"}],
        "containerStatuses": [
            {
                "name": "main",
                "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 5m0s restarting"}},
                "lastState": {
                    "terminated": {"reason": "OOMKilled", "exitCode": 137, "finishedAt": "2026-11-20T10:00:00Z"}
                },
            }
        ],
    },
}
EVENT: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "Event",
    "type": "Warning",
    "reason": "FailedScheduling",
    "message": "0/8 nodes are available: 8 Insufficient nvidia.com/gpu.",
    "lastTimestamp": "2026-11-20T09:00:00Z",
    "involvedObject": {"kind": "Pod", "name": "worker-0"},
}
EVICTED: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "worker-1"},
    "status": {"reason": "Evicted", "message": "The node was low on resource: memory."},
}
NODE: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "Node",
    "metadata": {"name": "gpu-7"},
    "status": {"conditions": [{"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown", "message": "m"}]},
}
LINES = [
    "2026-11-20T10:00:00Z pod/worker-3  container main terminated: OOMKilled  exit code 137",
    "pod/worker-3  container main waits: CrashLoopBackOff  back-off 5m0s restarting",
    "2026-11-20T09:00:00Z Warning  FailedScheduling  pod/worker-0  "
    "0/8 nodes are available: 8 Insufficient nvidia.com/gpu.",
    "pod/worker-1  Evicted  The node was low on resource: memory.",
    "NodeNotReady  node/gpu-7  NodeStatusUnknown  m",
]


@pytest.mark.parametrize("write", [lambda value: json.dumps(value, indent=4), yaml.safe_dump])
def test_kubernetes_objects_are_told_as_lines(write: Any) -> None:
    items = {"apiVersion": "v1", "kind": "List", "items": [POD, EVENT, EVICTED, NODE]}
    assert texts("objects", write(items).encode()) == LINES


def test_line_names_its_place_and_its_pod() -> None:
    document = json.dumps({"apiVersion": "v1", "kind": "List", "items": [EVENT, POD]}, indent=2)
    found = told("pods.json", document.encode())
    assert [block.source.node for block in found] == ["worker-0", "worker-3", "worker-3"]
    lines = document.splitlines()
    assert "Insufficient" in lines[int(found[0].first_line) - 1]
    assert "OOMKilled" in lines[int(found[1].first_line) - 1]


def test_error_file_of_elastic_is_told_as_a_traceback_and_its_error() -> None:
    extra = {
        "py_callstack": "Traceback (most recent call last):\n  File ...\nValueError: bad\n",
        "timestamp": "1732180000",
    }
    nested = {"message": {"message": "ValueError: bad", "extraInfo": extra, "errorCode": -9}}
    assert texts("error.json", json.dumps(nested).encode()) == [
        "Traceback (most recent call last):",
        "[2024-11-21T09:06:40Z] ValueError: bad",
        "exitcode: -9",
    ]
    assert texts("error.json", b'{"message": "RuntimeError: plain"}') == ["RuntimeError: plain"]


def test_counters_of_a_cgroup_are_told_with_their_file() -> None:
    assert texts("memory.events", b"oom 1\noom_kill 2\n") == ["memory.events: oom 1", "memory.events: oom_kill 2"]


@pytest.mark.parametrize(
    "head", [b"", b"{", b"[0] NCCL INFO", b'{"a": 1}', b"kind of a log\n", b"Traceback (most recent call last):\n"]
)
def test_log_is_no_document(head: bytes) -> None:
    assert kind_of("rank-0.log", head) is None


BOMB = b"apiVersion: v1\nkind: Pod\na: &a {x: 1}\n" + b"\n".join(
    b"%c: &%c {<<: [%s]}" % (98 + n, 98 + n, b",".join([b"*%c" % (97 + n)] * 9)) for n in range(20)
)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("error.json", b'{"message": [], "py_callstack": "x"}'),
        ("error.json", b'{"message": {"py_callstack'),
        ("pods.json", b'{"apiVersion": "v1", "kind": "Pod", '),
        ("pods.json", b'{"apiVersion": "v1", "kind": "Pod", "a":' + b"[" * 200_000),
        ("pods.yaml", BOMB),
        ("pods.yaml", b"apiVersion: v1\nkind: Pod\na: [}\n"),
        ("pods.yaml", b"apiVersion: v1\nkind: Pod\na: " + b"[" * 20_000),
        ("deployment.yaml", b"apiVersion: v1\nkind: Deployment\n"),
    ],
)
def test_document_that_is_none_is_read_as_text(name: str, data: bytes) -> None:
    assert told(name, data) == [LogChunk(source=LogSource(name=f"/pile/{name}"), first_line=1, data=data)]


@pytest.mark.parametrize(
    "data",
    [
        json.dumps(
            {"apiVersion": "v1", "kind": "List", "items": [1, {"kind": []}, {"kind": "Pod", "status": 3}]}
        ).encode(),
        json.dumps(
            {"apiVersion": 1, "kind": "Pod", "status": {"containerStatuses": [{"state": {"waiting": 7}}]}}
        ).encode(),
    ],
)
def test_strange_document_says_nothing(data: bytes) -> None:
    assert texts("x", data) == []
