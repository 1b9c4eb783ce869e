"""The objects that a target names and does not create: pods without them never start. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from holdfast.job.targets import GangScheduler
from holdfast.launch.kubernetes.client.api_paths import NAMESPACE_PATH
from holdfast.launch.kubernetes.manifests.pod_group import GROUPS
from holdfast.launch.kubernetes.manifests.render_context import RenderContext


class ReferencedObject(Struct, frozen=True, kw_only=True):
    """An object of the cluster that a run's pods need."""

    kind: str
    name: str
    path: str
    """Its API path; if `in_any_namespace`, that of all objects of the kind."""
    where: str
    """The field of the target that names it."""
    remedy: str
    in_any_namespace: bool = False
    """Whether an object with this name suffices in any namespace."""


def referenced_objects(ctx: RenderContext) -> Iterator[ReferencedObject]:
    """The objects that the target's `pod`, `image_pull_secrets` and `volcano_queue` name.

    The API server accepts pods without them. It rejects those without their service account or runtime class, so a dry
    run finds these.
    """
    pod = ctx.target.pod
    if ctx.target.volcano_queue is not None and ctx.target.pod_group is GangScheduler.VOLCANO:
        yield ReferencedObject(
            kind="Queue",
            name=ctx.target.volcano_queue,
            path=f"/apis/{'/'.join(GROUPS[GangScheduler.VOLCANO])}/queues/{ctx.target.volcano_queue}",
            where="volcano_queue",
            remedy="Name another, or have it made: `kubectl get queues.scheduling.volcano.sh` lists those there are.",
        )
    for name in ctx.target.image_pull_secrets:
        yield _secret(name, "image_pull_secrets", "Make it: `kubectl create secret docker-registry`.")
    for name in pod.env_from.config_maps:
        yield _own("ConfigMap", "configmaps", name, "pod.env_from.config_maps")
    for name in pod.env_from.secrets:
        yield _secret(name, "pod.env_from.secrets")
    for number, volume in enumerate(pod.volumes):
        where = f"pod.volumes.{number}"
        if volume.claim is not None:
            yield _own("PersistentVolumeClaim", "persistentvolumeclaims", volume.claim, f"{where}.claim")
        if volume.secret is not None:
            yield _secret(volume.secret, f"{where}.secret")
        if volume.config_map is not None:
            yield _own("ConfigMap", "configmaps", volume.config_map, f"{where}.config_map")
    for number, claim in enumerate(pod.resource_claims):
        yield ReferencedObject(
            kind="ResourceClaimTemplate",
            name=claim.template,
            path=f"/apis/resource.k8s.io/v1/namespaces/{{namespace}}/resourceclaimtemplates/{claim.template}",
            where=f"pod.resource_claims.{number}.template",
            remedy="`kubectl get resourceclaimtemplates` lists those of the namespace.",
        )


def _secret(name: str, where: str, remedy: str = "") -> ReferencedObject:
    return _own("Secret", "secrets", name, where, remedy)


def _own(kind: str, resource: str, name: str, where: str, remedy: str = "") -> ReferencedObject:
    return ReferencedObject(
        kind=kind,
        name=name,
        path=f"{NAMESPACE_PATH}/{resource}/{name}",
        where=where,
        remedy=remedy or f"Make it, or name another: `kubectl get {resource}` lists those of the namespace.",
    )
