"""Checks whether a cluster has what a run needs, with one function per rule.

Pure. collect_inventory.py reads the cluster; rules that do not depend on it are in job_checks.py.
The file is long because it is the single list of rules about a cluster.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from holdfast.findings import Finding, Owner, Severity
from holdfast.job.quarantine import QuarantineRow
from holdfast.job.quarantine_text import avoided_finding
from holdfast.job.targets import GangScheduler, Toleration, Workload
from holdfast.launch.kubernetes.client.api_errors import REJECTION_RULES
from holdfast.launch.kubernetes.client.api_paths import KubeObject, collection_path
from holdfast.launch.kubernetes.client.message_rules import match_rule
from holdfast.launch.kubernetes.manifests import controller_objects, pod_group
from holdfast.launch.kubernetes.manifests.pod_template import node_limits
from holdfast.launch.kubernetes.manifests.quantities import format_quantity
from holdfast.launch.kubernetes.manifests.render_context import RenderContext
from holdfast.launch.kubernetes.manifests.run_manifests import render
from holdfast.launch.kubernetes.manifests.yaml_writer import YamlValue, to_plain
from holdfast.launch.kubernetes.pending_reason import dispatch_rules
from holdfast.launch.kubernetes.preflight import (
    gateway_checks,
    gpu_sharing,
    node_affinity,
    pod_checks,
    pod_patch_checks,
)
from holdfast.launch.kubernetes.preflight.pull_secrets import covers, images
from holdfast.launch.kubernetes.preflight.referenced_objects import ReferencedObject
from holdfast.launch.kubernetes.storage_catalog import StorageKind, class_of, find_driver, shared_driver
from holdfast.launch.kubernetes.workload_catalog import CATALOG

KUEUE = "kueue.x-k8s.io"
KUEUE_VERSION = "v1beta2"

NOT_READABLE: KubeObject = {}
"""Placeholder for an object that this user may not read."""


@dataclass(frozen=True, kw_only=True)
class ClusterInventory:
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
        yield _finding(
            "namespace-missing", "namespace", f"there is no namespace {name}", f"kubectl create namespace {name}"
        )
    elif ends := cluster.namespace.get("metadata", {}).get("deletionTimestamp"):
        what = f"namespace {name} is being deleted"
        yield _finding(
            "namespace-terminating", "namespace", what, "Use another `namespace`.", f"deletionTimestamp: {ends}"
        )


class OperatorKind(NamedTuple):
    """A kind of object that an operator brings."""

    group: str
    version: str
    resource: str
    field: str
    """The field of the target because of which a run needs it."""
    remedy: str = "Install its operator"
    """What else than changing that field helps."""


_GANG_REMEDIES = {
    GangScheduler.KUBERNETES: "Have Kubernetes 1.37 or later serve it with the feature gate GenericWorkload",
    GangScheduler.VOLCANO: "Install Volcano",
}
POD_GROUPS: Mapping[GangScheduler, OperatorKind] = {
    scheduler: OperatorKind(*pod_group.GROUPS[scheduler], "podgroups", "pod_group", remedy)
    for scheduler, remedy in _GANG_REMEDIES.items()
}
HYPERNODES = OperatorKind("topology.volcano.sh", "v1alpha1", "hypernodes", "placement", "Install Volcano 1.14 or later")
PODMONITORS = OperatorKind("monitoring.coreos.com", "v1", "podmonitors", "pod_monitor")
TLS_ROUTES = OperatorKind(
    controller_objects.GATEWAY_GROUP,
    controller_objects.GATEWAY_VERSION,
    "tlsroutes",
    "controller.gateway",
    "Install Gateway API 1.5 or later, and a controller for it",
)


def operator_kinds(ctx: RenderContext) -> list[OperatorKind]:
    """The kinds that a run needs besides Kubernetes' own."""
    kind = CATALOG[ctx.workload]
    gateway = ctx.target.controller.gateway if ctx.target.agent else None
    return [
        OperatorKind(kind.group, kind.version, kind.resource, "workload"),
        *([OperatorKind(KUEUE, KUEUE_VERSION, "localqueues", "queue")] if ctx.queue else ()),
        *([POD_GROUPS[ctx.target.pod_group]] if ctx.target.pod_group else ()),
        *([HYPERNODES] if ctx.placed_by_volcano else ()),
        *([PODMONITORS] if ctx.target.pod_monitor else ()),
        *([TLS_ROUTES] if gateway else ()),
    ]


