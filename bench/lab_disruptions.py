"""The ways in which a cluster takes a run's machines from it with notice, for benches on the lab."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from bench import lab_cluster

QUEUE = "borrower"
"""The LocalQueue of the run that is disrupted."""
CPUS_PER_NODE = 100
"""More than half of a machine, and of a queue's quota for two nodes: the run borrows from the other queue."""
TIMEOUT_S = 300.0
"""Longest time until a disruption has come, on a machine with other load."""
_ENDS, _ANNOUNCED = "example.com/ends", "karpenter.sh/disrupted"
_QUEUES = """
apiVersion: kueue.x-k8s.io/v1beta2
kind: ResourceFlavor
metadata: {name: machines}
---
apiVersion: kueue.x-k8s.io/v1beta2
kind: ClusterQueue
metadata: {name: borrower}
spec:
  namespaceSelector: {}
  cohortName: all
  preemption: {withinClusterQueue: LowerPriority}
  resourceGroups:
  - coveredResources: [cpu]
    flavors: [{name: machines, resources: [{name: cpu, nominalQuota: "150"}]}]
---
apiVersion: kueue.x-k8s.io/v1beta2
kind: ClusterQueue
metadata: {name: lender}
spec:
  namespaceSelector: {}
  cohortName: all
  preemption: {reclaimWithinCohort: Any}
  resourceGroups:
  - coveredResources: [cpu]
    flavors: [{name: machines, resources: [{name: cpu, nominalQuota: "150"}]}]
---
apiVersion: kueue.x-k8s.io/v1beta2
kind: WorkloadPriorityClass
metadata: {name: urgent}
value: 1000
"""
_SEES_MACHINES = """
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: sees-machines}
rules:
- {apiGroups: [""], resources: [nodes], verbs: [list]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: sees-machines}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: sees-machines}
subjects: [{apiGroup: rbac.authorization.k8s.io, kind: Group, name: "system:serviceaccounts:NAME"}]
"""
_LOCAL_QUEUE = """
apiVersion: kueue.x-k8s.io/v1beta2
kind: LocalQueue
metadata: {name: NAME}
spec: {clusterQueue: NAME}
"""
_OTHER_JOB = """
apiVersion: batch/v1
kind: Job
metadata: {name: other, labels: {kueue.x-k8s.io/queue-name: QUEUE, kueue.x-k8s.io/priority-class: urgent}}
spec:
  suspend: true
  template:
    spec:
      restartPolicy: Never
      containers: [{name: other, image: none, command: [sleep, "1"], resources: {requests: {cpu: "150"}}}]
"""
"""A job that needs the whole quota for a second."""


def prepare(site: lab_cluster.LabSite) -> None:
    """Create the queues, and let controllers read the machines' taints."""
    site.lab.kubectl("apply", "-f", "-", input=_QUEUES)
    site.lab.kubectl("apply", "-f", "-", input=_SEES_MACHINES.replace("NAME", site.namespace))
    for name in (QUEUE, "lender"):
        site.kubectl("apply", "-f", "-", input=_LOCAL_QUEUE.replace("NAME", name))


def _other_job(site: lab_cluster.LabSite, queue: str) -> None:
    site.kubectl("create", "-f", "-", input=_OTHER_JOB.replace("QUEUE", queue))
    site.kubectl("wait", "--for=condition=Complete", "job/other", f"--timeout={TIMEOUT_S:.0f}s")
    site.kubectl("delete", "job", "other")


def _preempt(site: lab_cluster.LabSite, _: str) -> None:
    _other_job(site, "borrower")


def _reclaim(site: lab_cluster.LabSite, _: str) -> None:
    _other_job(site, "lender")


def _deactivate(site: lab_cluster.LabSite, _: str) -> None:
    found = site.kubectl("get", "workloads.kueue.x-k8s.io", "-o", "name").split()
    (workload,) = (name for name in found if "/jobset-" in name)  # not that of another job, which may still be deleted
    for active in (False, True):
        site.kubectl("patch", workload, "--type=merge", "-p", json.dumps({"spec": {"active": active}}))
        if not active:
            site.wait_for(lambda: not site.pods("node"), TIMEOUT_S)


def _drain(site: lab_cluster.LabSite, pod: str) -> None:
    words = ("--force", "--ignore-daemonsets", "--delete-emptydir-data", f"--timeout={TIMEOUT_S:.0f}s")
    site.lab.kubectl("drain", site.machine(pod), *words)


def _evict(site: lab_cluster.LabSite, pod: str) -> None:
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": site.namespace}}
    path = f"/api/v1/namespaces/{site.namespace}/pods/{pod}/eviction"
    site.kubectl("create", "--raw", path, "-f", "-", input=json.dumps(eviction))


def _delete(site: lab_cluster.LabSite, pod: str) -> None:
    site.kubectl("delete", "pod", pod, "--wait=false")


def _taint(site: lab_cluster.LabSite, pod: str) -> None:
    site.lab.kubectl("taint", "node", site.machine(pod), f"{_ENDS}:NoExecute")


def _announce(site: lab_cluster.LabSite, pod: str) -> None:
    site.lab.kubectl("taint", "node", site.machine(pod), f"{_ANNOUNCED}:NoSchedule")


def restore(site: lab_cluster.LabSite) -> None:
    """Every machine takes pods again."""
    for each in json.loads(site.lab.kubectl("get", "nodes", "-o", "json"))["items"]:
        name, spec = each["metadata"]["name"], each["spec"]
        for taint in (taint["key"] for taint in spec.get("taints", ()) if taint["key"] in (_ENDS, _ANNOUNCED)):
            site.lab.kubectl("taint", "node", name, f"{taint}-")
        if spec.get("unschedulable"):
            site.lab.kubectl("uncordon", name)


KINDS: Mapping[str, Callable[[lab_cluster.LabSite, str], None]] = {
    "preempted by priority": _preempt,
    "machine drained": _drain,
    "borrowed quota reclaimed": _reclaim,
    "pod evicted": _evict,
    "workload deactivated": _deactivate,
    "pod deleted": _delete,
    "machine tainted NoExecute": _taint,
    "machine's end announced": _announce,
}
"""By kind: what does it to the run of a node's pod."""
