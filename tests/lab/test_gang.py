"""Gangs on the lab: real collectives by headless names, a rank that is killed, a node that is lost and comes back."""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import pytest
from tests.waiting import until

from holdfast.host import processes
from lab import Lab, NodeState
from lab.kubelet.container import MARK

pytestmark = pytest.mark.slow

DEADLINE_S = 180

ALL_REDUCE = """
import os, torch, torch.distributed as dist
master = f"tcp://{os.environ['MASTER']}:29500"
dist.init_process_group("gloo", init_method=master, rank=int(os.environ["RANK"]), world_size=2)
one = torch.ones(1) * (dist.get_rank() + 1)
dist.all_reduce(one)
print("sum", one.item(), flush=True)
dist.destroy_process_group()
"""


def jobset(namespace: str, command: list[str], **job: Any) -> str:
    """A JobSet `gang` of two pods, each told its rank and the first one's name."""
    env = [
        {"name": "OMP_NUM_THREADS", "value": "1"},
        {"name": "MASTER", "value": "gang-node-0-0.gang"},
        {
            "name": "RANK",
            "valueFrom": {
                "fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}
            },
        },
    ]
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 1,
        "containers": [{"name": "rank", "image": "any", "command": command, "env": env}],
    }
    spec = {"parallelism": 2, "completions": 2, "backoffLimit": 0, "template": {"spec": pod}} | job
    return json.dumps(
        {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": {"name": "gang", "namespace": namespace},
            "spec": {
                "failurePolicy": {"maxRestarts": 3},
                "replicatedJobs": [{"name": "node", "template": {"spec": spec}}],
            },
        }
    )


def running(lab: Lab, namespace: str, besides: frozenset[str] = frozenset()) -> dict[str, dict[str, Any]]:
    """The running pods of the gang by uid, without those."""
    pods = json.loads(lab.kubectl("-n", namespace, "get", "pods", "-o", "json"))["items"]
    return {
        pod["metadata"]["uid"]: pod
        for pod in pods
        if pod["status"]["phase"] == "Running"
        and "deletionTimestamp" not in pod["metadata"]
        and pod["metadata"]["uid"] not in besides
    }


def both(lab: Lab, namespace: str, besides: frozenset[str] = frozenset()) -> dict[str, dict[str, Any]]:
    found = until(lambda: len(pods := running(lab, namespace, besides)) == 2 and pods, "two pods run")
    assert isinstance(found, dict)
    return found


def test_gang_reduces_by_its_headless_names(lab: Lab, namespace: str) -> None:
    lab.kubectl("create", "-f", "-", input=jobset(namespace, [sys.executable, "-c", ALL_REDUCE]))
    lab.kubectl("-n", namespace, "wait", "jobset/gang", "--for=condition=Completed", f"--timeout={DEADLINE_S}s")
    said = lab.kubectl("-n", namespace, "logs", "-l", "jobset.sigs.k8s.io/jobset-name=gang")
    assert said.count("sum 3.0") == 2


def test_rank_that_is_killed_has_the_set_start_again(lab: Lab, namespace: str) -> None:
    lab.kubectl("create", "-f", "-", input=jobset(namespace, ["sleep", "1000"]))
    first = both(lab, namespace)
    (victim,) = processes.by_env(processes.all_pids(), **{MARK: f"{next(iter(first))}/rank"})
    os.kill(victim, signal.SIGKILL)
    both(lab, namespace, frozenset(first))
    status = json.loads(lab.kubectl("-n", namespace, "get", "jobset", "gang", "-o", "json"))["status"]
    assert status["restarts"] == 1


def test_node_that_is_lost_frees_its_pods_once_it_is_said_to_be_out_of_service(lab: Lab, namespace: str) -> None:
    lab.kubectl("create", "-f", "-", input=jobset(namespace, ["sleep", "1000"]))
    first = both(lab, namespace)
    node = next(iter(first.values()))["spec"]["nodeName"]
    taint = "node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"
    lab.set_state(node, NodeState.OFF)
    try:
        lost = [uid for uid, pod in first.items() if pod["spec"]["nodeName"] == node]
        marks = [{MARK: f"{uid}/rank"} for uid in lost]
        until(lambda: not any(processes.by_env(processes.all_pids(), **mark) for mark in marks), "its processes end")
        lab.kubectl("wait", f"node/{node}", "--for=condition=Ready=Unknown", f"--timeout={DEADLINE_S}s")
        lab.kubectl("taint", "node", node, taint)
        second = both(lab, namespace, frozenset(first))
        assert all(pod["spec"]["nodeName"] != node for pod in second.values())
    finally:
        lab.kubectl("taint", "node", node, f"{taint}-")
        lab.set_state(node, NodeState.ON)
    lab.kubectl("wait", f"node/{node}", "--for=condition=Ready", f"--timeout={DEADLINE_S}s")


def test_nothing_survives_a_kubelet_that_is_killed(lab: Lab, namespace: str) -> None:
    lab.kubectl("create", "-f", "-", input=jobset(namespace, ["sleep", "1000"]))
    pods = both(lab, namespace)
    lab.kill("kubelet")
    marks = [{MARK: f"{uid}/rank"} for uid in pods]
    until(lambda: not any(processes.by_env(processes.all_pids(), **mark) for mark in marks), "their processes end")
    lab.start("kubelet")
    both(lab, namespace, frozenset(pods))