def operators(ctx: RenderContext, cluster: ClusterInventory) -> Iterator[Finding]:
    """Checks that the operator of the run's object is installed, runs, and serves the API version used."""
    for kind in operator_kinds(ctx):
        served = cluster.served.get((kind.group, kind.resource), frozenset())
        if not served:
            what = f"the cluster does not know {kind.resource} ({kind.group})"
            yield _finding("operator-missing", kind.field, what, f"{kind.remedy}, or change `{kind.field}`.")
        elif kind.version not in served:
            known = ", ".join(sorted(served))
            what = f"{kind.resource} are served as {known}, and the manifests are written for {kind.version}"
            yield _finding("operator-version", kind.field, what, "Install a version of the operator that serves it.")
    for deployment in cluster.operators:
        ready = deployment.get("status", {}).get("readyReplicas", 0)
        if ready == 0:
            name = f"{deployment['metadata']['namespace']}/{deployment['metadata']['name']}"
            what = f"{name} does not run"
            yield _finding("operator-down", name, what, f"kubectl describe deployment -n {name.replace('/', ' ')}")


def queue(ctx: RenderContext, cluster: ClusterInventory) -> Iterator[Finding]:
    """Checks that the queue exists, is open and accepts this kind of object; or that Kueue requires no queue."""
    if not ctx.queue and cluster.suspended_by_kueue:
        what = "Kueue here holds back whatever is in no queue, so the run would stay suspended for ever"
        remedy = "Name a `queue` in the target: `kubectl get localqueues` lists those there are."
        seen = "made for a dry run, it was suspended: manageJobsWithoutQueueName in Kueue's configuration"
        yield _finding("queue-required", "queue", what, remedy, seen)
    if not ctx.queue or not cluster.served.get((KUEUE, "localqueues")):
        return
    if cluster.local_queue is None:
        what = f"there is no queue {ctx.queue} in namespace {ctx.target.namespace}"
        yield _finding("queue-missing", "queue", what, "`kubectl get localqueues -A` lists those there are.")
    else:
        for condition in cluster.local_queue.get("status", {}).get("conditions", ()):
            if condition["type"] == "Active" and condition["status"] != "True":
                what = f"queue {ctx.queue} is closed"
                yield _finding(
                    "queue-closed", "queue", what, "`kubectl describe clusterqueue` says why.", condition["message"]
                )
    if cluster.suspended_by_kueue is False:
        framework = CATALOG[ctx.workload].kueue_framework
        what = f"Kueue's integration with {framework} is off, so the run would stay suspended for ever"
        remedy = f"Add {framework} to integrations.frameworks in Kueue's configuration."
        seen = "made for a dry run with `suspend: false`, it was not held back"
        yield _finding("kueue-integration-disabled", "queue", what, remedy, seen)


