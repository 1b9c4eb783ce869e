"""Reads the objects of a pending run, for pending_rules.py.

It skips objects that this user may not read, because the rest may be enough.
"""

from __future__ import annotations

import asyncio
import time
from datetime import datetime
from http import HTTPStatus
from typing import Any

from msgspec.structs import replace

from holdfast.findings import Finding
from holdfast.launch.kubernetes.client.api_errors import ApiError, ClusterError, to_holdfast_error
from holdfast.launch.kubernetes.client.api_paths import KUEUE, KUEUE_PATH, NAMESPACE_PATH, PODS_PATH, KubeObject
from holdfast.launch.kubernetes.client.cluster import ClusterClient
from holdfast.launch.kubernetes.cluster_ref import ClusterRef
from holdfast.launch.kubernetes.object_names import RUN_LABEL
from holdfast.launch.kubernetes.pending_reason import dispatch_rules
from holdfast.launch.kubernetes.pending_reason.pending_rules import PendingRun, find_pending_reason

REQUEST_TIMEOUT_S = 10.0
"""Longest time to wait for a response."""

MAX_EVENTS = "1000"
"""Most warning events read from a namespace."""

MULTIKUEUE_CLUSTERS_PATH = f"{KUEUE_PATH}/multikueueclusters"
WORKLOADS_PATH = f"{KUEUE_PATH}/namespaces/{{namespace}}/workloads"
JOB_UID_LABEL = f"{KUEUE}/job-uid"
"""Kueue's label of a Workload with the uid of its object."""


def read_pending_reason(run: ClusterRef) -> Finding | None:
    """Why a run is pending, or why that is unknown; None if no object shows that it is pending."""
    try:
        return asyncio.run(_pending_reason(run))
    except ClusterError as error:
        return to_holdfast_error(error).findings[0]


async def _pending_reason(run: ClusterRef) -> Finding | None:
    seen = await read_run(_client(run, run.context), run.owner)
    if not run.workers or not dispatch_rules.has_quota(seen.workload):
        return find_pending_reason(seen)
    chosen = dispatch_rules.chosen_cluster(seen.workload)
    if chosen is None:
        workers = await asyncio.gather(*(_read_worker(run, seen, name) for name in run.workers))
        return dispatch_rules.dispatch_reason(dict(zip(run.workers, workers, strict=True)))
    if chosen not in run.workers:
        return dispatch_rules.context_missing(chosen)
    there = find_pending_reason(await read_run(_client(run, run.workers[chosen]), run.owner))
    return there and dispatch_rules.in_cluster(chosen, there)


async def _read_worker(run: ClusterRef, seen: PendingRun, name: str) -> dispatch_rules.WorkerCluster:
    """What a worker cluster and the manager's connection to it show of a run that no worker has admitted yet."""
    manager, worker = _client(run, run.context), _client(run, run.workers[name])
    known = await get_or_empty(manager, f"{MULTIKUEUE_CLUSTERS_PATH}/{name}")
    assert seen.workload is not None
    try:
        offered = await get_or_empty(worker, f"{WORKLOADS_PATH}/{seen.workload['metadata']['name']}")
    except ClusterError as error:
        return dispatch_rules.WorkerCluster(known=known, reason=to_holdfast_error(error).findings[0])
    reason = find_pending_reason(replace(seen, workload=offered)) if offered else None
    return dispatch_rules.WorkerCluster(known=known, reason=reason)


def _client(run: ClusterRef, context: str | None) -> ClusterClient:
    return ClusterClient(context=context, namespace=run.namespace, timeout_s=REQUEST_TIMEOUT_S)


async def read_run(cluster: ClusterClient, owner: str) -> PendingRun:
    """Read a run's objects; raises ClusterError if even its owner cannot be read."""
    about = await cluster.get(owner)
    name, uid = about["metadata"]["name"], about["metadata"]["uid"]
    own = {"labelSelector": f"{RUN_LABEL}={name}"}
    admitted = {"labelSelector": f"{JOB_UID_LABEL}={uid}"}
    warnings = {"fieldSelector": "type=Warning", "limit": MAX_EVENTS}
    namespace, pods, events, workloads = await asyncio.gather(
        get_or_empty(cluster, NAMESPACE_PATH),
        get_or_empty(cluster, PODS_PATH, **own),
        get_or_empty(cluster, "/api/v1/namespaces/{namespace}/events", **warnings),
        get_or_empty(cluster, WORKLOADS_PATH, **admitted),
    )
    return PendingRun(
        owner=about,
        namespace=namespace,
        pods=pods.get("items", ()),
        events=[one for one in events.get("items", ()) if _is_about_run(one, name)],
        workload=next(iter(workloads.get("items", ())), None),
        age_s=time.time() - datetime.fromisoformat(about["metadata"]["creationTimestamp"]).timestamp(),
    )


async def get_or_empty(cluster: ClusterClient, path: str, **params: str) -> dict[str, Any]:
    """The object at a path; empty if it does not exist or this user may not read it."""
    try:
        return await cluster.get(path, **params)
    except ApiError as refused:
        if refused.status in (HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND):
            return {}
        raise


def _is_about_run(event: KubeObject, name: str) -> bool:
    """Whether the event is about the run's owner object, or one whose name starts with the run's."""
    about = str(event["involvedObject"].get("name", ""))
    return about == name or about.startswith(f"{name}-")
