"""Reads a ClusterInventory as the user who starts the run; creates nothing.

Every request has a timeout. It records what this user may not read.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

from holdfast.findings import Finding
from holdfast.job.quarantine import Quarantine
from holdfast.launch.kubernetes.client.api_errors import ApiError, ApiUnavailable
from holdfast.launch.kubernetes.client.api_paths import (
    KUEUE_PATH,
    NAMESPACE_PATH,
    NODES_PATH,
    KubeObject,
    can_dry_run_alone,
    collection_path,
    object_name,
)
from holdfast.launch.kubernetes.client.cluster import ClusterClient
from holdfast.launch.kubernetes.manifests.controller_objects import GATEWAY_GROUP, GATEWAY_VERSION
from holdfast.launch.kubernetes.manifests.render_context import RenderContext
from holdfast.launch.kubernetes.manifests.run_manifests import RunManifests, render
from holdfast.launch.kubernetes.manifests.yaml_writer import to_plain
from holdfast.launch.kubernetes.object_names import MULTIKUEUE
from holdfast.launch.kubernetes.pending_reason.collect_pending import (
    MULTIKUEUE_CLUSTERS_PATH,
    REQUEST_TIMEOUT_S,
    get_or_empty,
)
from holdfast.launch.kubernetes.preflight.cluster_inventory import NOT_READABLE, ClusterInventory
from holdfast.launch.kubernetes.preflight.dry_run_pods import pods_of
from holdfast.launch.kubernetes.preflight.fabric_prerequisites import prerequisites
from holdfast.launch.kubernetes.preflight.operator_kinds import HYPERNODES, operator_kinds
from holdfast.launch.kubernetes.preflight.pull_secrets import registries
from holdfast.launch.kubernetes.preflight.referenced_objects import ReferencedObject, referenced_objects
from holdfast.launch.kubernetes.preflight.run_permissions import Permission, required_permissions
from holdfast.launch.kubernetes.quarantine_object import NAME, QuarantineObject
from holdfast.launch.kubernetes.workload_catalog import CATALOG

_STORAGE = "/apis/storage.k8s.io/v1"
_REVIEW = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"


def collect_inventory(ctx: RenderContext) -> ClusterInventory:
    """Read the inventory; raises ClusterError if the API server does not answer or rejects this user."""
    cluster = ClusterClient(context=ctx.target.context, namespace=ctx.target.namespace, timeout_s=REQUEST_TIMEOUT_S)
    return asyncio.run(_Collector(cluster, ctx).collect())


class _Collector:
    """Reads a cluster's inventory once."""

    def __init__(self, cluster: ClusterClient, ctx: RenderContext) -> None:
        self._cluster, self._ctx = cluster, ctx
        self._kind = CATALOG[ctx.workload]
        self._not_readable: list[str] = []

    async def collect(self) -> ClusterInventory:
        ctx, target = self._ctx, self._ctx.target
        served = await self._served()
        namespace = await self._get(NAMESPACE_PATH)
        rendering = render(ctx)
        whole = namespace is not None and bool(served.get((self._kind.group, self._kind.resource)))
        owner, rest, of_pods, denied = await asyncio.gather(
            self._dry_run_owner(rendering) if whole else _nothing(),
            self._dry_run_others(rendering) if namespace is not None else _none(),
            self._dry_run_pods(rendering) if namespace is not None else _none(),
            self._denied(),
        )
        quarantine, quarantine_findings = await self._quarantine()
        queue = f"{KUEUE_PATH}/namespaces/{{namespace}}/localqueues/{ctx.queue}"
        local_queue = await self._get(queue) if ctx.queue else None
        cluster_queue = await self._cluster_queue(local_queue)
        claim = await self._get_own(f"persistentvolumeclaims/{target.volume.claim}") if target.volume else None
        volume_name = (claim or {}).get("spec", {}).get("volumeName")
        no_volume_yet = target.volume is not None and volume_name is None and claim is not NOT_READABLE
        return ClusterInventory(
            served=served,
            namespace=namespace,
            local_queue=local_queue,
            cluster_queue=cluster_queue,
            dispatch_clusters=await self._dispatch_clusters(cluster_queue),
            topologies=await self._topologies(cluster_queue) if ctx.job.placement else None,
            tiers=await self._tiers() if ctx.placed_by_volcano else None,
            resource_quotas=(await get_or_empty(self._cluster, f"{NAMESPACE_PATH}/resourcequotas")).get("items", ()),
            claim=claim,
            volume=(await self._get(f"/api/v1/persistentvolumes/{volume_name}") or {}) if volume_name else {},
            nodes=await self._list(NODES_PATH),
            operators=await self._operators(),
            storage_classes=await self._list(f"{_STORAGE}/storageclasses") if no_volume_yet else None,
            csi_drivers=_names(await self._list(f"{_STORAGE}/csidrivers")) if no_volume_yet else None,
            priority_classes=_names(await self._list("/apis/scheduling.k8s.io/v1/priorityclasses"))
            if target.priority_class
            else None,
            queue_priorities=_names(await self._list(f"{KUEUE_PATH}/workloadpriorityclasses"))
            if ctx.job.priority and ctx.queue
            else None,
            missing_references=await self._missing(referenced_objects(ctx)),
            pull_secrets=await self._pull_secrets(),
            suspended_by_kueue=owner[0],
            denied=denied,
            rejections=(*owner[1], *rest),
            pod_rejections=of_pods,
            quarantined=quarantine.active(time.time()),
            quarantine_findings=quarantine_findings,
            missing_prerequisites=await self._missing(prerequisites(ctx)),
            gateway=await self._gateway(),
            not_readable=tuple(dict.fromkeys(self._not_readable)),
        )

    async def _missing(self, wanted: Iterable[ReferencedObject]) -> list[ReferencedObject]:
        return [each for each in wanted if not await self._exists(each)]

    async def _exists(self, wanted: ReferencedObject) -> bool:
        """Whether an object exists, or this user may not know."""
        if not wanted.in_any_namespace:
            return await self._get(wanted.path) is not None
        named = await self._get(wanted.path, fieldSelector=f"metadata.name={wanted.name}")
        return named is NOT_READABLE or bool(named and named["items"])

    async def _gateway(self) -> KubeObject | None:
        wanted = self._ctx.target.controller.gateway
        if wanted is None:
            return None
        namespace = wanted.namespace or self._ctx.target.namespace
        path = f"/apis/{GATEWAY_GROUP}/{GATEWAY_VERSION}/namespaces/{namespace}/gateways/{wanted.name}"
        return await self._get(path)

    async def _pull_secrets(self) -> dict[str, tuple[str, ...] | None]:
        """Registries of the image pull secrets that exist and may be read."""
        wanted = self._ctx.target.image_pull_secrets
        secrets = {name: await self._get_own(f"secrets/{name}") for name in wanted}
        return {name: registries(secret) for name, secret in secrets.items() if secret}

    async def _quarantine(self) -> tuple[Quarantine, tuple[Finding, ...]]:
        try:
            return await QuarantineObject(self._cluster).read()
        except ApiError as refused:
            if refused.status != HTTPStatus.FORBIDDEN:
                raise
            self._not_readable.append(f"configmaps/{NAME}")
            return Quarantine(), ()

    async def _cluster_queue(self, local_queue: KubeObject | None) -> KubeObject:
        name = (local_queue or {}).get("spec", {}).get("clusterQueue")
        return await get_or_empty(self._cluster, f"{KUEUE_PATH}/clusterqueues/{name}") if name else {}

    async def _dispatch_clusters(self, cluster_queue: KubeObject) -> dict[str, KubeObject] | None:
        """The MultiKueueClusters of the queue's admission checks; None if they cannot be read."""
        if not cluster_queue:
            return None
        found: dict[str, KubeObject] = {}
        for each in cluster_queue["spec"].get("admissionChecksStrategy", {}).get("admissionChecks", ()):
            check = await self._get(f"{KUEUE_PATH}/admissionchecks/{each['name']}")
            spec = (check or {}).get("spec", {})
            if check is not NOT_READABLE and spec.get("controllerName") != MULTIKUEUE:
                continue
            config = await self._get(f"{KUEUE_PATH}/multikueueconfigs/{spec['parameters']['name']}") if spec else check
            if config is NOT_READABLE:
                return None
            for name in (config or {}).get("spec", {}).get("clusters", ()):
                found[name] = await get_or_empty(self._cluster, f"{MULTIKUEUE_CLUSTERS_PATH}/{name}")
        return found

    async def _topologies(self, cluster_queue: KubeObject) -> dict[str, list[str]] | None:
        """By flavor, the labels of its topology's levels; None if they cannot be read."""
        groups = cluster_queue.get("spec", {}).get("resourceGroups")
        found: dict[str, list[str]] = {}
        for name in dict.fromkeys(flavor["name"] for group in groups or () for flavor in group["flavors"]):
            flavor = await self._get(f"{KUEUE_PATH}/resourceflavors/{name}")
            if flavor is NOT_READABLE:
                return None
            topology_name = (flavor or {}).get("spec", {}).get("topologyName")
            topology = await self._get(f"{KUEUE_PATH}/topologies/{topology_name}") if topology_name else None
            if topology is NOT_READABLE:
                return None
            found[name] = [level["nodeLabel"] for level in (topology or {}).get("spec", {}).get("levels", ())]
        return None if groups is None else found

    async def _tiers(self) -> frozenset[str] | None:
        listed = await self._get(f"/apis/{HYPERNODES.group}/{HYPERNODES.version}/{HYPERNODES.resource}")
        if listed is None or listed is NOT_READABLE:
            return None
        return frozenset(each["spec"]["tierName"] for each in listed["items"] if each["spec"].get("tierName"))

    async def _get(self, path: str, **params: str) -> KubeObject | None:
        """An object: None if it does not exist, and NOT_READABLE if this user may not read it."""
        try:
            return await self._cluster.get(path, **params)
        except ApiError as refused:
            if refused.status == HTTPStatus.NOT_FOUND:
                return None
            if refused.status != HTTPStatus.FORBIDDEN:
                raise
            own = path.rpartition("}/")[2] if "}/" in path else "/".join(path.split("/")[-2:])
            self._not_readable.append("namespace" if path == NAMESPACE_PATH else own)
            return NOT_READABLE

    async def _get_own(self, path: str) -> KubeObject | None:
        """The same for an object of the namespace."""
        return await self._get(f"{NAMESPACE_PATH}/{path}")

    async def _list(self, path: str) -> Sequence[KubeObject] | None:
        """All objects of a cluster-scoped kind; None if this user may not read them."""
        try:
            return (await self._cluster.get(path))["items"]
        except ApiError as refused:
            if refused.status != HTTPStatus.FORBIDDEN:
                raise
            self._not_readable.append(path.rpartition("/")[2])
            return None

    async def _served(self) -> dict[tuple[str, str], frozenset[str]]:
        """Served versions of the kinds that operators bring."""
        wanted = operator_kinds(self._ctx)
        return {(each.group, each.resource): await self._versions(each.group, each.resource) for each in wanted}

    async def _versions(self, group: str, resource: str) -> frozenset[str]:
        known = await get_or_empty(self._cluster, f"/apis/{group}")
        versions = [each["version"] for each in known.get("versions", ())]
        kinds = await asyncio.gather(*(get_or_empty(self._cluster, f"/apis/{group}/{version}") for version in versions))
        return frozenset(
            version
            for version, found in zip(versions, kinds, strict=True)
            if any(each["name"] == resource for each in found.get("resources", ()))
        )

    async def _operators(self) -> list[KubeObject]:
        names = [self._kind.operator, *(["kueue-controller-manager"] if self._ctx.queue else [])]
        path = "/apis/apps/v1/deployments"
        found = [await get_or_empty(self._cluster, path, fieldSelector=f"metadata.name={name}") for name in names]
        return [each for answer in found for each in answer.get("items", ())]

    async def _denied(self) -> list[str]:
        rights = required_permissions(self._ctx)
        allowed = await asyncio.gather(*(self._allowed(each) for each in rights))
        return [str(right) for right, yes in zip(rights, allowed, strict=True) if not yes]

    async def _allowed(self, right: Permission) -> bool:
        attributes = {
            "namespace": self._ctx.target.namespace,
            "verb": right.verb,
            "group": right.group,
            "resource": right.resource,
            "subresource": right.subresource,
        }
        review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview"}
        answer = await self._cluster.create(_REVIEW, review | {"spec": {"resourceAttributes": attributes}})
        return answer["status"]["allowed"]

    async def _dry_run_owner(self, rendering: RunManifests) -> tuple[bool | None, Sequence[str]]:
        """Whether Kueue suspends an unsuspended run's object in a dry run, and the rejections."""
        owner = copy.deepcopy(to_plain(rendering.owner))
        *parents, field = self._kind.held_by
        if self._ctx.queue and field == "suspend":
            _at(owner["spec"], parents)[field] = False
        made = await self._dry_run(owner)
        if made is None:
            return None, ()  # this user may not create it, so Kueue's answer is unknown
        if isinstance(made, str):
            before = [object_name(to_plain(each)) for each in rendering.prerequisites]
            # A TrainJob's runtime is created just before it, so it does not exist yet.
            return None, [] if any(name in made for name in before) else [made]
        return bool(_at(made.get("spec", {}), parents).get(field)), ()

    async def _dry_run_others(self, rendering: RunManifests) -> list[str]:
        others = filter(can_dry_run_alone, (*rendering.prerequisites, *rendering.owned))
        made = await asyncio.gather(*(self._dry_run(to_plain(each)) for each in others))
        return [each for each in made if isinstance(each, str)]

    async def _dry_run_pods(self, rendering: RunManifests) -> list[str]:
        """Rejections of the pods that the objects will create."""
        made = await asyncio.gather(*(self._dry_run(each) for each in pods_of(self._ctx, rendering.objects)))
        if None in made:
            self._not_readable.append("whether the run's pods would be admitted (create pods)")
        return [each for each in made if isinstance(each, str)]

    async def _dry_run(self, one: Mapping[str, Any]) -> Mapping[str, Any] | str | None:
        """An object as the API server would create it, or the rejection message of the server or a webhook.

        None if this user may not create it, which `denied` reports, or if it exists already.
        """
        try:
            return await self._cluster.create(collection_path(one), one, dryRun="All", fieldValidation="Strict")
        except ApiError as refused:
            told_elsewhere = "cannot create resource" in refused.message or "already exists" in refused.message
            return None if told_elsewhere else str(refused)
        except ApiUnavailable as error:
            if "webhook" not in error.message:
                raise
            return error.message


async def _nothing() -> tuple[bool | None, Sequence[str]]:
    return None, ()


async def _none() -> list[str]:
    return []


def _at(spec: dict[str, Any], path: Sequence[str]) -> dict[str, Any]:
    """The mapping at a path; an empty one if it is missing."""
    for name in path:
        spec = spec.get(name, {})
    return spec


def _names(things: Sequence[KubeObject] | None) -> frozenset[str] | None:
    return None if things is None else frozenset(map(object_name, things))
