"""Checks a target's cluster, and with MultiKueue each worker cluster to which it may send a run."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from holdfast.findings import Finding
from holdfast.launch.kubernetes.client.api_errors import ClusterError, to_holdfast_error
from holdfast.launch.kubernetes.manifests.render_context import RenderContext
from holdfast.launch.kubernetes.pending_reason.dispatch_rules import in_cluster
from holdfast.launch.kubernetes.preflight.cluster_checks import MANAGER_CHECKS, check_cluster
from holdfast.launch.kubernetes.preflight.collect_inventory import collect_inventory
from holdfast.launch.kubernetes.preflight.run_permissions import Permission
from holdfast.launch.kubernetes.workload_catalog import CATALOG


def check_clusters(ctx: RenderContext) -> tuple[Finding, ...]:
    """Findings for all that a run needs and the clusters lack; raises ClusterError if the target's does not answer."""
    seen = collect_inventory(ctx)
    if not ctx.target.multikueue:
        return check_cluster(ctx, seen)
    # The pods are in a worker, with all that they refer to.
    manager = replace(seen, pod_rejections=(), priority_classes=None, missing_references=())
    workers = (each for name, context in ctx.target.multikueue.items() for each in _check_worker(ctx, name, context))
    return (*check_cluster(ctx, manager, MANAGER_CHECKS), *workers)


def _check_worker(ctx: RenderContext, name: str, context: str) -> Iterator[Finding]:
    there = replace(ctx, target=ctx.target.model_copy(update={"context": context, "multikueue": {}}))
    try:
        seen = collect_inventory(there)
    except ClusterError as error:
        found = to_holdfast_error(error).findings
    else:
        kind = CATALOG[ctx.workload]
        by_kueue = {
            str(Permission(verb=verb, group=kind.group, resource=kind.resource)) for verb in ("create", "delete")
        }
        denied = [each for each in seen.denied if each not in by_kueue]
        found = check_cluster(there, replace(seen, denied=denied))
    yield from (in_cluster(name, each) for each in found)
