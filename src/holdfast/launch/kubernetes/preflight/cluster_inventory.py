"""A cluster's objects as the user who starts a run sees them; collect_inventory.py reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct, field

from holdfast.findings import Finding
from holdfast.job.quarantine import QuarantineRow
from holdfast.launch.kubernetes.client.api_paths import KubeObject
from holdfast.launch.kubernetes.preflight.referenced_objects import ReferencedObject

NOT_READABLE: KubeObject = {}
"""Placeholder for an object that this user may not read."""


class ClusterInventory(Struct, frozen=True, kw_only=True):
    """A cluster's objects as the user who starts the run sees them, in API form.

    An object is None if it does not exist or the run does not need it; a list or set, if this user may not read it.
    """

    served: Mapping[tuple[str, str], frozenset[str]]
    """Served versions, by group and resource, such as ("jobset.x-k8s.io", "jobsets")."""
    namespace: KubeObject | None
    local_queue: KubeObject | None = None
    cluster_queue: KubeObject = field(default_factory=dict[str, Any])
    """The queue's ClusterQueue, which has the quota; empty if this user may not read it."""
    dispatch_clusters: Mapping[str, KubeObject] | None = None
    """The MultiKueueClusters to which the queue sends runs, by name; None if unknown."""
    resource_quotas: Sequence[KubeObject] = ()
    """ResourceQuotas of the namespace; empty if this user may not read them."""
    claim: KubeObject | None = None
    nodes: Sequence[KubeObject] | None = ()
    operators: Sequence[KubeObject] = ()
    """Deployments of operators and of their webhooks."""
    volume: KubeObject = field(default_factory=dict[str, Any])
    """The PersistentVolume of the claim; empty if it has none, or this user may not read it."""
    storage_classes: Sequence[KubeObject] | None = ()
    csi_drivers: frozenset[str] | None = None
    priority_classes: frozenset[str] | None = frozenset()
    queue_priorities: frozenset[str] | None = frozenset()
    """Kueue's WorkloadPriorityClasses."""
    topologies: Mapping[str, Sequence[str]] | None = None
    """By flavor of the queue, the labels of its topology's levels, the widest first; None if unknown."""
    tiers: frozenset[str] | None = None
    """Names of the tiers of Volcano's HyperNodes; None if unknown."""
    missing_references: Sequence[ReferencedObject] = ()
    """Objects that the target names and that are not there."""
    pull_secrets: Mapping[str, Sequence[str] | None] = field(default_factory=dict[str, Sequence[str] | None])
    """By name of an image pull secret that this user may read, its registries; None if it is no such secret."""
    suspended_by_kueue: bool | None = None
    """Whether Kueue suspends the run's object in a dry run; None if unknown."""
    denied: Sequence[str] = ()
    """Required permissions that this user lacks, such as `create jobsets.jobset.x-k8s.io`."""
    rejections: Sequence[str] = ()
    """The API server's messages for manifests that failed a dry run."""
    pod_rejections: Sequence[str] = ()
    """The same for the pods that the manifests will create."""
    quarantined: Sequence[QuarantineRow] = ()
    """Machines that earlier runs found to be at fault."""
    quarantine_findings: Sequence[Finding] = ()
    """What is wrong with the stored quarantine."""
    missing_prerequisites: Sequence[ReferencedObject] = ()
    """What the fabric needs of the cluster and is not there."""
    gateway: KubeObject | None = None
    """The Gateway by which users reach controllers."""
    not_readable: Sequence[str] = ()
    """What this user may not read, so it is unknown."""
