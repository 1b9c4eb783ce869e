"""Checks whether a run will be admitted: its queue, the quotas, and the topology that its placement needs."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from holdfast.findings import Finding, Owner, Severity
from holdfast.launch.kubernetes.client.api_paths import KUEUE, object_name
from holdfast.launch.kubernetes.manifests import controller_objects
from holdfast.launch.kubernetes.manifests.pod_template import node_limits
from holdfast.launch.kubernetes.manifests.quantities import parse_quantities, parse_quantity
from holdfast.launch.kubernetes.manifests.render_context import RenderContext
from holdfast.launch.kubernetes.manifests.yaml_writer import to_plain
from holdfast.launch.kubernetes.pending_reason import dispatch_rules
from holdfast.launch.kubernetes.preflight import pod_checks
from holdfast.launch.kubernetes.preflight.cluster_finding import cluster_finding
from holdfast.launch.kubernetes.preflight.cluster_inventory import ClusterInventory
from holdfast.launch.kubernetes.workload_catalog import CATALOG


def queue(ctx: RenderContext, cluster: ClusterInventory) -> Iterator[Finding]:
    """Checks that the queue exists, is open and accepts this kind of object; or that Kueue requires no queue."""
    if not ctx.queue and cluster.suspended_by_kueue:
        what = "Kueue here holds back whatever is in no queue, so the run would stay suspended for ever"
        remedy = "Name a `queue` in the target: `kubectl get localqueues` lists those there are."
        seen = "made for a dry run, it was suspended: manageJobsWithoutQueueName in Kueue's configuration"
        yield cluster_finding("queue-required", "queue", what, remedy, seen)
    if not ctx.queue or not cluster.served.get((KUEUE, "localqueues")):
        return
    if cluster.local_queue is None:
        what = f"there is no queue {ctx.queue} in namespace {ctx.target.namespace}"
        yield cluster_finding("queue-missing", "queue", what, "`kubectl get localqueues -A` lists those there are.")
    else:
        for condition in cluster.local_queue.get("status", {}).get("conditions", ()):
            if condition["type"] == "Active" and condition["status"] != "True":
                what = f"queue {ctx.queue} is closed"
                yield cluster_finding(
                    "queue-closed", "queue", what, "`kubectl describe clusterqueue` says why.", condition["message"]
                )
    if cluster.suspended_by_kueue is False:
        framework = CATALOG[ctx.workload].kueue_framework
        what = f"Kueue's integration with {framework} is off, so the run would stay suspended for ever"
        remedy = f"Add {framework} to integrations.frameworks in Kueue's configuration."
        seen = "made for a dry run with `suspend: false`, it was not held back"
        yield cluster_finding("kueue-integration-disabled", "queue", what, remedy, seen)


def multikueue(ctx: RenderContext, cluster: ClusterInventory) -> Iterator[Finding]:
    """Checks that the target has a context for each cluster to which the queue sends runs, and Kueue a connection."""
    clusters, contexts, where = cluster.dispatch_clusters, ctx.target.multikueue, pod_checks.MULTIKUEUE
    if clusters is None:
        return
    if contexts and not clusters:
        what = f"queue {ctx.queue} sends runs to no other cluster, so this one would wait for ever"
        remedy = "Remove `multikueue`, or have an AdmissionCheck of MultiKueue added to the queue's ClusterQueue."
        yield cluster_finding("multikueue-not-configured", where, what, remedy)
    for name in sorted(clusters.keys() - contexts.keys()):
        yield msgspec.structs.replace(dispatch_rules.context_missing(name), where=where)
    lost = {name: why for name, each in clusters.items() if (why := dispatch_rules.inactive_message(each))}
    if lost:
        severity = Severity.ERROR if len(lost) == len(clusters) else Severity.WARNING
        yield msgspec.structs.replace(dispatch_rules.no_contact(lost), where=where, severity=severity)


def placement(ctx: RenderContext, cluster: ClusterInventory) -> Iterator[Finding]:
    """Checks that a flavor of the queue has a topology with the placement's levels, and that one will be assigned."""
    wanted = ctx.job.placement
    if wanted is None or cluster.topologies is None:
        return
    groups = cluster.cluster_queue.get("spec", {}).get("resourceGroups", ())
    counted = {resource for group in groups for resource in group["coveredResources"]}
    if counted and counted.isdisjoint({*to_plain(node_limits(ctx)), "pods"}):  # Kueue counts pods without a request
        what = f"the job has a `placement` and requests nothing that queue {ctx.queue} has a quota for"
        remedy = "Set `resources` (`cpu: 1` is enough), or `gpus_per_node`, or leave `placement` out."
        seen = f"quotas: {', '.join(sorted(counted))}; a LimitRange may add requests"
        warning = cluster_finding(
            "placement-needs-requests", "placement", what, remedy, seen, severity=Severity.WARNING
        )
        yield msgspec.structs.replace(warning, owner=Owner.USER)
    levels = [wanted.level, *([wanted.slices.level] if wanted.slices else [])]
    labels = [ctx.topology_label(level) for level in levels]
    if any([label for label in known if label in labels] == labels for known in cluster.topologies.values()):
        return
    order = " with, within it, ".join(f"`{label}`" for label in labels)
    what = f"no flavor of queue {ctx.queue} has a topology with the level {order}"
    remedy = "Name a level of the queue's topology, or have the ResourceFlavor given one (`topologyName`)."
    seen = [f"flavor {name}: {', '.join(known) or 'no topology'}" for name, known in cluster.topologies.items()]
    yield cluster_finding("placement-level-missing", "placement.level", what, remedy, *seen)


