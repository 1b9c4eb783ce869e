"""Runs that MultiKueue sends from one real cluster to another, from clients that hold nothing but a kubeconfig."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.launch.kubernetes.test_cluster_runs import (
    TORCH_FREE_TRAINER,
    objects_left,
    reach,
    steps_on,
    to_its_end,
)
from tests.waiting import until

from holdfast import api
from holdfast.events import ControllerStarted, FaultAction, FaultTarget, Outcome
from holdfast.findings import Severity
from holdfast.launch.target_runs import TargetRunPhase
from holdfast.report.rank_logs import find_rank_logs
from holdfast.report.run_status import RunPhase
from holdfast.run_dir import RunDir
from lab import Lab
from lab.lab import nodes

pytestmark = pytest.mark.slow

TARGET = """
kind: kubernetes
context: head
namespace: {namespace}
queue: train
multikueue: {{west: west}}
user: {user}
"""
VOLUME = "volume: {claim: home}\n"


def document(version: str, kind: str, name: str, namespace: str | None = None, **fields: Any) -> dict[str, Any]:
    metadata = {"name": name} | ({"namespace": namespace} if namespace else {})
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **fields}


class Clusters:
    """A manager cluster `head` and a worker cluster `west`, with a queue `train` in a namespace of both."""

    def __init__(self, head: Lab, west: Lab, namespace: str) -> None:
        self.labs = {"head": head, "west": west}
        self.namespace = namespace

    def kubectl(self, cluster: str, *words: str, input: str | None = None) -> str:
        return self.labs[cluster].kubectl("-n", self.namespace, *words, input=input)

    def make(self) -> None:
        self.labs["west"].kubectl("create", "namespace", self.namespace)
        claim = {
            "accessModes": ["ReadWriteMany"],
            "storageClassName": "lab",
            "resources": {"requests": {"storage": "1Gi"}},
        }
        self._apply("west", *self._queue(), document("v1", "PersistentVolumeClaim", "home", self.namespace, spec=claim))
        self._apply("head", *self._of_multikueue(), *self._queue(checks=["west"]))
        self.connect()
        clusters = ("get", "multikueuecluster", "west", "-o", "jsonpath={.status.conditions[*].status}")
        until(lambda: self.kubectl("head", *clusters) == "True", "Kueue is connected with the worker")
        # A queue is closed until Kueue has seen its flavor and that its admission check is active.
        active = "jsonpath={.status.conditions[?(@.type=='Active')].status}"
        queue = ("get", "clusterqueue", self.namespace, "-o", active)
        for cluster in self.labs:
            until(lambda cluster=cluster: self.kubectl(cluster, *queue) == "True", f"the queue in {cluster} is open")

    def connect(self, *, connected: bool = True) -> None:
        """Give the manager's Kueue a kubeconfig of the worker, or take it away."""
        secret = document("v1", "Secret", "west", "kueue-system")
        if connected:
            self._apply("head", {**secret, "stringData": {"kubeconfig": self.kubeconfig("west")}})
        else:
            self.labs["head"].kubectl("-n", "kueue-system", "delete", "secret", "west")

    def remove(self) -> None:
        for made in (*self._queue(checks=["west"]), *self._of_multikueue()):
            self.kubectl("head", "delete", made["kind"], made["metadata"]["name"], "--wait=false", "--ignore-not-found")
        self.labs["head"].kubectl("-n", "kueue-system", "delete", "secret", "west", "--ignore-not-found")

    def kubeconfig(self, *clusters: str) -> str:
        """A kubeconfig without references to files, with a context for each cluster."""
        found = [
            json.loads(
                self.labs[name].kubectl("config", "view", "--flatten", "-o", "json").replace('"lab"', f'"{name}"')
            )
            for name in clusters
        ]
        for name, each in zip(clusters, found, strict=True):
            each["users"][0]["name"] = each["contexts"][0]["context"]["user"] = f"admin-{name}"
        joined = {key: [one for each in found for one in each[key]] for key in ("clusters", "users", "contexts")}
        return json.dumps({**found[0], **joined})

    def left(self) -> Mapping[str, list[str]]:
        """Every object in the namespace of each cluster that is not always there, but for its queue."""
        queue = "localqueue.kueue.x-k8s.io/train"
        found = {name: objects_left(lab, self.namespace) for name, lab in self.labs.items()}
        return {name: [each for each in objects if each != queue] for name, objects in found.items()}

    def _apply(self, cluster: str, *documents: Mapping[str, Any]) -> None:
        together = json.dumps({"apiVersion": "v1", "kind": "List", "items": documents})
        self.labs[cluster].kubectl("apply", "-f", "-", input=together)

    def _queue(self, *, checks: list[str] | None = None) -> list[dict[str, Any]]:
        kueue, name = "kueue.x-k8s.io/v1beta2", self.namespace
        amounts = [{"name": "cpu", "nominalQuota": 8}]
        group = {"coveredResources": ["cpu"], "flavors": [{"name": name, "resources": amounts}]}
        spec: dict[str, Any] = {"namespaceSelector": {}, "resourceGroups": [group]}
        if checks:
            spec["admissionChecksStrategy"] = {"admissionChecks": [{"name": each} for each in checks]}
        return [
            document(kueue, "ResourceFlavor", name, spec={}),
            document(kueue, "ClusterQueue", name, spec=spec),
            document(kueue, "LocalQueue", "train", self.namespace, spec={"clusterQueue": name}),
        ]

    def _of_multikueue(self) -> list[dict[str, Any]]:
        kueue = "kueue.x-k8s.io/v1beta2"
        source = {"kubeConfig": {"locationType": "Secret", "location": "west"}}
        parameters = {"apiGroup": "kueue.x-k8s.io", "kind": "MultiKueueConfig", "name": "west"}
        check = {"controllerName": "kueue.x-k8s.io/multikueue", "parameters": parameters}
        return [
            document(kueue, "MultiKueueCluster", "west", spec={"clusterSource": source}),
            document(kueue, "MultiKueueConfig", "west", spec={"clusters": ["west"]}),
            document(kueue, "AdmissionCheck", "west", spec=check),
        ]