def multikueue(ctx: RenderContext, cluster: ClusterInventory) -> Iterator[Finding]:
    """Checks that the target has a context for each cluster to which the queue sends runs, and Kueue a connection."""
    clusters, contexts, where = cluster.dispatch_clusters, ctx.target.multikueue, pod_checks.MULTIKUEUE
    if clusters is None:
        return
    if contexts and not clusters:
        what = f"queue {ctx.queue} sends runs to no other cluster, so this one would wait for ever"
        remedy = "Remove `multikueue`, or have an AdmissionCheck of MultiKueue added to the queue's ClusterQueue."
        yield _finding("multikueue-not-configured", where, what, remedy)
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
        warning = _finding("placement-needs-requests", "placement", what, remedy, seen, severity=Severity.WARNING)
        yield msgspec.structs.replace(warning, owner=Owner.USER)
    levels = [wanted.level, *([wanted.slices.level] if wanted.slices else [])]
    labels = [ctx.topology_label(level) for level in levels]
    if any([label for label in known if label in labels] == labels for known in cluster.topologies.values()):
        return
    order = " with, within it, ".join(f"`{label}`" for label in labels)
    what = f"no flavor of queue {ctx.queue} has a topology with the level {order}"
    remedy = "Name a level of the queue's topology, or have the ResourceFlavor given one (`topologyName`)."
    seen = [f"flavor {name}: {', '.join(known) or 'no topology'}" for name, known in cluster.topologies.items()]
    yield _finding("placement-level-missing", "placement.level", what, remedy, *seen)


def tiers(ctx: RenderContext, cluster: ClusterInventory) -> Iterator[Finding]:
    """Checks that Volcano's HyperNodes have a tier of the placement's name: without one it places nodes anywhere."""
    wanted = ctx.job.placement
    if wanted is None or cluster.tiers is None or ctx.topology_label(wanted.level) in cluster.tiers:
        return
    what = f"no HyperNode of Volcano is of a tier named `{ctx.topology_label(wanted.level)}`"
    remedy = "Name another level, or have HyperNodes made with this `tierName`, for example by Volcano from labels."
    seen = f"tiers: {', '.join(sorted(cluster.tiers)) or 'none'}"
    yield _finding("placement-level-missing", "placement.level", what, remedy, seen)


def quota(ctx: RenderContext, cluster: ClusterInventory) -> Iterator[Finding]:
    """Checks that all nodes fit into the empty queue's quota, including what it may borrow from its cohort."""
    queue = cluster.cluster_queue.get("spec", {})
    if queue.get("cohortName"):
        return
    most: dict[str, float] = {}
    for flavor in (flavor for group in queue.get("resourceGroups", ()) for flavor in group["flavors"]):
        for resource in flavor["resources"]:
            there = _parse_quantity(str(resource["nominalQuota"]))
            most[resource["name"]] = max(there, most.get(resource["name"], 0.0))
    asks: Mapping[str, Any] = to_plain(node_limits(ctx))
    for resource, each in asks.items():
        needed, nodes = _parse_quantity(str(each)) * ctx.job.nodes.max, ctx.job.nodes.max
        if needed > most.get(resource, needed):
            what = f"it can never fit: {nodes} nodes ask for {each} of {resource} each, and no flavor has that much"
            seen = f"ClusterQueue {cluster.cluster_queue['metadata']['name']} has at most {most[resource]:g}"
            yield _finding("quota-too-small", "queue", what, "Ask for less, or have the quota raised.", seen)


def namespace_quota(ctx: RenderContext, cluster: ClusterInventory) -> Iterator[Finding]:
    """Checks that the minimum number of nodes fits into the empty namespace's quota."""
    nodes = ctx.job.nodes.min
    asks = {"pods": float(nodes + ctx.target.agent)}
    requested, limited = _controller_amounts(ctx), _controller_amounts(ctx, controller_objects.limits)
    for resource, each in to_plain(node_limits(ctx)).items():
        needed = _parse_quantity(str(each)) * nodes
        least, most = needed + requested.get(resource, 0.0), needed + limited.get(resource, 0.0)
        asks |= {resource: least, f"requests.{resource}": least, f"limits.{resource}": most}
    there = ctx.target.namespace
    for quota in cluster.resource_quotas:
        if quota["spec"].get("scopes") or quota["spec"].get("scopeSelector"):
            continue  # applies only to some pods
        name, hard = quota["metadata"]["name"], quota["spec"].get("hard", {})
        for resource in hard.keys() & asks.keys():
            if asks[resource] > _parse_quantity(str(hard[resource])):
                what = f"it can never fit: it asks for {asks[resource]:g} of {resource} in namespace {there}"
                seen = f"ResourceQuota {name} allows {hard[resource]}"
                yield _finding("quota-too-small", "namespace", what, "Ask for less, or have the quota raised.", seen)


