"""Owns where objects lie in the API server's own tree, `{namespace}` left open, and what each asks for there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NAMESPACE_PATH = "/api/v1/namespaces/{namespace}"
PODS_PATH = f"{NAMESPACE_PATH}/pods"


def collection_path(thing: Mapping[str, Any]) -> str:
    """Where objects of this one's kind are made."""
    version, kind = thing["apiVersion"], thing["kind"].lower()
    plural = f"{kind[:-1]}ies" if kind.endswith("y") else f"{kind}s"
    return f"{'/apis' if '/' in version else '/api'}/{version}/namespaces/{{namespace}}/{plural}"


def object_path(thing: Mapping[str, Any]) -> str:
    """Where an object is found."""
    return f"{collection_path(thing)}/{thing['metadata']['name']}"


def can_dry_run_alone(thing: Mapping[str, Any]) -> bool:
    """Whether the API server can judge an object before the rest is there; for a binding it asks for the Role."""
    return thing["kind"] != "RoleBinding"
