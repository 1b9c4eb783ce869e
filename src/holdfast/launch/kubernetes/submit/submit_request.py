"""Message types sent to the submit worker."""

from __future__ import annotations

from typing import Any

import msgspec

from holdfast.launch.kubernetes.client.gateway_port import GatewayRoute


class ClusterAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Cluster and namespace to create objects in."""

    context: str | None
    """The kubeconfig's context; None is the current one."""
    namespace: str


class SubmitRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The objects of one run, and the run's local folder."""

    run_dir: str
    prerequisites: tuple[dict[str, Any], ...]
    """Objects that must exist before the owner."""
    owner: dict[str, Any]
    """The run's owner object: deleting it deletes the others."""
    owned: tuple[dict[str, Any], ...]
    gateway: GatewayRoute | None = None
    """The way to the controller through the cluster's Gateway."""
    workers: dict[str, str] = {}
    """Contexts of the clusters to which MultiKueue may send the run, by the name of the MultiKueueCluster."""