def tiers(ctx: RenderContext, cluster: ClusterInventory) -> Iterator[Finding]:
    """Checks that Volcano's HyperNodes have a tier of the placement's name: without one it places nodes anywhere."""
    wanted = ctx.job.placement
    if wanted is None or cluster.tiers is None or ctx.topology_label(wanted.level) in cluster.tiers:
        return
    what = f"no HyperNode of Volcano is of a tier named `{ctx.topology_label(wanted.level)}`"
    remedy = "Name another level, or have HyperNodes made with this `tierName`, for example by Volcano from labels."
    seen = f"tiers: {', '.join(sorted(cluster.tiers)) or 'none'}"
    yield cluster_finding("placement-level-missing", "placement.level", what, remedy, seen)


def quota(ctx: RenderContext, cluster: ClusterInventory) -> Iterator[Finding]:
    """Checks that all nodes fit into the empty queue's quota, unless it may borrow from a cohort."""
    spec = cluster.cluster_queue.get("spec", {})
    if spec.get("cohortName"):
        return
    most: dict[str, float] = {}
    for flavor in (flavor for group in spec.get("resourceGroups", ()) for flavor in group["flavors"]):
        for resource in flavor["resources"]:
            there = parse_quantity(str(resource["nominalQuota"]))
            most[resource["name"]] = max(there, most.get(resource["name"], 0.0))
    nodes = ctx.job.nodes.max
    for resource, each in to_plain(node_limits(ctx)).items():
        if resource in most and parse_quantity(str(each)) * nodes > most[resource]:
            what = f"it can never fit: {nodes} nodes ask for {each} of {resource} each, and no flavor has that much"
            seen = f"ClusterQueue {object_name(cluster.cluster_queue)} has at most {most[resource]:g}"
            yield cluster_finding("quota-too-small", "queue", what, "Ask for less, or have the quota raised.", seen)


def namespace_quota(ctx: RenderContext, cluster: ClusterInventory) -> Iterator[Finding]:
    """Checks that the minimum number of nodes fits into the empty namespace's quota."""
    nodes = ctx.job.nodes.min
    asks = {"pods": float(nodes + ctx.target.agent)}
    requested, limited = (
        parse_quantities(amounts(ctx)) if ctx.target.agent else {}
        for amounts in (controller_objects.requests, controller_objects.limits)
    )
    for resource, each in parse_quantities(node_limits(ctx)).items():
        needed = each * nodes
        least, most = needed + requested.get(resource, 0.0), needed + limited.get(resource, 0.0)
        asks |= {resource: least, f"requests.{resource}": least, f"limits.{resource}": most}
    there = ctx.target.namespace
    for found in cluster.resource_quotas:
        if found["spec"].get("scopes") or found["spec"].get("scopeSelector"):
            continue  # applies only to some pods
        hard = found["spec"].get("hard", {})
        for resource in sorted(hard.keys() & asks.keys()):
            if asks[resource] > parse_quantity(str(hard[resource])):
                what = f"it can never fit: it asks for {asks[resource]:g} of {resource} in namespace {there}"
                seen = f"ResourceQuota {object_name(found)} allows {hard[resource]}"
                yield cluster_finding(
                    "quota-too-small", "namespace", what, "Ask for less, or have the quota raised.", seen
                )
