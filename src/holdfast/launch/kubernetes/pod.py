"""Owns the pod of a node: what it may use and do, how it reaches the fabric, and the folders it sees.

Refuses to own what runs in it (agent.py, command.py), and what makes it (jobset.py and its neighbours).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from holdfast.job.profile import Toleration
from holdfast.launch.kubernetes.manifest import Because, Node, plain
from holdfast.launch.kubernetes.mounts import init, mounts
from holdfast.launch.kubernetes.names import NODE
from holdfast.launch.kubernetes.submission import Submission

PARTING_S = 30
"""Seconds beyond the ranks' grace in which an agent tells of their end and leaves; what is left then is killed."""

SCRATCH = "/run/holdfast"
"""The agent's own files, the ranks' sockets and the unpacked code, on the node's disk."""


@dataclass(frozen=True, kw_only=True)
class Occupant:
    """What runs in a node's pod: its one container, and what this one has beyond every node's."""

    container: Mapping[str, Node]
    mounts: Sequence[Node] = ()
    volumes: Sequence[Node] = ()
    capabilities: tuple[str, ...] = ()
    why: str = ""
    """What the capabilities are for."""


def template(asked: Submission, occupant: Occupant, *, restart: str | None = None) -> Node:
    """The pod template of a node; `restart` is its restart policy, where its kind of object does not set one itself."""
    return {
        "metadata": {"labels": asked.names.labels(NODE), "annotations": _attachments(asked)},
        "spec": _spec(asked, occupant, restart),
    }


def aside(asked: Submission, container: Mapping[str, Node], *, part: str) -> Node:
    """The template of a pod beside the nodes, on any machine that will have it: no GPU, no fabric."""
    profile = asked.profile
    return {
        "metadata": {"labels": asked.names.labels(part)},
        "spec": {
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "priorityClassName": profile.priority_class,
            "tolerations": tolerations(profile.tolerations) or None,
            "imagePullSecrets": [{"name": name} for name in profile.image_pull_secrets] or None,
            "securityContext": user(profile.user),
            "initContainers": init(asked, container.get("resources"), confined()),
            "containers": [{**container, "securityContext": confined(), "volumeMounts": mounts(asked)}],
            "volumes": [home_volume(asked)],
        },
    }


def _spec(asked: Submission, occupant: Occupant, restart: str | None) -> Node:
    profile, access = asked.profile, asked.access
    grace_s = math.ceil(asked.job.recovery.stop_grace_s) + PARTING_S
    return {
        "restartPolicy": restart,
        "automountServiceAccountToken": Because(False, "A rank has nothing to ask of the API server."),
        "enableServiceLinks": Because(False, "Variables of every Service here would reach the ranks."),
        "terminationGracePeriodSeconds": Because(
            grace_s,
            f"recovery.stop_grace_s for a last checkpoint, and {PARTING_S} s for the agent to tell of it; "
            "then the kubelet kills.",
        ),
        "priorityClassName": profile.priority_class,
        "nodeSelector": profile.node_selector or None,
        "tolerations": tolerations(profile.tolerations) or None,
        "affinity": _apart(asked) if access.host_network else None,
        "hostNetwork": Because(True, f"{asked.fabric.name}: its adapters belong to the machine's own network.")
        if access.host_network
        else None,
        "dnsPolicy": Because(
            "ClusterFirstWithHostNet", "Without it a pod on the host network does not find the others."
        )
        if access.host_network
        else None,
        "imagePullSecrets": [{"name": name} for name in profile.image_pull_secrets] or None,
        "securityContext": user(profile.user),
        "initContainers": init(asked, _modest(asked), confined()),
        "containers": [_equipped(asked, occupant)],
        "volumes": [
            {
                "name": "shm",
                "emptyDir": {
                    "medium": Because(
                        "Memory", "A container's own /dev/shm has 64 MiB, and NCCL and data loaders die of it."
                    ),
                    "sizeLimit": quantity(asked.job.resources.shm),
                },
            },
            {"name": "scratch", "emptyDir": {}},
            home_volume(asked),
            *({"name": _slug(path), "hostPath": {"path": path}} for path in access.host_paths),
            *occupant.volumes,
        ],
    }


