"""Explains why a run that MultiKueue is to send to a worker cluster is in none.

Pure. collect_pending.py reads the objects.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from msgspec import Struct

from holdfast.findings import Finding, Owner, Severity
from holdfast.launch.kubernetes.client.api_paths import KubeObject


class WorkerCluster(Struct, frozen=True, kw_only=True):
    """A cluster to which MultiKueue may send a run."""

    known: KubeObject
    """Its MultiKueueCluster in the manager cluster; empty if there is none, or this user may not read it."""
    reason: Finding | None = None
    """Why it has not admitted the run; None if Kueue has not offered it the run."""

    @property
    def lost_contact(self) -> str:
        """Why Kueue has no contact with it, in Kueue's words; empty if it has, or that is unknown."""
        return inactive_message(self.known)


def inactive_message(cluster: KubeObject) -> str:
    """Why a MultiKueueCluster is not active; empty if it is, or Kueue has not reported on it."""
    conditions = cluster.get("status", {}).get("conditions", ())
    active = next((each for each in conditions if each["type"] == "Active"), None)
    return active.get("message") or active.get("reason", "") if active and active["status"] != "True" else ""


def has_quota(workload: KubeObject | None) -> bool:
    """Whether the manager's queue lets the run go to a worker."""
    conditions = (workload or {}).get("status", {}).get("conditions", ())
    return any(each["type"] == "QuotaReserved" and each["status"] == "True" for each in conditions)


def chosen_cluster(workload: KubeObject | None) -> str | None:
    """Name of the MultiKueueCluster that has admitted the run."""
    return (workload or {}).get("status", {}).get("clusterName")


def dispatch_reason(workers: Mapping[str, WorkerCluster]) -> Finding:
    """Why no worker has admitted a run."""
    lost = {name: each.lost_contact for name, each in workers.items() if each.lost_contact}
    told = [f"{name}: {each.reason.what}" for name, each in workers.items() if each.reason and name not in lost]
    seen = [*told, *(f"{name}: no contact: {why}" for name, why in lost.items())]
    if lost and not told:
        return no_contact(lost)
    return msgspec.structs.replace(waiting_for_cluster(None), evidence=tuple(seen))


def no_contact(lost: Mapping[str, str]) -> Finding:
    """Kueue has no contact with these worker clusters, for these reasons."""
    names = f"cluster{'' if len(lost) == 1 else 's'} {', '.join(lost)}"
    return Finding(
        code="multikueue-cluster-inactive",
        what=f"Kueue has no contact with {names}, and sends no run there",
        where="multikueue",
        evidence=tuple(f"{name}: {why}" for name, why in lost.items()),
        remedy="`kubectl describe multikueueclusters` says why; the cluster's administrator fixes the connection.",
        owner=Owner.CLUSTER,
    )


def waiting_for_cluster(left: str | None) -> Finding:
    """The run is in no worker: not yet, or no longer in the worker `left`."""
    moved = f"Kueue has taken it out of cluster {left}, and " if left else ""
    stays = " A run that has begun resumes in another cluster only from a checkpoint at a URL." if left else ""
    return Finding(
        code="waits-for-cluster",
        severity=Severity.INFO,
        what=f"{moved}no worker cluster has admitted it yet",
        where="multikueue",
        remedy=f"It starts when one of them has room.{stays}",
        owner=Owner.CLUSTER,
    )


def context_missing(cluster: str) -> Finding:
    """Kueue has sent a run to a cluster that the target does not name."""
    return Finding(
        code="multikueue-context-missing",
        what=f"Kueue sends runs to cluster {cluster}, for which the target names no context",
        where="multikueue",
        remedy=f"Write `multikueue: {{{cluster}: CONTEXT}}` in the target, cancel such a run, and start it again.",
        owner=Owner.USER,
    )


def in_cluster(name: str, finding: Finding) -> Finding:
    """The finding, with the cluster that it is about."""
    return msgspec.structs.replace(finding, what=f"in cluster {name}: {finding.what}")