def permission(ctx: RenderContext, cluster: ClusterInventory) -> Iterator[Finding]:
    """Checks that this user may create everything the run needs."""
    if cluster.denied:
        what = f"this user may not do what a run in namespace {ctx.target.namespace} takes"
        remedy = "Have a role bound that allows it, or use another `context` or `namespace`."
        if any("rbac.authorization.k8s.io" in each for each in cluster.denied):
            remedy += " With a ready-made account, named as `service_account` in the target, no Role is created."
        yield _finding("not-permitted", "namespace", what, remedy, *cluster.denied)


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
        # Quota in use now may be free later; see namespace_quota.
        waits = where == "pods" and finding.code == "quota-exceeded"
        yield msgspec.structs.replace(finding, severity=Severity.WARNING) if waits else finding
    yield from unknown


def nodes(ctx: RenderContext, cluster: ClusterInventory) -> Iterator[Finding]:
    """Checks that machines offer what a node of the job requests."""
    if cluster.nodes is None:
        return
    asks: Mapping[str, Any] = to_plain(node_limits(ctx))
    target = ctx.target
    avoided = {row.machine for row in cluster.quarantined}
    affinity = node_affinity.of_patch(target.pod.patch)
    allowed = [
        node
        for node in cluster.nodes
        if _is_schedulable(node, target.node_selector, target.tolerations) and node_affinity.admits(affinity, node)
    ]
    where = node_affinity.of_volume(cluster.volume) or node_affinity.of_class(_class_to_use(ctx, cluster) or {})
    selected = [node for node in allowed if _name(node) not in avoided]
    chosen = [node for node in selected if node_affinity.admits(where, node)]
    if selected and not chosen:
        what = "no machine that the target selects can mount its volume, which is elsewhere"
        remedy = "Select machines there by `node_selector`, or use a claim whose volume is where the machines are."
        seen = (f"the volume is in {node_affinity.text(where)}", *node_affinity.places(where, selected))
        yield _finding("volume-elsewhere", "volume", what, remedy, *seen)
        return
    if not chosen:
        what = "no machine has the target's labels and no other taints than it tolerates"
        yield _finding("no-machines", "node_selector", what, "Compare with `kubectl describe nodes`.")
        return
    devices = {name: amount for name, amount in asks.items() if name not in {"cpu", "memory"}}
    missing = [name for name in devices if not any(_allocatable(node, name) for node in chosen)]
    for resource in missing:
        what = f"no machine offers {resource}, of which a node of the job asks for {devices[resource]}"
        remedy = "Its device plugin is not installed or not healthy, or goes by another name in the target."
        if resource.startswith("hugepages-"):
            remedy = "Have the machines reserve huge pages at boot (kernel parameters), and restart their kubelets."
        yield _finding("device-missing", resource, what, remedy, f"machines looked at: {len(chosen)}")
    if missing:
        return
    yield from gpu_sharing.by_label(ctx, chosen)
    needs = {name: _parse_quantity(str(amount)) for name, amount in asks.items()}
    wanted = ctx.job.nodes.max
    most = 1 if ctx.pod_access.host_network else wanted
    room = {_name(node): _pods_that_fit(node, needs, most) for node in chosen}
    if sum(room.values()) < wanted:
        fitting = sum(map(bool, room.values()))
        what = f"{fitting} machines are large enough for a node of the job: {sum(room.values())} of its {wanted} fit"
        remedy = "Ask for less on each node, or for fewer nodes; an autoscaler may add machines."
        amounts = ", ".join(f"{name}: {amount}" for name, amount in asks.items())
        yield _finding("too-few-machines", "nodes", what, remedy, amounts, severity=Severity.WARNING)
    elif target.agent:
        yield from _controller_machine(ctx, cluster.nodes, needs, most, room)


