"""Reads the status of a run's node from the object of its pod."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.launch.kubernetes.incluster.pod_assignment import PodStatus
from holdfast.launch.kubernetes.workload_catalog import NodeLabels

NODE_SHUTDOWN = "Terminated"
"""Reason of a pod whose machine shuts down gracefully; kubelets evict pods that use too much memory or disk as well."""

KUEUE_STOPS = "TerminationTarget"
"""Kueue's condition of a pod that it deletes: it holds back pods of objects that it cannot suspend."""


def pod_status(pod: Mapping[str, Any], numbering: NodeLabels) -> PodStatus | None:
    """A node's status from its pod's object; None for a pod that is not a node."""
    meta, status = pod["metadata"], pod.get("status", {})
    node = numbering.node(meta.get("labels", {}))
    if node is None:
        return None
    phase = status.get("phase", "Pending")
    leaving = "deletionTimestamp" in meta and phase == "Running"
    ended = "deletionTimestamp" in meta or phase in ("Succeeded", "Failed")
    over = pod.get("deleted", False) or (ended and not leaving)
    return PodStatus(
        uid=meta["uid"],
        name=meta["name"],
        node=node,
        owner=next((each["uid"] for each in meta.get("ownerReferences", ()) if each.get("controller")), ""),
        address=status.get("podIP", ""),
        machine=pod.get("spec", {}).get("nodeName", ""),
        accepted="startTime" in status,
        running=phase == "Running",
        terminating=leaving,
        ended=over,
        reason=_end_reason(status) if over else "" if phase == "Running" else _pending_reason(status),
        evicted=_eviction(status),
    )


def _eviction(status: Mapping[str, Any]) -> str:
    """Why the cluster takes a pod from a machine that works; empty if it does not, or because of what the pod used."""
    conditions = {each["type"]: each for each in status.get("conditions", ())}
    if (by_kueue := conditions.get(KUEUE_STOPS, {"status": "False"}))["status"] == "True":
        return f"{by_kueue.get('reason', '')}: {by_kueue.get('message', '')}".strip(": ")
    target = conditions.get("DisruptionTarget", {"status": "False"})
    reason = target.get("reason", "")
    unreachable = conditions.get("Ready", {}).get("status") != "True"
    caused_by_cluster = (
        reason in ("EvictionByEvictionAPI", "PreemptionByScheduler")
        or (reason == "DeletionByTaintManager" and not unreachable)  # it also deletes the pods of lost machines
        or (reason == "TerminationByKubelet" and status.get("reason") == NODE_SHUTDOWN)
    )
    if target["status"] != "True" or not caused_by_cluster:
        return ""
    return _join(target)


def _end_reason(status: Mapping[str, Any]) -> str:
    """Why the kubelet or the cluster has ended a pod; empty if neither says that it has."""
    if status.get("reason"):
        return _join(status)
    return next((_join(each) for each in status.get("conditions", ()) if each["type"] == "DisruptionTarget"), "")


def _join(what: Mapping[str, Any]) -> str:
    return f"{what.get('reason', '')}: {what.get('message', '')}".strip(": ")


def _pending_reason(status: Mapping[str, Any]) -> str:
    for condition in status.get("conditions", ()):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return _join(condition)
    for container in (*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())):
        waiting = container.get("state", {}).get("waiting")
        if waiting and waiting.get("reason") not in ("ContainerCreating", "PodInitializing"):
            return _join(waiting)
    return ""
