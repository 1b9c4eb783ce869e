"""Checks whether a cluster's machines offer what the nodes of a job and the controller's pod request."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from holdfast.findings import Finding, Severity
from holdfast.job.targets import Toleration
from holdfast.launch.kubernetes.client.api_paths import KubeObject, object_name
from holdfast.launch.kubernetes.manifests import controller_objects
from holdfast.launch.kubernetes.manifests.pod_template import node_limits
from holdfast.launch.kubernetes.manifests.quantities import parse_quantities, parse_quantity
from holdfast.launch.kubernetes.manifests.render_context import RenderContext
from holdfast.launch.kubernetes.manifests.yaml_writer import YamlValue, to_plain
from holdfast.launch.kubernetes.preflight import gpu_sharing, node_affinity, storage_checks
from holdfast.launch.kubernetes.preflight.cluster_finding import cluster_finding
from holdfast.launch.kubernetes.preflight.cluster_inventory import ClusterInventory

_ROUNDING = 1e-9
"""Tolerance for the quotient of two quantities."""


def machines(ctx: RenderContext, cluster: ClusterInventory) -> Iterator[Finding]:
    """Checks that there are machines for the run: selected by the target, with access to its volume, large enough."""
    if cluster.nodes is None:
        return
    selected = _selected(ctx, cluster, cluster.nodes)
    where = storage_checks.volume_terms(ctx, cluster)
    chosen = [node for node in selected if node_affinity.admits(where, node)]
    if not selected:
        what = "no machine has the target's labels and no other taints than it tolerates"
        yield cluster_finding("no-machines", "node_selector", what, "Compare with `kubectl describe nodes`.")
    elif not chosen:
        what = "no machine that the target selects can mount its volume, which is elsewhere"
        remedy = "Select machines there by `node_selector`, or use a claim whose volume is where the machines are."
        seen = (f"the volume is in {node_affinity.text(where)}", *node_affinity.places(where, selected))
        yield cluster_finding("volume-elsewhere", "volume", what, remedy, *seen)
    elif missing := tuple(_missing_devices(ctx, chosen)):
        yield from missing
    else:
        yield from gpu_sharing.by_label(ctx, chosen)
        yield from _room(ctx, cluster.nodes, chosen)


def _selected(ctx: RenderContext, cluster: ClusterInventory, nodes: Sequence[KubeObject]) -> list[KubeObject]:
    """The machines on which the target lets nodes of the job run."""
    target = ctx.target
    affinity = node_affinity.of_patch(target.pod.patch)
    avoided = {row.machine for row in cluster.quarantined}
    return [
        node
        for node in nodes
        if _is_schedulable(node, target.node_selector, target.tolerations)
        and node_affinity.admits(affinity, node)
        and object_name(node) not in avoided
    ]


def _missing_devices(ctx: RenderContext, chosen: Sequence[KubeObject]) -> Iterator[Finding]:
    """Devices and other resources of a node that none of these machines offers."""
    for resource, amount in to_plain(node_limits(ctx)).items():
        if resource in {"cpu", "memory"} or any(_allocatable(node, resource) for node in chosen):
            continue
        what = f"no machine offers {resource}, of which a node of the job asks for {amount}"
        remedy = "Its device plugin is not installed or not healthy, or goes by another name in the target."
        if resource.startswith("hugepages-"):
            remedy = "Have the machines reserve huge pages at boot (kernel parameters), and restart their kubelets."
        yield cluster_finding("device-missing", resource, what, remedy, f"machines looked at: {len(chosen)}")


def _room(ctx: RenderContext, every: Sequence[KubeObject], chosen: Sequence[KubeObject]) -> Iterator[Finding]:
    """Checks that these machines fit all nodes of the job, and any machine the controller's pod."""
    limits, wanted = node_limits(ctx), ctx.job.nodes.max
    needs = parse_quantities(limits)
    most = 1 if ctx.pod_access.host_network else wanted
    room = {object_name(node): _pods_that_fit(node, needs, most) for node in chosen}
    if sum(room.values()) < wanted:
        fitting = sum(map(bool, room.values()))
        what = f"{fitting} machines are large enough for a node of the job: {sum(room.values())} of its {wanted} fit"
        remedy = "Ask for less on each node, or for fewer nodes; an autoscaler may add machines."
        yield cluster_finding("too-few-machines", "nodes", what, remedy, _text(limits), severity=Severity.WARNING)
    elif ctx.target.agent:
        yield from _controller_machine(ctx, every, needs, most, room)


def _controller_machine(
    ctx: RenderContext, every: Sequence[KubeObject], needs: Mapping[str, float], most: int, room: Mapping[str, int]
) -> Iterator[Finding]:
    """Checks that a machine fits the controller's pod, and that the pod takes no machine that a node needs fully."""
    own, requests = ctx.target.controller, controller_objects.requests(ctx)
    its, asks = parse_quantities(requests), f"it asks for {_text(requests)}"
    hosts = [node for node in every if _is_schedulable(node, own.node_selector, own.tolerations)]
    hosts = [node for node in hosts if _pods_that_fit(node, its, 1)]
    wanted, everywhere = ctx.job.nodes.max, sum(room.values())
    if not hosts:
        what = "no machine takes the controller's pod: its labels and taints are not the target's, but `controller`'s"
        remedy = "Set `controller.node_selector` and `controller.tolerations` in the target to those of some machine."
        yield cluster_finding("no-machines", "controller", what, remedy, asks)
        return
    room_left = {
        object_name(node): everywhere
        - room.get(object_name(node), 0)
        + min(room.get(object_name(node), 0), _pods_that_fit(node, needs, most, its))
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
        seen = (asks, f"{len(taken)} of the {len(room_left)} machines that it may run on")
        yield cluster_finding(
            "controller-pod-blocks-node", "controller", what, remedy, *seen, severity=Severity.WARNING
        )


def _is_schedulable(node: KubeObject, selector: Mapping[str, str], tolerated: Sequence[Toleration]) -> bool:
    """Whether the scheduler would consider a machine."""
    labels = node["metadata"].get("labels", {})
    spec = node.get("spec", {})
    if spec.get("unschedulable") or any(labels.get(key) != value for key, value in selector.items()):
        return False
    taints = [taint for taint in spec.get("taints", ()) if taint["effect"] != "PreferNoSchedule"]
    return all(any(_tolerates(each, taint) for each in tolerated) for taint in taints)


def _tolerates(toleration: Toleration, taint: Mapping[str, str]) -> bool:
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


def _allocatable(node: KubeObject, resource: str) -> float:
    return parse_quantity(str(node.get("status", {}).get("allocatable", {}).get(resource, "0")))


def _text(amounts: Mapping[str, YamlValue]) -> str:
    """`cpu: 8, memory: 64Gi`."""
    return ", ".join(f"{name}: {amount}" for name, amount in to_plain(amounts).items())