def _controller_machine(
    ctx: RenderContext, machines: Sequence[KubeObject], needs: Mapping[str, float], most: int, room: Mapping[str, int]
) -> Iterator[Finding]:
    """Checks that a machine fits the controller's pod, and that the pod takes no machine that a node needs fully."""
    own, its = ctx.target.controller, _controller_amounts(ctx)
    hosts = [node for node in machines if _is_schedulable(node, own.node_selector, own.tolerations)]
    hosts = [node for node in hosts if _pods_that_fit(node, its, 1)]
    wanted, everywhere = ctx.job.nodes.max, sum(room.values())
    asks = ", ".join(f"{name}: {amount}" for name, amount in to_plain(controller_objects.requests(ctx)).items())
    if not hosts:
        what = "no machine takes the controller's pod: its labels and taints are not the target's, but `controller`'s"
        remedy = "Set `controller.node_selector` and `controller.tolerations` in the target to those of some machine."
        yield _finding("no-machines", "controller", what, remedy, f"it asks for {asks}")
        return
    room_left = {
        _name(node): everywhere
        - room.get(_name(node), 0)
        + min(room.get(_name(node), 0), _pods_that_fit(node, needs, most, its))
        for node in hosts
    }
    taken = [name for name, left in room_left.items() if left < wanted]
    if taken:
        always = len(taken) == len(room_left)
        takes, left = "takes" if always else "may take", f"room for {room_left[taken[0]]} of {wanted} nodes"
        what = f"the controller's pod {takes} the room of a node: on {taken[0]} it leaves {left}"
        remedy = (
            "Add a machine for it, or ask for less on each node."
            if always
            else "Set `controller.node_selector` in the target to a machine that no node needs whole."
        )
        seen = (f"it asks for {asks}", f"{len(taken)} of the {len(room_left)} machines that it may run on")
        yield _finding("controller-pod-blocks-node", "controller", what, remedy, *seen, severity=Severity.WARNING)


def storage(ctx: RenderContext, cluster: ClusterInventory) -> Iterator[Finding]:
    """Checks that the volume's claim exists or can be created, and is shared (ReadWriteMany)."""
    volume = ctx.target.volume
    if volume is None:
        return
    if cluster.claim is None:
        if volume.size is None:
            what = f"there is no claim {volume.claim} in namespace {ctx.target.namespace}"
            yield _finding("claim-missing", "volume", what, "Make it, or give `volume.size` to have it made.")
            return
        known = cluster.storage_classes
        if volume.storage_class and known is not None and class_of(known, volume.storage_class) is None:
            what = f"there is no storage class {volume.storage_class}"
            seen = f"there are: {', '.join(sorted(map(_name, known)))}"
            yield _finding("storage-class-missing", "volume", what, "Name one that is there.", seen)
        return
    modes = cluster.claim.get("spec", {}).get("accessModes", [])
    if cluster.claim is not NOT_READABLE and ctx.job.nodes.max > 1 and "ReadWriteMany" not in modes:
        what = f"claim {volume.claim} can be mounted on one machine only"
        remedy = "Use a claim whose access mode is ReadWriteMany."
        yield _finding("claim-not-shared", "volume", what, remedy, f"accessModes: {', '.join(modes)}")


