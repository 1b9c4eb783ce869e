"""Lists the runs of a namespace by their objects, with one request for each kind."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from http import HTTPStatus
from types import MappingProxyType

from msgspec import Struct
from msgspec.structs import replace

from holdfast.events import Outcome
from holdfast.findings import Finding, Owner, Severity
from holdfast.job.targets import TargetSpec
from holdfast.launch.kubernetes.client.api_errors import (
    ApiError,
    ClusterError,
    as_holdfast_error,
    to_holdfast_error,
)
from holdfast.launch.kubernetes.client.api_paths import PODS_PATH, KubeObject
from holdfast.launch.kubernetes.client.cluster import ClusterClient
from holdfast.launch.kubernetes.object_names import (
    NODE,
    NODES_ANNOTATION,
    PART_LABEL,
    RUN_LABEL,
    TREE_ANNOTATION,
    USER_ANNOTATION,
)
from holdfast.launch.kubernetes.pending_reason.dispatch_rules import in_cluster
from holdfast.launch.kubernetes.sync.pod_events import end_condition, run_end
from holdfast.launch.kubernetes.workload_catalog import CATALOG
from holdfast.launch.target_runs import TargetRun, TargetRunPhase, TargetRuns

WORKER_TIMEOUT_S = 5.0
"""Longest time to wait for a worker cluster: the others show enough."""
NO_WORKERS: Mapping[str, ClusterClient] = MappingProxyType({})
ENDED_PHASES = {
    Outcome.SUCCEEDED: TargetRunPhase.SUCCEEDED,
    Outcome.FAILED: TargetRunPhase.FAILED,
    Outcome.CANCELLED: TargetRunPhase.CANCELLED,
}


def list_runs(spec: TargetSpec) -> TargetRuns:
    """The runs of the target's namespace; raises HoldfastError if the cluster does not answer or refuses the user."""
    workers = {
        name: ClusterClient(context=context, namespace=spec.namespace, timeout_s=WORKER_TIMEOUT_S)
        for name, context in spec.multikueue.items()
    }
    with as_holdfast_error():
        return asyncio.run(read_runs(ClusterClient(context=spec.context, namespace=spec.namespace), workers))


def delete_run(spec: TargetSpec, run: TargetRun) -> None:
    """Delete a run's object; no-op if it is gone."""
    kind, _, name = run.where.partition("/")
    (row,) = (each for each in CATALOG.values() if each.kind.lower() == kind)
    with as_holdfast_error():
        asyncio.run(ClusterClient(context=spec.context, namespace=spec.namespace).delete(f"{row.path}/{name}"))


async def read_runs(cluster: ClusterClient, workers: Mapping[str, ClusterClient] = NO_WORKERS) -> TargetRuns:
    """The same, of connected clusters: that of the runs' objects, and with MultiKueue those of their pods."""
    kinds = tuple(CATALOG.values())
    (pods, unreached), listed = await asyncio.gather(
        _list_pods(cluster, workers), asyncio.gather(*(_list(cluster, kind.path, RUN_LABEL) for kind in kinds))
    )
    refused = {kind.resource: each.refusal for kind, each in zip(kinds, listed, strict=True) if each.refusal}
    if refused and not any(each.objects is not None for each in listed):
        raise next(iter(refused.values()))
    running = None if pods.objects is None else Counter(_runs_of_running(pods.objects))
    found = [_target_run(one, running) for each in listed for one in each.objects or () if not _has_owner(one)]
    unread = [*refused, *(["pods"] if pods.objects is None else [])]
    return TargetRuns(
        runs=tuple(sorted(found, key=lambda run: (-run.created_at, run.run))),
        findings=(*((_not_listed(unread),) if unread else ()), *unreached),
    )


class _Listed(Struct, frozen=True, kw_only=True):
    """The objects of a kind; None if the cluster has no such kind, or refuses the user."""

    objects: Sequence[KubeObject] | None = None
    refusal: ClusterError | None = None


