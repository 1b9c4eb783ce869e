"""Finds the worker cluster to which MultiKueue has sent a run, and copies the run's objects there.

Kueue sends the run's object alone. The other objects stay in the manager cluster, without a controller, so that any
machine can copy them each time Kueue chooses a worker. In the worker the run's object owns the copies: when Kueue
deletes it, nothing is left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import msgspec

from holdfast.launch.kubernetes.client.api_errors import ApiError
from holdfast.launch.kubernetes.client.api_paths import collection_path, object_path
from holdfast.launch.kubernetes.client.cluster import ClusterClient
from holdfast.launch.kubernetes.cluster_ref import ClusterRef, write_cluster_ref
from holdfast.launch.kubernetes.object_names import RUN_LABEL, ObjectNames
from holdfast.launch.kubernetes.pending_reason.collect_pending import JOB_UID_LABEL, WORKLOADS_PATH
from holdfast.launch.kubernetes.pending_reason.dispatch_rules import (
    chosen_cluster,
    context_missing,
    waiting_for_cluster,
)
from holdfast.launch.kubernetes.quarantine_object import MANIFEST
from holdfast.launch.kubernetes.submit.owned_objects import CREATE_FIRST, create_if_absent, owner_metadata
from holdfast.launch.kubernetes.sync.not_dispatched import NotDispatchedError
from holdfast.run_dir import RunDir

APPS = "/apis/apps/v1/namespaces/{namespace}"
COPIED = (
    ("v1", "ConfigMap"),
    ("v1", "Secret"),
    ("v1", "ServiceAccount"),
    ("v1", "Service"),
    ("rbac.authorization.k8s.io/v1", "Role"),
    ("rbac.authorization.k8s.io/v1", "RoleBinding"),
    ("networking.k8s.io/v1", "NetworkPolicy"),
    ("policy/v1", "PodDisruptionBudget"),
    ("resource.k8s.io/v1", "ResourceClaimTemplate"),
    ("monitoring.coreos.com/v1", "PodMonitor"),
    ("apps/v1", "ReplicaSet"),
)
"""Version and kind of the objects that a run may own; the controller last, so that it proves that all are there."""
KEPT_METADATA = ("name", "labels", "annotations")
SET_BY_SERVER = ("clusterIPs", "ipFamilies", "ipFamilyPolicy")
"""Fields of a Service that depend on the networks of its cluster."""


class Dispatch:
    """Where MultiKueue has a run."""

    def __init__(self, folder: RunDir, manager: ClusterClient, cluster_ref: ClusterRef) -> None:
        self._folder, self._manager = folder, manager
        self.cluster_ref: ClusterRef = cluster_ref
        self._worker: ClusterClient | None = None
        self._controller = f"{APPS}/replicasets/{ObjectNames(folder.run_id).controller}"

    def worker(self) -> ClusterClient | None:
        """A client of the worker that has the run, as far as is known here."""
        ref = self.cluster_ref
        if self._worker is None and ref.worker is not None:
            self._worker = ClusterClient(context=ref.workers[ref.worker], namespace=ref.namespace)
        return self._worker

    async def has_moved(self) -> bool:
        """Whether Kueue has chosen another worker than the known one, or none; raises ClusterError."""
        return await self._chosen() != self.cluster_ref.worker

    async def follow(self) -> ClusterClient | None:
        """The worker that has the run, with its objects; None while they do not exist there yet.

        Raises ClusterError, and NotDispatchedError if Kueue has not chosen a worker, or an unknown one.
        """
        chosen = await self._chosen()
        if chosen is None:
            raise NotDispatchedError(waiting_for_cluster(self.cluster_ref.worker))
        if chosen not in self.cluster_ref.workers:
            raise NotDispatchedError(context_missing(chosen))
        if chosen != self.cluster_ref.worker:
            self.cluster_ref, self._worker = msgspec.structs.replace(self.cluster_ref, worker=chosen), None
            write_cluster_ref(self._folder, self.cluster_ref)
        worker = self.worker()
        assert worker is not None
        owner = await _get_or_none(worker, self.cluster_ref.owner)
        if owner is None or "deletionTimestamp" in owner["metadata"]:
            return None
        controller = await _get_or_none(worker, self._controller)
        has_all = _is_owned(controller, owner) if controller else await self._copy(owner, worker)
        return worker if has_all else None

    async def _chosen(self) -> str | None:
        """Name of the MultiKueueCluster that has admitted the run."""
        owner = await _get_or_none(self._manager, self.cluster_ref.owner)
        if owner is None:
            return None
        found = await self._manager.get(WORKLOADS_PATH, labelSelector=f"{JOB_UID_LABEL}={owner['metadata']['uid']}")
        return next((name for each in found["items"] if (name := chosen_cluster(each))), None)

    async def _copy(self, owner: Mapping[str, Any], worker: ClusterClient) -> bool:
        """Create the run's objects in a worker, the controller last; False while those of an earlier dispatch exist."""
        listed = await asyncio.gather(*(self._objects(version, kind) for version, kind in COPIED))
        *others, controllers = listed
        first = [each for objects in others for each in objects if each["kind"] in CREATE_FIRST]
        rest = [each for objects in others for each in objects if each["kind"] not in CREATE_FIRST]
        await create_if_absent(worker, MANIFEST)
        for wave in (first, rest, controllers):
            if not all(await asyncio.gather(*(_put(worker, owner, each) for each in wave))):
                return False
        return True

    async def _objects(self, version: str, kind: str) -> list[dict[str, Any]]:
        """The run's objects of a kind in the manager, as they are to be created in a worker."""
        path = collection_path({"apiVersion": version, "kind": kind})
        found = await _get_or_none(self._manager, path, labelSelector=f"{RUN_LABEL}={self._folder.run_id}")
        return [
            {"apiVersion": version, "kind": kind, **_without_cluster(each)} for each in (found or {}).get("items", ())
        ]


async def _put(worker: ClusterClient, owner: Mapping[str, Any], one: Mapping[str, Any]) -> bool:
    """Create an object in a worker; False if it exists with another owner, and is about to be deleted."""
    mine = {**one, "metadata": {**one["metadata"], **owner_metadata(owner, one)}}
    if await create_if_absent(worker, mine):
        return True
    known = await _get_or_none(worker, object_path(mine))
    return known is not None and _is_owned(known, owner)


def _is_owned(one: Mapping[str, Any], owner: Mapping[str, Any]) -> bool:
    return any(each["uid"] == owner["metadata"]["uid"] for each in one["metadata"].get("ownerReferences", ()))


def _without_cluster(one: Mapping[str, Any]) -> dict[str, Any]:
    """An object without what ties it to the manager cluster, and with a controller that runs."""
    copied = {key: value for key, value in one.items() if key != "status"}
    copied["metadata"] = {key: value for key, value in one["metadata"].items() if key in KEPT_METADATA}
    if "spec" in one:
        copied["spec"] = {key: value for key, value in one["spec"].items() if key not in SET_BY_SERVER}
        if "replicas" in one["spec"]:
            copied["spec"]["replicas"] = 1
    return copied


async def _get_or_none(cluster: ClusterClient, path: str, **params: str) -> dict[str, Any] | None:
    try:
        return await cluster.get(path, **params)
    except ApiError as refused:
        if refused.status != HTTPStatus.NOT_FOUND:
            raise
        return None
