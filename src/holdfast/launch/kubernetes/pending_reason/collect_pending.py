"""Reads the objects of a pending run, for pending_rules.py.

It skips objects that this user may not read, because the rest may be enough.
"""

from __future__ import annotations

import asyncio
import time
from datetime import datetime
from http import HTTPStatus
from typing import Any

from holdfast.findings import Finding
from holdfast.launch.kubernetes.client.api_errors import ApiError, ClusterError, to_holdfast_error
from holdfast.launch.kubernetes.client.api_paths import NAMESPACE_PATH, PODS_PATH, KubeObject
from holdfast.launch.kubernetes.client.cluster import ClusterClient
from holdfast.launch.kubernetes.cluster_ref import ClusterRef
from holdfast.launch.kubernetes.object_names import RUN_LABEL
from holdfast.launch.kubernetes.pending_reason.pending_rules import PendingRun, find_pending_reason

REQUEST_TIMEOUT_S = 10.0
"""Longest time to wait for a response."""

MAX_EVENTS = "1000"
"""Most warning events read from a namespace."""


def read_pending_reason(run: ClusterRef) -> Finding | None:
    """Why a run is pending, or why that is unknown; None if no object shows that it is pending."""
    cluster = ClusterClient(context=run.context, namespace=run.namespace, timeout_s=REQUEST_TIMEOUT_S)
    try:
        return find_pending_reason(asyncio.run(read_run(cluster, run.owner)))
    except ClusterError as error:
        return to_holdfast_error(error).findings[0]


async def read_run(cluster: ClusterClient, owner: str) -> PendingRun:
    """Read a run's objects; raises ClusterError if even its owner cannot be read."""
    about = await cluster.get(owner)
    name, uid = about["metadata"]["name"], about["metadata"]["uid"]
    own = {"labelSelector": f"{RUN_LABEL}={name}"}
    admitted = {"labelSelector": f"kueue.x-k8s.io/job-uid={uid}"}
    warnings = {"fieldSelector": "type=Warning", "limit": MAX_EVENTS}
    namespace, pods, events, workloads = await asyncio.gather(
        get_or_empty(cluster, NAMESPACE_PATH),
        get_or_empty(cluster, PODS_PATH, **own),
        get_or_empty(cluster, "/api/v1/namespaces/{namespace}/events", **warnings),
        get_or_empty(cluster, "/apis/kueue.x-k8s.io/v1beta2/namespaces/{namespace}/workloads", **admitted),
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
