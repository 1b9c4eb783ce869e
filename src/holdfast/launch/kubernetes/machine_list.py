"""Lists a cluster's machines as this user sees them, and releases one from the namespace's quarantine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.findings import Finding, Owner, Severity
from holdfast.job.quarantine import Quarantine, release
from holdfast.job.targets import TargetSpec
from holdfast.launch.kubernetes.client.api_errors import ApiError, as_holdfast_error
from holdfast.launch.kubernetes.client.api_paths import NODES_PATH, PODS_PATH
from holdfast.launch.kubernetes.client.cluster import ClusterClient
from holdfast.launch.kubernetes.object_names import NODE, PART_LABEL, RUN_LABEL
from holdfast.launch.kubernetes.quarantine_object import ANNOTATION, QuarantineObject
from holdfast.launch.target_machines import TargetMachines, list_machines, not_quarantined


def read_machines(spec: TargetSpec) -> TargetMachines:
    """The machines that the target's `node_selector` allows; raises HoldfastError if the cluster does not answer."""
    with as_holdfast_error():
        return asyncio.run(_read(_client(spec), spec.node_selector))


def release_machine(target: str, spec: TargetSpec, machine: str) -> tuple[Finding, ...]:
    """End the quarantine of a machine, and uncordon it if a run cordoned it, also after its quarantine is over.

    Raises HoldfastError if it has neither.
    """
    with as_holdfast_error():
        return asyncio.run(_release(_client(spec), target, machine))


def _client(spec: TargetSpec) -> ClusterClient:
    return ClusterClient(context=spec.context, namespace=spec.namespace)


async def _read(cluster: ClusterClient, node_selector: Mapping[str, str]) -> TargetMachines:
    selector = ",".join(f"{key}={value}" for key, value in sorted(node_selector.items()))
    (known, findings), nodes, pods = await asyncio.gather(
        QuarantineObject(cluster).read(),
        _list(cluster, NODES_PATH, selector),
        _list(cluster, PODS_PATH, f"{RUN_LABEL},{PART_LABEL}={NODE}"),
    )
    uses = [
        (pod["spec"]["nodeName"], pod["metadata"]["labels"][RUN_LABEL])
        for pod in pods or ()
        if pod["spec"].get("nodeName") and pod.get("status", {}).get("phase") not in ("Succeeded", "Failed")
    ]
    cordoned = {
        node["metadata"]["name"]: node["metadata"].get("annotations", {}).get(ANNOTATION, "")
        for node in nodes or ()
        if node["spec"].get("unschedulable")
    }
    names = [node["metadata"]["name"] for node in nodes or ()]
    unread = [what for what, found in (("nodes", nodes), ("pods", pods)) if found is None]
    findings = (*findings, *([_not_checked(unread)] if unread else []))
    return list_machines(names, uses, known, now=time.time(), cordoned=cordoned, findings=findings)


async def _list(cluster: ClusterClient, path: str, selector: str) -> Sequence[Mapping[str, Any]] | None:
    """All objects of a kind; None if this user may not list them."""
    try:
        found = await cluster.get(path, **({"labelSelector": selector} if selector else {}))
    except ApiError:
        return None
    return found["items"]


async def _release(cluster: ClusterClient, target: str, machine: str) -> tuple[Finding, ...]:
    now = time.time()

    ours = await _is_cordoned_by_run(cluster, machine)

    def change(known: Quarantine) -> Quarantine:
        changed = release(known, machine, now)
        if changed is None and not ours:
            raise not_quarantined(machine, target, known, now)
        return changed or known

    findings = await QuarantineObject(cluster).change(change)
    return (*findings, *await _uncordon(cluster, machine))


async def _is_cordoned_by_run(cluster: ClusterClient, machine: str) -> bool:
    """Whether a run cordoned it, as far as this user may read machines."""
    try:
        node = await cluster.get(f"{NODES_PATH}/{machine}")
    except ApiError:
        return False
    return ANNOTATION in node["metadata"].get("annotations", {})


async def _uncordon(cluster: ClusterClient, machine: str) -> tuple[Finding, ...]:
    """Undo the cordon of a run; one by somebody else stays."""
    path = f"{NODES_PATH}/{machine}"
    try:
        node = await cluster.get(path)
        if ANNOTATION not in node["metadata"].get("annotations", {}):
            return ()
        await cluster.patch(path, {"metadata": {"annotations": {ANNOTATION: None}}, "spec": {"unschedulable": None}})
    except ApiError as refused:
        still = Finding(
            code="machine-still-cordoned",
            severity=Severity.WARNING,
            what=f"{machine} is released, and may still be cordoned: this user may not change machines",
            where=machine,
            evidence=(str(refused),),
            remedy=f"Have an administrator run `kubectl uncordon {machine}`.",
            owner=Owner.CLUSTER,
        )
        return (still,)
    return ()


def _not_checked(kinds: Sequence[str]) -> Finding:
    return Finding(
        code="not-checked",
        severity=Severity.INFO,
        what=f"this user may not list {' and '.join(kinds)}, so the table may lack machines, or who uses them",
        where="context",
        remedy=f"Allow `list` on {', '.join(kinds)}.",
        owner=Owner.CLUSTER,
    )