def user(number: int) -> Node:
    """Who containers run as; only a profile that says 0 gets root."""
    return {
        "runAsNonRoot": True if number else None,
        "runAsUser": number,
        "runAsGroup": number,
        "fsGroup": number,
        "fsGroupChangePolicy": Because("OnRootMismatch", "Else every start would walk through all checkpoints."),
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def confined(capabilities: tuple[str, ...] = (), *, privileged: bool = False, why: str = "") -> Node:
    """A container's security context: nothing, and what the fabric needs on top of it."""
    added = Because(list(capabilities), why) if capabilities else None
    if privileged:
        return {"privileged": Because(True, why), "capabilities": {"add": added}}
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"], "add": added}}


def home_volume(asked: Submission) -> Node:
    """The shared volume, or what stands in for it."""
    volume = asked.profile.volume
    if volume is None:
        gone = "The profile names no volume: checkpoints and logs here are lost with the pod."
        return {"name": "home", "emptyDir": Because({}, gone)}
    return {"name": "home", "persistentVolumeClaim": {"claimName": volume.claim}}


def quantity(size_bytes: int | None) -> str | None:
    """Bytes as Kubernetes writes them, in the largest unit that keeps them whole."""
    if size_bytes is None:
        return None
    for power, unit in ((50, "Pi"), (40, "Ti"), (30, "Gi"), (20, "Mi"), (10, "Ki")):
        if size_bytes % (1 << power) == 0:
            return f"{size_bytes >> power}{unit}"
    return str(size_bytes)


def cores(cpu: float | None) -> str | None:
    """CPU cores as Kubernetes writes them, in thousandths where they are not whole."""
    if cpu is None:
        return None
    return str(int(cpu)) if cpu == int(cpu) else f"{max(1, round(cpu * 1000))}m"


def _equipped(asked: Submission, occupant: Occupant) -> Node:
    """The container with what every node's container has, whatever runs in it."""
    access = asked.access
    asks = [f"{asked.fabric.name} asks for it."] if access.capabilities or access.privileged else []
    return {
        **occupant.container,
        "resources": Because(
            {"limits": limits(asked)},
            "Requests are then the same, and a pod whose requests are its limits is evicted last.",
        ),
        "securityContext": confined(
            (*access.capabilities, *occupant.capabilities),
            privileged=access.privileged,
            why=" ".join([*asks, *([occupant.why] if occupant.why else [])]),
        ),
        "volumeMounts": [
            {"name": "shm", "mountPath": "/dev/shm"},
            {"name": "scratch", "mountPath": SCRATCH},
            *mounts(asked),
            *({"name": _slug(path), "mountPath": path} for path in access.host_paths),
            *occupant.mounts,
        ],
    }


def limits(asked: Submission) -> Node:
    """What a node of the job may use of its machine, and asks it for."""
    job, access = asked.job, asked.access
    most: dict[str, Node] = {"cpu": cores(job.resources.cpu), "memory": quantity(job.resources.memory)}
    if job.gpus_per_node:
        most[asked.profile.gpu_resource] = job.gpus_per_node
    if access.per_node and access.resource:
        most[access.resource] = Because(access.per_node, f"{asked.fabric.name}: devices of the fabric.")
    if access.huge_pages:
        most["hugepages-2Mi"] = Because(access.huge_pages, f"{asked.fabric.name}: its library's buffers.")
    return most


def _modest(asked: Submission) -> Node:
    """The same without devices, for what runs before: a pod asks for the larger of both, and so for no more."""
    resources = asked.job.resources
    most: dict[str, Node] = {"cpu": cores(resources.cpu), "memory": quantity(resources.memory)}
    return {"limits": most} if plain(most) else None


def _attachments(asked: Submission) -> Node:
    access, network = asked.access, asked.profile.fabric_device.network
    if not access.attached or network is None:
        return None
    return {
        "k8s.v1.cni.cncf.io/networks": Because(
            ", ".join([network] * access.per_node), "One interface for each device; Multus pairs them in this order."
        )
    }


def tolerations(tolerated: Sequence[Toleration]) -> list[Node]:
    """Taints that a pod of the run puts up with."""
    return [
        {
            "key": each.key,
            "operator": "Exists" if each.value is None else "Equal",
            "value": each.value,
            "effect": each.effect,
        }
        for each in tolerated
    ]


def _apart(asked: Submission) -> Node:
    """Two nodes of a run on one machine would take each other's ports."""
    return {
        "podAntiAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": Because(
                [
                    {
                        "labelSelector": asked.names.selector(NODE),
                        "topologyKey": "kubernetes.io/hostname",
                    }
                ],
                "On the host network two nodes on one machine would take each other's ports.",
            )
        }
    }


def _slug(path: str) -> str:
    return path.strip("/").replace("/", "-")
