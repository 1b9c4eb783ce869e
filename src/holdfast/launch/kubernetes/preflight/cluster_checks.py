"""Checks whether a cluster has what a run needs, by one function per rule, here or in the file of its subject.

Pure. collect_inventory.py reads the cluster; rules that do not depend on it are in job_checks.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from holdfast.findings import Finding, Severity
from holdfast.job.quarantine_text import avoided_finding
from holdfast.launch.kubernetes.client.api_errors import REJECTION_RULES
from holdfast.launch.kubernetes.client.message_rules import match_rule
from holdfast.launch.kubernetes.manifests.render_context import RenderContext
from holdfast.launch.kubernetes.preflight import (
    gateway_checks,
    machine_checks,
    pod_patch_checks,
    pull_secrets,
    queue_checks,
    storage_checks,
)
from holdfast.launch.kubernetes.preflight.cluster_finding import cluster_finding
from holdfast.launch.kubernetes.preflight.cluster_inventory import ClusterInventory
from holdfast.launch.kubernetes.preflight.operator_kinds import operator_kinds

ClusterCheck = Callable[[RenderContext, ClusterInventory], Iterator[Finding]]


def check_cluster(
    ctx: RenderContext, cluster: ClusterInventory, checks: Sequence[ClusterCheck] | None = None
) -> tuple[Finding, ...]:
    """Findings for all that a run needs and the cluster lacks; if the namespace is missing, only that."""
    rules = CHECKS if checks is None else checks
    return tuple(namespace(ctx, cluster)) or tuple(finding for rule in rules for finding in rule(ctx, cluster))


def namespace(ctx: RenderContext, cluster: ClusterInventory) -> Iterator[Finding]:
    """Checks that the namespace exists and is not being deleted."""
    name = ctx.target.namespace
    if cluster.namespace is None:
        yield cluster_finding(
            "namespace-missing", "namespace", f"there is no namespace {name}", f"kubectl create namespace {name}"
        )
    elif ends := cluster.namespace.get("metadata", {}).get("deletionTimestamp"):
        what = f"namespace {name} is being deleted"
        yield cluster_finding(
            "namespace-terminating", "namespace", what, "Use another `namespace`.", f"deletionTimestamp: {ends}"
        )


def operators(ctx: RenderContext, cluster: ClusterInventory) -> Iterator[Finding]:
    """Checks that the operator of the run's object is installed, runs, and serves the API version used."""
    for kind in operator_kinds(ctx):
        served = cluster.served.get((kind.group, kind.resource), frozenset())
        if not served:
            what = f"the cluster does not know {kind.resource} ({kind.group})"
            yield cluster_finding("operator-missing", kind.field, what, f"{kind.remedy}, or change `{kind.field}`.")
        elif kind.version not in served:
            known = ", ".join(sorted(served))
            what = f"{kind.resource} are served as {known}, and the manifests are written for {kind.version}"
            yield cluster_finding(
                "operator-version", kind.field, what, "Install a version of the operator that serves it."
            )
    for deployment in cluster.operators:
        ready = deployment.get("status", {}).get("readyReplicas", 0)
        if ready == 0:
            name = f"{deployment['metadata']['namespace']}/{deployment['metadata']['name']}"
            what = f"{name} does not run"
            yield cluster_finding(
                "operator-down", name, what, f"kubectl describe deployment -n {name.replace('/', ' ')}"
            )


def permissions(ctx: RenderContext, cluster: ClusterInventory) -> Iterator[Finding]:
    """Checks that this user may create everything the run needs."""
    if cluster.denied:
        what = f"this user may not do what a run in namespace {ctx.target.namespace} takes"
        remedy = "Have a role bound that allows it, or use another `context` or `namespace`."
        if any("rbac.authorization.k8s.io" in each for each in cluster.denied):
            remedy += " With a ready-made account, named as `service_account` in the target, no Role is created."
        yield cluster_finding("not-permitted", "namespace", what, remedy, *cluster.denied)


