"""Stores which cluster and namespace a run is in, for later commands."""

from __future__ import annotations

from typing import Any

import msgspec

from holdfast.host.files import atomic_write, read_small
from holdfast.job.run_spec import corrupt_file_error
from holdfast.launch.kubernetes.client.gateway_port import GatewayRoute
from holdfast.launch.kubernetes.object_names import RUN_LABEL
from holdfast.run_dir import RunDir


class ClusterRef(msgspec.Struct, frozen=True, kw_only=True):
    """A run's location in a cluster, as stored in its local folder."""

    context: str | None
    """The kubeconfig's context of the cluster with the run's owner object; None is the current one."""
    namespace: str
    owner: str
    """API path of the run's owner object: deleting it deletes the run."""
    controller: dict[str, Any] | None = None
    """Manifest of the controller's ReplicaSet, so that it can be created again; None for a run without agents, and for
    one that MultiKueue sends to a worker cluster, whose objects are copied again."""
    workers: dict[str, str] = {}
    """Contexts of the clusters to which MultiKueue may send the run, by the name of the MultiKueueCluster."""
    worker: str | None = None
    """The MultiKueueCluster that has the run's pods; None before one is chosen, and without MultiKueue."""
    adopted: bool = False
    """Whether another machine started the run; the controller's pod keeps the log for that one."""
    gateway: GatewayRoute | None = None
    """The way to the controller through the cluster's Gateway; None is a port-forward."""


def pods_command(folder: RunDir, cluster_ref: ClusterRef) -> str:
    """The command that lists the run's pods without holdfast."""
    where = f"--context {cluster_ref.workers[cluster_ref.worker]} " if cluster_ref.worker else ""
    return f"kubectl {where}get pods -n {cluster_ref.namespace} -l {RUN_LABEL}={folder.run_id}"


def write_cluster_ref(folder: RunDir, cluster_ref: ClusterRef) -> None:
    """Store where a run is."""
    atomic_write(folder.remote, msgspec.json.encode(cluster_ref))


def read_cluster_ref(folder: RunDir) -> ClusterRef:
    """Where a run is; raises HoldfastError if the file is corrupt."""
    try:
        return msgspec.json.decode(read_small(folder.remote), type=ClusterRef)
    except (OSError, msgspec.MsgspecError) as error:
        raise corrupt_file_error(folder.remote, error) from error
