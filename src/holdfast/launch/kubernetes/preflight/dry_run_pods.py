"""Builds the pods that a run's objects will create, for a dry run of each.

Policies, quotas and Pod Security check pods at creation, which operators do later: a dry run of the run's objects does
not include it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from holdfast.launch.kubernetes.manifests.render_context import RenderContext
from holdfast.launch.kubernetes.object_names import PART_LABEL


def pods_of(ctx: RenderContext, objects: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One pod per distinct template in the objects."""
    found = list[dict[str, Any]]()
    for each in objects:
        for template in templates(each):
            pod = _pod(ctx, template)
            if pod not in found:
                found.append(pod)
    return found


def templates(node: Any) -> Iterator[Mapping[str, Any]]:
    """The pod templates in an object, wherever its kind has them."""
    match node:
        case {"spec": {"containers": _}}:
            yield cast(Mapping[str, Any], node)
        case Mapping():
            for value in cast(Mapping[str, Any], node).values():
                yield from templates(value)
        case list():
            for value in cast(list[Any], node):
                yield from templates(value)
        case _:
            pass


def _pod(ctx: RenderContext, template: Mapping[str, Any]) -> dict[str, Any]:
    spec, metadata = dict(template["spec"]), dict(template["metadata"])
    if spec.get("serviceAccountName") == ctx.names.controller:
        del spec["serviceAccountName"]  # created with the run; a dry run of a pod needs an existing account
    name = f"{ctx.names.name}-{metadata['labels'][PART_LABEL]}"
    about = {"name": name, "namespace": ctx.target.namespace, **metadata}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": about, "spec": spec}
