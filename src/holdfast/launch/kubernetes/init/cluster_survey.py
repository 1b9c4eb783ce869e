"""Reads what a first target file can be filled with, as this user; what this user may not list is None."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from http import HTTPStatus

from msgspec import Struct

from holdfast.job.targets import Workload
from holdfast.launch.kubernetes.client.api_errors import ApiError
from holdfast.launch.kubernetes.client.api_paths import KUEUE_PATH, NAMESPACE_PATH, NODES_PATH, KubeObject
from holdfast.launch.kubernetes.client.cluster import ClusterClient
from holdfast.launch.kubernetes.workload_catalog import CATALOG

_NETWORKS = "/apis/k8s.cni.cncf.io/v1/namespaces/{namespace}/network-attachment-definitions"

Listed = Sequence[KubeObject] | None


class ClusterSurvey(Struct, frozen=True, kw_only=True):
    """What a cluster shows to this user: objects in API form; None for a list that this user may not read."""

    context: str | None
    namespace: str
    workloads: Sequence[Workload]
    """Kinds whose API version is served."""
    local_queues: Listed = ()
    claims: Listed = ()
    storage_classes: Listed = ()
    nodes: Listed = ()
    topologies: Listed = ()
    daemon_sets: Listed = ()
    device_classes: Listed = ()
    networks: Listed = ()
    """Multus network attachments of the namespace."""


def survey_cluster(context: str | None, namespace: str | None) -> ClusterSurvey:
    """Read a cluster; raises ClusterError if it does not answer or does not know this user."""
    return asyncio.run(_survey(context, namespace))


async def _survey(context: str | None, namespace: str | None) -> ClusterSurvey:
    context, namespace = await ClusterClient(context=context, namespace=namespace).location()
    cluster = ClusterClient(context=context, namespace=namespace)
    return ClusterSurvey(
        context=context,
        namespace=namespace,
        workloads=[kind for kind in CATALOG if await _is_served(cluster, kind)],
        local_queues=await _list(cluster, f"{KUEUE_PATH}/namespaces/{{namespace}}/localqueues"),
        claims=await _list(cluster, f"{NAMESPACE_PATH}/persistentvolumeclaims"),
        storage_classes=await _list(cluster, "/apis/storage.k8s.io/v1/storageclasses"),
        nodes=await _list(cluster, NODES_PATH),
        topologies=await _list(cluster, f"{KUEUE_PATH}/topologies"),
        daemon_sets=await _list(cluster, "/apis/apps/v1/daemonsets"),
        device_classes=await _list(cluster, "/apis/resource.k8s.io/v1/deviceclasses"),
        networks=await _list(cluster, _NETWORKS),
    )


async def _is_served(cluster: ClusterClient, workload: Workload) -> bool:
    kind = CATALOG[workload]
    try:
        resources = (await cluster.get(f"/apis/{kind.group}/{kind.version}"))["resources"]
    except ApiError as refused:
        if refused.status == HTTPStatus.NOT_FOUND:
            return False
        raise
    return any(each["name"] == kind.resource for each in resources)


async def _list(cluster: ClusterClient, path: str) -> Listed:
    """All objects at a path; empty if the cluster does not serve the kind."""
    try:
        return (await cluster.get(path))["items"]
    except ApiError as refused:
        if refused.status == HTTPStatus.FORBIDDEN:
            return None
        if refused.status == HTTPStatus.NOT_FOUND:
            return ()
        raise