def storage_driver(ctx: RenderContext, cluster: ClusterInventory) -> Iterator[Finding]:
    """Checks that the driver of the volume, or of the class that will make one, suits all nodes and is installed."""
    chosen = _class_to_use(ctx, cluster)
    name = chosen["provisioner"] if chosen else cluster.volume.get("spec", {}).get("csi", {}).get("driver")
    driver = find_driver(name) if name else None
    if ctx.target.volume is None or driver is None:
        return
    shared = cluster.claim is None or "ReadWriteMany" in cluster.claim["spec"].get("accessModes", ())
    if driver.kind is not StorageKind.FILES and ctx.job.nodes.max > 1 and shared:
        makes = f"storage class {_name(chosen)} makes" if chosen else f"claim {ctx.target.volume.claim} has"
        what = f"{makes} a volume of {driver.name}: {driver.kind.meaning}"
        fit = [_name(each) for each in cluster.storage_classes or () if shared_driver(each)]
        seen = [f"classes for many machines here: {', '.join(fit) or 'none that holdfast knows'}"] if chosen else []
        remedy = "Use a claim or a `storage_class` of a file system that many machines mount for writing."
        yield _finding("storage-not-shared", "volume", what, remedy, *seen)
    if chosen is None:
        return
    needed = driver.csi_driver_of(chosen)
    if needed and cluster.csi_drivers is not None and needed not in cluster.csi_drivers:
        what = f"there is no CSIDriver {needed}, which makes and mounts the volumes of class {_name(chosen)}"
        remedy = "Have the driver installed, or name another `storage_class`."
        yield _finding("storage-driver-missing", "volume", what, remedy, f"driver: {driver.source}")
    size, least = ctx.target.volume.size, driver.smallest_of(chosen)
    if cluster.claim is None and size is not None and size < least:
        smallest = format_quantity(least)
        what = f"the smallest volume of storage class {_name(chosen)} ({driver.name}) has {smallest}"
        remedy = f"Write `size: {smallest}B` or more: the driver makes a volume of this size, or refuses the claim."
        yield _finding("claim-too-small", "volume.size", what, remedy, driver.source, severity=Severity.WARNING)


def _class_to_use(ctx: RenderContext, cluster: ClusterInventory) -> KubeObject | None:
    """The StorageClass that will make the volume; None if there is a volume, or the class is not known."""
    volume, claim = ctx.target.volume, cluster.claim
    if volume is None or cluster.storage_classes is None or claim is NOT_READABLE:
        return None
    if claim is None:
        return class_of(cluster.storage_classes, volume.storage_class) if volume.size else None
    spec = claim["spec"]
    return None if "volumeName" in spec else class_of(cluster.storage_classes, spec.get("storageClassName"))


def names(ctx: RenderContext, cluster: ClusterInventory) -> Iterator[Finding]:
    """Checks objects that pods refer to: the API server accepts a pod without them, but the pod never starts."""
    wanted = ctx.target.priority_class
    known = cluster.priority_classes
    if wanted is not None and known is not None and wanted not in known:
        what = f"there is no priority class {wanted}, and without it no pod is made"
        yield _finding("referenced-object-missing", "priority_class", what, "`kubectl get priorityclasses` lists them.")
    priority, in_queues = ctx.job.priority, cluster.queue_priorities
    if priority is not None and ctx.queue and in_queues is not None and priority not in in_queues:
        what = f"there is no WorkloadPriorityClass {priority}, and without it the queue does not admit the run"
        remedy = "`kubectl get workloadpriorityclasses` lists them."
        yield _finding("referenced-object-missing", "priority", what, remedy)
    for each in cluster.missing_references:
        scope = f" in namespace {ctx.target.namespace}" if "{namespace}" in each.path else ""
        what = f"there is no {each.kind} {each.name}{scope}"
        yield _finding("referenced-object-missing", each.where, what, each.remedy)


def image_pull(ctx: RenderContext, cluster: ClusterInventory) -> Iterator[Finding]:
    """Warns of image pull secrets that the kubelet uses for none of the run's images."""
    for name, registries in cluster.pull_secrets.items():
        used = tuple(images(ctx))
        if registries is None:
            what = f"Secret {name} holds no credentials for a registry, so the kubelet ignores it"
        elif any(covers(registry, image) for registry in registries for image in used):
            continue
        else:
            what = f"Secret {name} has no credentials for {' and '.join(used)}"
        evidence = [f"it has credentials for: {', '.join(registries)}"] if registries else []
        remedy = "Make one for the images' registry: `kubectl create secret docker-registry --docker-server=REGISTRY`."
        yield _finding("pull-secret-unused", "image_pull_secrets", what, remedy, *evidence, severity=Severity.WARNING)


