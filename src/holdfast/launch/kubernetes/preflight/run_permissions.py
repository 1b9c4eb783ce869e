"""The permissions that starting and following a run needs. Pure."""

from __future__ import annotations

from msgspec import Struct

from holdfast.job.targets import Workload
from holdfast.launch.kubernetes.client.api_paths import KUEUE, collection_path
from holdfast.launch.kubernetes.manifests.render_context import RenderContext
from holdfast.launch.kubernetes.manifests.run_manifests import render
from holdfast.launch.kubernetes.workload_catalog import CATALOG


class Permission(Struct, frozen=True, kw_only=True):
    """A permission in the namespace that starting and following a run needs."""

    verb: str
    group: str
    resource: str
    subresource: str = ""

    def __str__(self) -> str:
        resource = f"{self.resource}/{self.subresource}" if self.subresource else self.resource
        return f"{self.verb} {resource}.{self.group}".rstrip(".")


def required_permissions(ctx: RenderContext) -> tuple[Permission, ...]:
    """Permissions that starting a run needs: create, read and delete its objects, and access its pods."""
    paths = [collection_path(each).split("/") for each in render(ctx).objects]
    made = dict.fromkeys((words[2] if words[1] == "apis" else "", words[-1]) for words in paths)
    kind = CATALOG[ctx.workload]
    runtime = [Permission(verb="patch", group=kind.group, resource="trainingruntimes")]
    return (
        *(Permission(verb="create", group=group, resource=resource) for group, resource in made),
        *(Permission(verb=verb, group=kind.group, resource=kind.resource) for verb in ("get", "delete")),
        *(Permission(verb=verb, group="", resource="pods", subresource=into) for verb, into in _pod_access_verbs(ctx)),
        *(Permission(verb="list", group=group, resource=resource) for group, resource in made if ctx.target.multikueue),
        Permission(verb="list", group="", resource="events"),
        *(runtime if ctx.workload is Workload.TRAINJOB else ()),
        *([Permission(verb="list", group=KUEUE, resource="workloads")] if ctx.queue else ()),
    )


def _pod_access_verbs(ctx: RenderContext) -> tuple[tuple[str, str], ...]:
    """Pod permissions, with the subresource: to list pods, and to forward the port of the controller's pod.

    For a run without a controller or a volume, to read pod logs; none where MultiKueue sends the pods elsewhere.
    """
    ask, read = (("list", ""), ("get", "portforward"), ("create", "portforward")), ("get", "log")
    if ctx.target.multikueue:
        return ()
    if not ctx.target.agent:
        return ("list", ""), read
    if ctx.target.controller.gateway is not None:
        ask = (("list", ""),)
    return ask if ctx.accepted.durable_controller_disk else (*ask, read)
