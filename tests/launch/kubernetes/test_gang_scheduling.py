"""Two runs where one has room, before the real scheduler: without a queue each may hold half; with one, none does."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.launch.kubernetes.golden_cases import Case, render_context
from tests.launch.kubernetes.test_pending_rules import QUEUE

from holdfast.launch.kubernetes.manifests.run_manifests import render
from holdfast.launch.kubernetes.manifests.yaml_writer import to_plain
from holdfast.launch.kubernetes.pending_reason.pending_rules import PendingRun, find_pending_reason
from lab import Lab

pytestmark = pytest.mark.slow

WITHIN_S = 240.0
MACHINE = """
apiVersion: v1
kind: Node
metadata: {name: NAME-NUMBER, labels: {type: kwok, for: NAME}}
status:
  allocatable: {cpu: "64", memory: 64Gi, pods: "20", nvidia.com/gpu: "8"}
  capacity: {cpu: "64", memory: 64Gi, pods: "20", nvidia.com/gpu: "8"}
"""


class Site:
    """Two machines, with room for one run, and two runs."""

    def __init__(self, lab: Lab, namespace: str) -> None:
        self.lab, self.namespace = lab, namespace

    def make(self, *, queue: str | None) -> None:
        """Two runs, whose pods come before the scheduler one by one, in whatever order `show` says."""
        for run in ("ann", "ben"):
            place = {"queue": queue, "volume": None, "namespace": self.namespace, "agent": False}
            there = {**place, "node_selector": {"for": self.namespace}}
            job = {"name": run, "resources": {}, "secrets": {}, "launch": "per-node"}
            owner = to_plain(render(render_context(Case(job=job, target=there))).owner)
            pod = owner["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
            pod["schedulingGates"] = [{"name": "holdfast.test/later"}]
            self.lab.kubectl("create", "-f", "-", input=json.dumps(owner))

    def pods(self, run: str) -> list[dict[str, Any]]:
        which = ("pods", "-n", self.namespace, "-l", f"holdfast/run={run}-000000", "-o", "json")
        found = json.loads(self.lab.kubectl("get", *which))["items"]
        return sorted(found, key=lambda pod: pod["metadata"]["name"])

    def show(self, run: str, number: int, *, held: bool) -> None:
        """Have the scheduler see a pod, and wait until it holds a machine, or is refused one.

        Before the scheduler knows that a machine is ready, or free again, it refuses what it holds later.
        """
        pod = self.until(lambda: len(found := self.pods(run)) == 2 and found)[number]["metadata"]["name"]
        patch = '[{"op": "remove", "path": "/spec/schedulingGates"}]'
        self.lab.kubectl("patch", "pod", pod, "-n", self.namespace, "--type=json", "-p", patch)
        self.until(lambda: "nodeName" in self.pods(run)[number]["spec"] if held else refused(self.pods(run)[number]))

    def holds(self, run: str) -> int:
        """How many machines a run holds."""
        return len([pod for pod in self.pods(run) if "nodeName" in pod["spec"]])

    def until(self, seen: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + WITHIN_S
        while not (found := seen()):
            assert time.monotonic() < deadline, self.lab.kubectl("get", "all", "-n", self.namespace)
            time.sleep(0.2)
        return found


def refused(pod: dict[str, Any]) -> bool:
    """Whether the scheduler has found no machine for it."""
    return any(each.get("reason") == "Unschedulable" for each in pod["status"].get("conditions", ()))


@pytest.fixture
def site(lab: Lab, namespace: str) -> Iterator[Site]:
    machines = [MACHINE.replace("NAME", namespace).replace("NUMBER", number) for number in "01"]
    queue = QUEUE.replace("QUOTA", "16").replace("ORDER", "BestEffortFIFO").replace("STOP", "None")
    lab.kubectl("create", "-f", "-", input="---".join([*machines, queue.replace("NAME", namespace)]))
    yield Site(lab, namespace)
    lab.kubectl("delete", "node", f"{namespace}-0", f"{namespace}-1")
    for kind in ("clusterqueue", "resourceflavor"):
        lab.kubectl("delete", kind, namespace, "--wait=false")


def test_without_a_queue_two_runs_may_each_hold_half_and_wait(site: Site) -> None:
    site.make(queue=None)
    for number, held in ((0, True), (1, False)):
        for run in ("ann", "ben"):
            site.show(run, number, held=held)
    assert (site.holds("ann"), site.holds("ben")) == (1, 1)
    for run in ("ann", "ben"):
        owner = {"kind": "JobSet", "metadata": {"name": run}, "spec": {}}
        finding = find_pending_reason(PendingRun(owner=owner, pods=site.pods(run)))
        assert finding is not None
        assert finding.code == "unschedulable"
        assert "Insufficient nvidia.com/gpu" in finding.what


def test_with_a_queue_one_runs_after_the_other_in_the_same_order_of_pods(site: Site) -> None:
    site.make(queue="train")
    first = site.until(lambda: [run for run in ("ann", "ben") if len(site.pods(run)) == 2])[0]
    (second,) = {"ann", "ben"} - {first}
    site.show(first, 0, held=True)
    assert site.pods(second) == []
    site.show(first, 1, held=True)
    assert (site.holds(first), site.pods(second)) == (2, [])
    names = [pod["metadata"]["name"] for pod in site.pods(first)]
    site.until(lambda: all(pod["status"]["phase"] == "Running" for pod in site.pods(first)))
    site.lab.kubectl("annotate", "pod", *names, "-n", site.namespace, "lab.holdfast/exit=0")
    site.until(lambda: len(site.pods(second)) == 2)
    for number in (0, 1):
        site.show(second, number, held=True)
    assert site.holds(second) == 2