def fabric(_: RenderContext, cluster: ClusterInventory) -> Iterator[Finding]:
    """Checks that the cluster has what attaches the fabric to pods: networks, device classes, daemons."""
    for each in cluster.missing_prerequisites:
        yield _finding("fabric-prerequisite-missing", each.where, f"there is no {each.kind} {each.name}", each.remedy)


def gateway(ctx: RenderContext, cluster: ClusterInventory) -> Iterator[Finding]:
    """Checks that the Gateway exists, works, and passes the TLS connections of this namespace's runs through."""
    wanted = ctx.target.controller.gateway
    if wanted is None or cluster.gateway is NOT_READABLE or not cluster.served.get((TLS_ROUTES.group, "tlsroutes")):
        return
    field, where = "controller.gateway", f"Gateway {wanted.namespace or ctx.target.namespace}/{wanted.name}"
    if cluster.gateway is None:
        remedy = "`kubectl get gateways -A` lists those there are."
        yield _finding("referenced-object-missing", field, f"there is no {where}", remedy)
        return
    if reason := gateway_checks.why_not_programmed(cluster.gateway):
        remedy = f"`kubectl describe gateway {wanted.name}`; the controller of its GatewayClass may not run."
        yield _finding("gateway-not-ready", field, f"{where} is not programmed", remedy, reason)
    if reasons := gateway_checks.why_no_listener(cluster.gateway, wanted, ctx.target.namespace):
        what = f"no listener of {where} passes TLS to RUN.{wanted.host} through to namespace {ctx.target.namespace}"
        remedy = (
            f'Have one added: `protocol: TLS`, `tls: {{mode: Passthrough}}`, `hostname: "*.{wanted.host}"`, and '
            f"`allowedRoutes` that admit the namespace."
        )
        yield _finding("gateway-no-listener", field, what, remedy, *reasons)


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
        yield _finding("not-checked", "context", what, remedy, *cluster.not_readable, severity=Severity.INFO)


CHECKS: tuple[ClusterCheck, ...] = (
    operators,
    queue,
    multikueue,
    placement,
    tiers,
    quota,
    namespace_quota,
    permission,
    dry_run,
    nodes,
    storage,
    storage_driver,
    names,
    image_pull,
    fabric,
    gateway,
    quarantined,
    not_readable,
)


MANAGER_CHECKS: tuple[ClusterCheck, ...] = (
    operators,
    queue,
    multikueue,
    quota,
    permission,
    dry_run,
    names,
    not_readable,
)
"""Those of a cluster from which MultiKueue sends runs to others, and that has no pod of them."""


@dataclass(frozen=True, kw_only=True)
class Permission:
    """A permission in the namespace that starting and following a run needs."""

    verb: str
    group: str
    resource: str
    subresource: str = ""

    def __str__(self) -> str:
        resource = f"{self.resource}/{self.subresource}" if self.subresource else self.resource
        return f"{self.verb} {resource}.{self.group}".rstrip(".")


def required_permissions(ctx: RenderContext) -> tuple[Permission, ...]:
    """Permissions that starting a run needs: create, read and delete its objects, and access its pods."""
    paths = [collection_path(each).split("/") for each in render(ctx).objects]
    made = dict.fromkeys((words[2] if words[1] == "apis" else "", words[-1]) for words in paths)
    kind = CATALOG[ctx.workload]
    runtime = [Permission(verb="patch", group=kind.group, resource="trainingruntimes")]
    return (
        *(Permission(verb="create", group=group, resource=resource) for group, resource in made),
        *(Permission(verb=verb, group=kind.group, resource=kind.resource) for verb in ("get", "delete")),
        *(Permission(verb=verb, group="", resource="pods", subresource=into) for verb, into in _pod_access_verbs(ctx)),
        *(Permission(verb="list", group=group, resource=resource) for group, resource in made if ctx.target.multikueue),
        Permission(verb="list", group="", resource="events"),
        *(runtime if ctx.workload is Workload.TRAINJOB else ()),
        *([Permission(verb="list", group=KUEUE, resource="workloads")] if ctx.queue else ()),
    )


