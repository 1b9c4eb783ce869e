"""Owns what is seen of a run that waits: the objects that pending.py judges, as the API server shows them.

Refuses to own what they mean. What this user may not see is left out: the rest may say enough.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

from holdfast.findings import Finding
from holdfast.launch.kubernetes.cluster import Cluster
from holdfast.launch.kubernetes.names import RUN_LABEL
from holdfast.launch.kubernetes.paths import NAMESPACE, PODS
from holdfast.launch.kubernetes.pending import Seen, Thing, pending
from holdfast.launch.kubernetes.refusals import ClusterError, RefusedBy, refusal

LOOK_S = 10.0
"""Longest that one answer is waited for."""

EVENTS = "1000"
"""Most warnings of a namespace that are looked through."""


def waits_for(*, context: str | None, namespace: str, owner: str) -> Finding | None:
    """Why a run is not running yet, or why that cannot be known; None when nothing says that it waits.

    `owner` is the path of the object that stands for it, with `{namespace}` left open.
    """
    cluster = Cluster(context=context, namespace=namespace, answer_s=LOOK_S)
    try:
        return pending(asyncio.run(seen(cluster, owner)))
    except ClusterError as error:
        return refusal(error).findings[0]


async def seen(cluster: Cluster, owner: str) -> Seen:
    """What is there of a run; raises ClusterError where not even its owner can be seen."""
    about = await cluster.read(owner)
    name, uid = about["metadata"]["name"], about["metadata"]["uid"]
    own = {"labelSelector": f"{RUN_LABEL}={name}"}
    admitted = {"labelSelector": f"kueue.x-k8s.io/job-uid={uid}"}
    warnings = {"fieldSelector": "type=Warning", "limit": EVENTS}
    namespace, pods, events, workloads = await asyncio.gather(
        perhaps(cluster, NAMESPACE),
        perhaps(cluster, PODS, **own),
        perhaps(cluster, "/api/v1/namespaces/{namespace}/events", **warnings),
        perhaps(cluster, "/apis/kueue.x-k8s.io/v1beta2/namespaces/{namespace}/workloads", **admitted),
    )
    return Seen(
        owner=about,
        namespace=namespace,
        pods=pods.get("items", ()),
        events=[one for one in events.get("items", ()) if _of_run(one, name)],
        workload=next(iter(workloads.get("items", ())), None),
    )


async def perhaps(cluster: Cluster, path: str, **params: str) -> dict[str, Any]:
    """What lies at a path; nothing where there is none, or where this user may not see it."""
    try:
        return await cluster.read(path, **params)
    except RefusedBy as refused:
        if refused.status in (HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND):
            return {}
        raise


def _of_run(event: Thing, name: str) -> bool:
    """Whether it is about the run's own object, or one of those that bear its name and more."""
    about = str(event["involvedObject"].get("name", ""))
    return about == name or about.startswith(f"{name}-")