@pytest.fixture(scope="module")
def west(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    made = Lab(tmp_path_factory.mktemp("west") / "west")
    made.up(nodes=nodes(2), dies_with_parent=True)
    yield made
    made.down()


@pytest.fixture
def clusters(lab: Lab, west: Lab, namespace: str) -> Iterator[Clusters]:
    made = Clusters(lab, west, namespace)
    made.make()
    yield made
    made.remove()


@pytest.fixture
def project(clusters: Clusters, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A project whose target `far` is the queue of the manager cluster."""
    config = tmp_path / "kubeconfig"
    config.write_text(clusters.kubeconfig("head", "west"))
    monkeypatch.setenv("KUBECONFIG", str(config))
    folder = tmp_path / "project"
    (folder / ".holdfast" / "targets").mkdir(parents=True)
    set_target(folder, clusters)
    shutil.copy(TORCH_FREE_TRAINER, folder)
    (folder / "greet.py").write_text("import os; print('hello from', os.environ['RANK'])\n")
    yield folder
    for run in api.runs():
        clusters.kubectl("head", "delete", "jobset", "--all", "--wait=false")
        until(lambda run=run: not run.alive(), "its mirror is gone")


def set_target(folder: Path, clusters: Clusters, *, volume: str = VOLUME) -> None:
    text = TARGET.format(namespace=clusters.namespace, user=os.geteuid()) + volume
    (folder / ".holdfast" / "targets" / "far.yaml").write_text(text)


def start(folder: Path, *command: str, **job: Any) -> RunDir:
    fields = {"image": "none", "nodes": 2, "resources": "{cpu: 1}", **job}
    overrides = [f"{name}={value}" for name, value in fields.items()]
    return api.start(api.load(None, command=command, overrides=overrides), "far", base=folder)


def test_run_is_sent_to_a_worker_and_followed_recovered_and_cancelled_from_any_machine(
    clusters: Clusters, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start(project, "python", TORCH_FREE_TRAINER.name, "100000", "0.05", checkpoint="checkpoints")
    steps_on(run)
    assert not clusters.kubectl("head", "get", "pods", "-o", "name")
    known = api.target_runs("far", base=project)
    assert known is not None
    (there,) = known.runs
    assert (there.run, there.phase, there.running_nodes) == (run.run_id, TargetRunPhase.RUNNING, 2)
    api.inject_fault(run, target=FaultTarget.RANK, index=0, action=FaultAction.KILL)
    steps_on(run, restarts=1)

    # Kueue takes the run out of the worker, and sends it there again: it resumes from the volume.
    workload = clusters.kubectl("west", "get", "workloads.kueue.x-k8s.io", "-o", "name").strip()
    before = uid(clusters, run)
    clusters.kubectl("west", "patch", workload, "--type=merge", "-p", '{"spec": {"active": false}}')
    until(lambda: uid(clusters, run) not in ("", before), "Kueue sends it to the worker again")
    until(lambda: sum(isinstance(event, ControllerStarted) for event in api.events(run)) == 2, "another controller")
    saved = step(run)
    assert saved > 10
    reach(run, lambda known: known.phase is RunPhase.RUNNING and (known.leader.step or 0) > saved + 10)

    with monkeypatch.context() as patch:
        patch.setenv("HOLDFAST_HOME", str(tmp_path / "other"))
        other = api.find_run(run.run_id, "far", base=project)
        assert api.status(other).phase is RunPhase.RUNNING
        until(lambda: all(path.stat().st_size for path in find_rank_logs(other).values()), "output of ranks arrives")
        api.cancel(other)
        assert to_its_end(other)[0].outcome is Outcome.CANCELLED
    assert to_its_end(run)[0].outcome is Outcome.CANCELLED
    until(lambda: clusters.left() == {"head": [], "west": []}, "nothing is left in either cluster")

    # Kueue deletes what a finished run has in the worker: the client has all of it by then.
    set_target(project, clusters, volume="")
    run = start(project, "python", "greet.py")
    finished, _ = to_its_end(run)
    assert (finished.outcome, finished.exit_code) == (Outcome.SUCCEEDED, 0)
    until(lambda: not run.alive(), "its mirror has left")
    assert [path.read_text() for path in find_rank_logs(run).values()] == ["hello from 0\n", "hello from 1\n"]
    until(lambda: clusters.left()["west"] == [], "nothing is left in the worker")
    assert [each.run for each in api.prune("far", older_than_s=0, base=project)] == [run.run_id]
    until(lambda: clusters.left()["head"] == [], "nothing is left in the manager")


def step(run: RunDir) -> int:
    return api.status(run).leader.step or 0


def uid(clusters: Clusters, run: RunDir) -> str:
    words = ("get", "jobset", run.run_id, "--ignore-not-found", "-o", "jsonpath={.metadata.uid}")
    return clusters.kubectl("west", *words)


def test_waiting_run_and_check_name_what_keeps_it_from_a_worker(clusters: Clusters, project: Path) -> None:
    def found() -> Mapping[str, Severity]:
        return {each.code: each.severity for each in api.check_target(None, "far", base=project)}

    assert Severity.ERROR not in found().values()
    hold = ("patch", "clusterqueue", clusters.namespace, "--type=merge", "-p")
    clusters.kubectl("west", *hold, '{"spec": {"stopPolicy": "Hold"}}')
    run = start(project, "python", "greet.py")
    until(lambda: pending(run) == ("waits-for-cluster", "west: the ClusterQueue"), "the worker's queue is closed")
    clusters.connect(connected=False)
    until(lambda: pending(run)[0] == "multikueue-cluster-inactive", "Kueue has no contact")
    until(lambda: found().get("multikueue-cluster-inactive") is Severity.ERROR, "check says so too")
    clusters.connect()
    until(lambda: pending(run)[0] == "waits-for-cluster", "Kueue has contact again")
    api.cancel(run)
    assert to_its_end(run)[0].outcome is Outcome.CANCELLED
    until(lambda: clusters.left() == {"head": [], "west": []}, "nothing is left in either cluster")

    clusters.kubectl("west", "delete", "pvc", "home", "--wait=false")
    clusters.kubectl("west", "delete", "localqueue", "train")
    lacking = {each.code: each.what for each in api.check_target(None, "far", base=project)}
    assert lacking["claim-missing"].startswith("in cluster west: there is no claim home")
    assert lacking["queue-missing"].startswith("in cluster west: there is no queue train")


def pending(run: RunDir) -> tuple[str, str]:
    """Code and the start of the first evidence of why a run waits."""
    reason = api.pending_reason(run)
    return (reason.code, " ".join(reason.evidence[0].split()[:3]) if reason.evidence else "") if reason else ("", "")