def _pod_access_verbs(ctx: RenderContext) -> tuple[tuple[str, str], ...]:
    """Pod permissions, with the subresource: to list pods, and to forward the port of the controller's pod.

    For a run without a controller or a volume, to read pod logs; none where MultiKueue sends the pods elsewhere.
    """
    ask, read = (("list", ""), ("get", "portforward"), ("create", "portforward")), ("get", "log")
    if ctx.target.multikueue:
        return ()
    if not ctx.target.agent:
        return ("list", ""), read
    if ctx.target.controller.gateway is not None:
        ask = (("list", ""),)
    return ask if ctx.accepted.durable_controller_disk else (*ask, read)


def _controller_amounts(
    ctx: RenderContext, amounts: Callable[[RenderContext], Mapping[str, YamlValue]] = controller_objects.requests
) -> Mapping[str, float]:
    """Requests or limits of the controller's pod; empty if there is none."""
    if not ctx.target.agent:
        return {}
    return {name: _parse_quantity(str(amount)) for name, amount in to_plain(amounts(ctx)).items()}


def _is_schedulable(node: KubeObject, selector: Mapping[str, str], tolerated: Sequence[Toleration]) -> bool:
    """Whether the scheduler would consider a machine."""
    labels = node["metadata"].get("labels", {})
    spec = node.get("spec", {})
    if spec.get("unschedulable") or any(labels.get(key) != value for key, value in selector.items()):
        return False
    taints = [taint for taint in spec.get("taints", ()) if taint["effect"] != "PreferNoSchedule"]
    return all(any(_tolerates(each, taint) for each in tolerated) for taint in taints)


def _tolerates(toleration: Any, taint: Mapping[str, str]) -> bool:
    return (
        toleration.key == taint["key"]
        and toleration.value in (None, taint.get("value", ""))
        and toleration.effect in (None, taint["effect"])
    )


def _pods_that_fit(
    node: KubeObject, needs: Mapping[str, float], most: int, used: Mapping[str, float] | None = None
) -> int:
    """How many pods with these needs fit on a machine where only `used` is taken, up to `most`."""
    taken = used or {}
    fits = ((_allocatable(node, name) - taken.get(name, 0.0)) / amount for name, amount in needs.items() if amount)
    return max(0, min((most, *(math.floor(times + _ROUNDING) for times in fits))))


def _name(node: KubeObject) -> str:
    return str(node["metadata"]["name"])


_ROUNDING = 1e-9
"""Tolerance for the quotient of two quantities."""


def _allocatable(node: KubeObject, resource: str) -> float:
    return _parse_quantity(str(node.get("status", {}).get("allocatable", {}).get(resource, "0")))


_UNITS: Mapping[str, float] = {
    "": 1.0,
    "m": 1e-3,
    "k": 1e3,
    "M": 1e6,
    "G": 1e9,
    "T": 1e12,
    "P": 1e15,
    **{f"{unit}i": 1024.0**power for power, unit in enumerate("KMGTP", 1)},
}


def _parse_quantity(quantity: str) -> float:
    """Parse a Kubernetes quantity: `500m`, `64Gi`, `8`."""
    found = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)([a-zA-Z]*)", quantity)
    return float(found[1]) * _UNITS.get(found[2], 1.0) if found else 0.0


def _finding(
    code: str, where: str, what: str, remedy: str, *evidence: str, severity: Severity = Severity.ERROR
) -> Finding:
    return Finding(
        code=code,
        severity=severity,
        what=what,
        where=where,
        evidence=evidence,
        remedy=remedy,
        owner=Owner.CLUSTER,
    )
