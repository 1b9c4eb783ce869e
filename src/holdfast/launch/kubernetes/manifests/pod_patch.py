"""Applies a target's `pod.patch`, a strategic merge patch, to the pod template of a node.

preflight/pod_patch_checks.py refuses a patch that would change what holdfast renders; this module only merges.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from holdfast.launch.kubernetes.manifests.yaml_writer import Commented, YamlValue, to_plain
from holdfast.launch.kubernetes.workload_catalog import CATALOG

Fields = tuple[str, ...]
"""The names of the fields on the way to a value, without the items of lists."""

RANKS_CONTAINERS = frozenset(kind.container for kind in CATALOG.values())
"""Names that mean the ranks' container in a patch, so that one patch is for every kind of object."""
CONTAINERS: Fields = ("spec", "containers")
INIT_CONTAINERS: Fields = ("spec", "initContainers")

# `x-kubernetes-patch-merge-key` of Kubernetes' OpenAPI document; a test compares both.
# A list without a key is replaced.
_OF_CONTAINER = {"env": "name", "ports": "containerPort", "volumeDevices": "devicePath", "volumeMounts": "mountPath"}
MERGE_KEYS: Mapping[Fields, str] = {
    CONTAINERS: "name",
    INIT_CONTAINERS: "name",
    **{(*of, name): key for of in (CONTAINERS, INIT_CONTAINERS) for name, key in _OF_CONTAINER.items()},
    ("spec", "evictionResponders"): "name",
    ("spec", "hostAliases"): "ip",
    ("spec", "imagePullSecrets"): "name",
    ("spec", "resourceClaims"): "name",
    ("spec", "schedulingGates"): "name",
    ("spec", "topologySpreadConstraints"): "topologyKey",
    ("spec", "volumes"): "name",
}


def with_patch(template: YamlValue, patch: Mapping[str, Any], container: str) -> YamlValue:
    """The pod template with the patch; `container` is the name of the ranks' container in it."""
    return _merge(template, with_container_name(patch, container), ())


def with_container_name(patch: Mapping[str, Any], container: str) -> Mapping[str, Any]:
    """The patch, with the name of the ranks' container that this kind of object has."""
    match patch:
        case {"spec": {"containers": [*containers]}}:
            named = [_renamed(each, container) for each in cast("Sequence[Any]", containers)]
            return {**patch, "spec": {**patch["spec"], "containers": named}}
        case _:
            return patch


def _renamed(item: Any, container: str) -> Any:
    match item:
        case {"name": str(name)} if name in RANKS_CONTAINERS:
            return {**cast("Mapping[str, Any]", item), "name": container}
        case _:
            return item


def _merge(node: YamlValue, patch: Any, fields: Fields) -> YamlValue:
    match node, patch:
        case Commented(value=Mapping() | list()), dict() | list():
            return Commented(_merge(node.value, patch, fields), node.reason)
        case Commented(), _:
            return _merge(node.value, patch, fields)
        case Mapping(), dict():
            added = cast("Mapping[str, Any]", patch)
            return {**node, **{key: _merge(node.get(key), value, (*fields, key)) for key, value in added.items()}}
        case list(), list() if fields in MERGE_KEYS:
            return _merge_items(node, cast("Sequence[Any]", patch), fields)
        case _:
            return patch


def _merge_items(items: Sequence[YamlValue], patches: Sequence[Any], fields: Fields) -> list[YamlValue]:
    """The items, each merged with the patch that has its key, and then the new ones."""
    key = MERGE_KEYS[fields]
    merged = list(items)
    for patch in patches:
        at = next((at for at, item in enumerate(items) if to_plain(item).get(key) == patch.get(key)), None)
        if at is None:
            merged.append(patch)
        else:
            merged[at] = _merge(merged[at], patch, fields)
    return merged