def dry_run(ctx: RenderContext, cluster: ClusterInventory) -> Iterator[Finding]:
    """Checks that the API server and its webhooks accept the manifests and their pods."""
    unknown: dict[Finding, None] = {}
    for where, message in dict.fromkeys(
        (*((ctx.workload, each) for each in cluster.rejections), *(("pods", each) for each in cluster.pod_rejections))
    ):
        if fields := pod_patch_checks.rejected_fields(ctx, message):
            unknown |= dict.fromkeys(fields)
            continue
        finding = match_rule(REJECTION_RULES, where, message)
        assert finding is not None, "the last row matches any text"
        # Quota in use now may be free later; see queue_checks.namespace_quota.
        waits = where == "pods" and finding.code == "quota-exceeded"
        yield msgspec.structs.replace(finding, severity=Severity.WARNING) if waits else finding
    yield from unknown


def references(ctx: RenderContext, cluster: ClusterInventory) -> Iterator[Finding]:
    """Checks objects that pods refer to: the API server accepts a pod without them, but the pod never starts."""
    wanted = ctx.target.priority_class
    known = cluster.priority_classes
    if wanted is not None and known is not None and wanted not in known:
        what = f"there is no priority class {wanted}, and without it no pod is made"
        yield cluster_finding(
            "referenced-object-missing", "priority_class", what, "`kubectl get priorityclasses` lists them."
        )
    priority, in_queues = ctx.job.priority, cluster.queue_priorities
    if priority is not None and ctx.queue and in_queues is not None and priority not in in_queues:
        what = f"there is no WorkloadPriorityClass {priority}, and without it the queue does not admit the run"
        remedy = "`kubectl get workloadpriorityclasses` lists them."
        yield cluster_finding("referenced-object-missing", "priority", what, remedy)
    for each in cluster.missing_references:
        scope = f" in namespace {ctx.target.namespace}" if "{namespace}" in each.path else ""
        what = f"there is no {each.kind} {each.name}{scope}"
        yield cluster_finding("referenced-object-missing", each.where, what, each.remedy)


def fabric(_: RenderContext, cluster: ClusterInventory) -> Iterator[Finding]:
    """Checks that the cluster has what attaches the fabric to pods: networks, device classes, daemons."""
    for each in cluster.missing_prerequisites:
        yield cluster_finding(
            "fabric-prerequisite-missing", each.where, f"there is no {each.kind} {each.name}", each.remedy
        )


def quarantined(ctx: RenderContext, cluster: ClusterInventory) -> Iterator[Finding]:
    """Reports the machines that a run will avoid."""
    yield from cluster.quarantine_findings
    machines = None if cluster.nodes is None else len(cluster.nodes)
    yield from avoided_finding(cluster.quarantined, machines, ctx.accepted.target)


def not_readable(_: RenderContext, cluster: ClusterInventory) -> Iterator[Finding]:
    """Reports what is unknown because this user may not read it."""
    if cluster.not_readable:
        what = "this user may not look at some of what a run needs, and nothing is known of it"
        remedy = "Nothing, if runs start; the cluster's administrator sees it all with the same command."
        yield cluster_finding("not-checked", "context", what, remedy, *cluster.not_readable, severity=Severity.INFO)


CHECKS: tuple[ClusterCheck, ...] = (
    operators,
    queue_checks.queue,
    queue_checks.multikueue,
    queue_checks.placement,
    queue_checks.tiers,
    queue_checks.quota,
    queue_checks.namespace_quota,
    permissions,
    dry_run,
    machine_checks.machines,
    storage_checks.claim,
    storage_checks.driver,
    references,
    pull_secrets.pull_secrets,
    fabric,
    gateway_checks.gateway,
    quarantined,
    not_readable,
)


MANAGER_CHECKS: tuple[ClusterCheck, ...] = (
    operators,
    queue_checks.queue,
    queue_checks.multikueue,
    queue_checks.quota,
    permissions,
    dry_run,
    references,
    not_readable,
)
"""Those of a cluster from which MultiKueue sends runs to others, and that has no pod of them."""