async def _list_pods(
    cluster: ClusterClient, workers: Mapping[str, ClusterClient]
) -> tuple[_Listed, tuple[Finding, ...]]:
    """The pods of nodes, and the workers of which they are not known."""
    of_nodes = f"{RUN_LABEL},{PART_LABEL}={NODE}"
    if not workers:
        return await _list(cluster, PODS_PATH, of_nodes), ()
    listed = await asyncio.gather(*(_try_list(each, PODS_PATH, of_nodes) for each in workers.values()))
    refused = {name: each.refusal for name, each in zip(workers, listed, strict=True) if each.refusal}
    findings = (in_cluster(name, to_holdfast_error(each).findings[0]) for name, each in refused.items())
    pods = [pod for each in listed for pod in each.objects or ()]
    return _Listed(objects=pods), tuple(replace(each, severity=Severity.WARNING) for each in findings)


async def _try_list(cluster: ClusterClient, path: str, selector: str) -> _Listed:
    try:
        return await _list(cluster, path, selector)
    except ClusterError as error:
        return _Listed(refusal=error)


async def _list(cluster: ClusterClient, path: str, selector: str) -> _Listed:
    try:
        return _Listed(objects=(await cluster.get(path, labelSelector=selector))["items"])
    except ApiError as refused:
        if refused.status == HTTPStatus.NOT_FOUND:  # its operator is not installed
            return _Listed()
        if refused.status != HTTPStatus.FORBIDDEN:
            raise
        return _Listed(refusal=refused)


def _has_owner(one: KubeObject) -> bool:
    """Whether an operator created the object for a run's own: a TrainJob has a JobSet."""
    return any(each.get("controller") for each in one["metadata"].get("ownerReferences", ()))


def _runs_of_running(pods: Iterable[KubeObject]) -> Iterable[str]:
    return (pod["metadata"]["labels"][RUN_LABEL] for pod in pods if pod.get("status", {}).get("phase") == "Running")


def _target_run(one: KubeObject, running: Mapping[str, int] | None) -> TargetRun:
    meta = one["metadata"]
    run = meta["labels"][RUN_LABEL]
    annotations: Mapping[str, str] = meta.get("annotations", {})
    nodes = annotations.get(NODES_ANNOTATION, "")
    ended = end_condition(one)
    return TargetRun(
        run=run,
        phase=_phase(one, None if running is None else running[run]),
        created_at=_unix_time(meta["creationTimestamp"]),
        finished_at=_unix_time(ended["lastTransitionTime"]) if ended and "lastTransitionTime" in ended else None,
        user=annotations.get(USER_ANNOTATION, ""),
        nodes=int(nodes) if nodes.isascii() and nodes.isdecimal() else None,
        running_nodes=None if running is None else running[run],
        where=f"{one['kind'].lower()}/{meta['name']}",
        applied_by_others=TREE_ANNOTATION in annotations,
    )


def _phase(one: KubeObject, running: int | None) -> TargetRunPhase:
    if "deletionTimestamp" in one["metadata"]:
        return TargetRunPhase.STOPPING
    if ended := run_end(one):
        return ENDED_PHASES[ended[0]]
    spec = one.get("spec", {})
    suspended = spec.get("suspend") or spec.get("runPolicy", {}).get("suspend")
    waits = suspended if running is None else not running
    return TargetRunPhase.PENDING if waits else TargetRunPhase.RUNNING


def _unix_time(stamp: str) -> float:
    return datetime.fromisoformat(stamp).timestamp()


def _not_listed(kinds: Sequence[str]) -> Finding:
    return Finding(
        code="not-checked",
        severity=Severity.INFO,
        what=f"this user may not list {', '.join(kinds)}, so runs, or how many of their nodes run, may be missing here",
        where="context",
        remedy=f"Allow `list` on {', '.join(kinds)}.",
        owner=Owner.CLUSTER,
    )
