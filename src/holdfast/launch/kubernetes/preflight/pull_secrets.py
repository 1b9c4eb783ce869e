"""Checks whether the kubelet would use image pull secrets for the run's images. Pure; it keeps no credentials."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

import msgspec

from holdfast.findings import Finding, Severity
from holdfast.launch.kubernetes.client.api_paths import KubeObject
from holdfast.launch.kubernetes.manifests.render_context import RenderContext
from holdfast.launch.kubernetes.manifests.run_manifests import render
from holdfast.launch.kubernetes.manifests.yaml_writer import to_plain
from holdfast.launch.kubernetes.preflight.cluster_finding import cluster_finding
from holdfast.launch.kubernetes.preflight.cluster_inventory import ClusterInventory
from holdfast.launch.kubernetes.preflight.dry_run_pods import templates

_DOCKER_HUB = "docker.io"
_KEYS = (".dockerconfigjson", ".dockercfg")


def registries(secret: KubeObject) -> tuple[str, ...] | None:
    """Registries that a Secret has credentials for, some with a path or `*`; None if it is no pull secret."""
    data = secret.get("data", {})
    key = next((each for each in _KEYS if each in data), None)
    if key is None:
        return None
    try:
        found: Any = msgspec.json.decode(base64.b64decode(data[key]))
        entries = msgspec.convert(found["auths"] if key == _KEYS[0] else found, Mapping[str, Any])
    except (ValueError, TypeError, LookupError, msgspec.ValidationError):
        return None
    return tuple(map(_location, entries))


def pull_secrets(ctx: RenderContext, cluster: ClusterInventory) -> Iterator[Finding]:
    """Warns of image pull secrets that the kubelet uses for none of the run's images."""
    for name, known in cluster.pull_secrets.items():
        images = tuple(_images(ctx))
        if known is None:
            what = f"Secret {name} holds no credentials for a registry, so the kubelet ignores it"
        elif any(_covers(registry, image) for registry in known for image in images):
            continue
        else:
            what = f"Secret {name} has no credentials for {' and '.join(images)}"
        evidence = [f"it has credentials for: {', '.join(known)}"] if known else []
        remedy = "Make one for the images' registry: `kubectl create secret docker-registry --docker-server=REGISTRY`."
        yield cluster_finding(
            "pull-secret-unused", "image_pull_secrets", what, remedy, *evidence, severity=Severity.WARNING
        )


def _images(ctx: RenderContext) -> Iterator[str]:
    """The images of a run's pods, each once."""
    pods = (template["spec"] for each in render(ctx).objects for template in templates(to_plain(each)))
    containers = (each for pod in pods for kind in ("initContainers", "containers") for each in pod.get(kind, ()))
    yield from dict.fromkeys(each["image"] for each in containers)


def _covers(registry: str, image: str) -> bool:
    """Whether credentials for a registry are for an image; as the kubelet, `*` stands for a part of a host name."""
    host, _, path = registry.partition("/")
    first, slash, rest = image.partition("/")
    named = bool(slash) and (first == "localhost" or "." in first or ":" in first)
    image_host, repository = (first, rest) if named else (_DOCKER_HUB, image)
    parts, image_parts = host.split("."), image_host.split(".")
    return len(parts) == len(image_parts) and all(map(fnmatchcase, image_parts, parts)) and repository.startswith(path)


def _location(key: str) -> str:
    """An entry's key without what it may have of a URL."""
    bare = re.sub(r"^https?://|/v[12]/?$|/$", "", key)
    return _DOCKER_HUB if bare == f"index.{_DOCKER_HUB}" else bare
