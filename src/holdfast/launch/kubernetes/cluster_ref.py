"""Owns where in the world a run on Kubernetes is, written down for whoever asks for it later."""

from __future__ import annotations

from typing import Any

import msgspec

from holdfast.host.files import atomic_write, read_small
from holdfast.job.run_spec import corrupt_file_error
from holdfast.run_dir import RunDir


class ClusterRef(msgspec.Struct, frozen=True, kw_only=True):
    """A run's place, as its folder here knows it."""

    context: str | None
    """The kubeconfig's context; None is the current one."""
    namespace: str
    owner: str
    """Path of the object that stands for the run: removing it removes the run."""
    controller: dict[str, Any] | None = None
    """The ReplicaSet of its controller as it was made, so that it can be made again; none where no agent is."""


def write_cluster_ref(folder: RunDir, cluster_ref: ClusterRef) -> None:
    """Write down where a run is."""
    atomic_write(folder.remote, msgspec.json.encode(cluster_ref))


def read_cluster_ref(folder: RunDir) -> ClusterRef:
    """Where a run is; raises HoldfastError where that is not what was written."""
    try:
        return msgspec.json.decode(read_small(folder.remote), type=ClusterRef)
    except (OSError, msgspec.MsgspecError) as error:
        raise corrupt_file_error(folder.remote, error) from error
