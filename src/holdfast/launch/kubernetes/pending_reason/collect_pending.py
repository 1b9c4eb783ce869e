"""Owns what is seen of a run that waits: the objects that pending_rules.py judges, as the API server shows them.

Refuses to own what they mean. What this user may not see is left out: the rest may say enough.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

from holdfast.findings import Finding
from holdfast.launch.kubernetes.client.api_errors import ApiError, ClusterError, to_holdfast_error
from holdfast.launch.kubernetes.client.api_paths import NAMESPACE_PATH, PODS_PATH
from holdfast.launch.kubernetes.client.cluster import ClusterClient
from holdfast.launch.kubernetes.object_names import RUN_LABEL
from holdfast.launch.kubernetes.pending_reason.pending_rules import KubeObject, PendingRun, find_pending_reason

REQUEST_TIMEOUT_S = 10.0
"""Longest that one answer is waited for."""

MAX_EVENTS = "1000"
"""Most warnings of a namespace that are looked through."""


def read_pending_reason(*, context: str | None, namespace: str, owner: str) -> Finding | None:
    """Why a run is not running yet, or why that cannot be known; None when nothing says that it waits.

    `owner` is the path of the object that stands for it, with `{namespace}` left open.
    """
    cluster = ClusterClient(context=context, namespace=namespace, timeout_s=REQUEST_TIMEOUT_S)
    try:
        return find_pending_reason(asyncio.run(read_run(cluster, owner)))
    except ClusterError as error:
        return to_holdfast_error(error).findings[0]


async def read_run(cluster: ClusterClient, owner: str) -> PendingRun:
    """What is there of a run; raises ClusterError where not even its owner can be seen."""
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
    )


async def get_or_empty(cluster: ClusterClient, path: str, **params: str) -> dict[str, Any]:
    """What lies at a path; nothing where there is none, or where this user may not see it."""
    try:
        return await cluster.get(path, **params)
    except ApiError as refused:
        if refused.status in (HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND):
            return {}
        raise


def _is_about_run(event: KubeObject, name: str) -> bool:
    """Whether it is about the run's own object, or one of those that bear its name and more."""
    about = str(event["involvedObject"].get("name", ""))
    return about == name or about.startswith(f"{name}-")
