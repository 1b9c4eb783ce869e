"""Names and API server paths of objects, with `{namespace}` as a placeholder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

KubeObject = Mapping[str, Any]
"""An object of the API server, as JSON."""

NAMESPACE_PATH = "/api/v1/namespaces/{namespace}"
NODES_PATH = "/api/v1/nodes"
PODS_PATH = f"{NAMESPACE_PATH}/pods"

KUEUE = "kueue.x-k8s.io"
"""API group of Kueue."""
KUEUE_VERSION = "v1beta2"
KUEUE_PATH = f"/apis/{KUEUE}/{KUEUE_VERSION}"


def object_name(thing: KubeObject) -> str:
    """Name of an object."""
    return str(thing["metadata"]["name"])


def collection_path(thing: KubeObject) -> str:
    """Path to create objects of this kind."""
    version, kind = thing["apiVersion"], thing["kind"].lower()
    plural = f"{kind[:-1]}ies" if kind.endswith("y") else f"{kind}s"
    return f"{'/apis' if '/' in version else '/api'}/{version}/namespaces/{{namespace}}/{plural}"


def object_path(thing: KubeObject) -> str:
    """Path of an object."""
    return f"{collection_path(thing)}/{object_name(thing)}"


def can_dry_run_alone(thing: KubeObject) -> bool:
    """Whether a dry run works before the other objects exist; a RoleBinding needs its Role."""
    return thing["kind"] != "RoleBinding"
