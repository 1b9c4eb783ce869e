"""Renders the pod template of a node: resources, permissions, fabric access and mounted folders.

Its container comes from agent_container.py or command_container.py; jobset.py and its siblings use the template.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence

from msgspec import Struct

from holdfast.fabric.fabric import PodAccess, Sidecar
from holdfast.job.targets import Toleration
from holdfast.launch.kubernetes.manifests.pod_additions import (
    env_from,
    pod_metadata,
    volume_mounts,
    volumes,
)
from holdfast.launch.kubernetes.manifests.pod_group import group_annotations, scheduler_name, scheduling_group
from holdfast.launch.kubernetes.manifests.pod_patch import with_patch
from holdfast.launch.kubernetes.manifests.quantities import format_cores, format_quantity
from holdfast.launch.kubernetes.manifests.render_context import RenderContext
from holdfast.launch.kubernetes.manifests.topology_request import topology_request
from holdfast.launch.kubernetes.manifests.volume_mounts import init_containers, mounts
from holdfast.launch.kubernetes.manifests.yaml_writer import Commented, YamlValue, to_plain
from holdfast.launch.kubernetes.object_names import CHECKPOINT_ANNOTATION, FABRIC_LABEL, NODE

AGENT_EXIT_GRACE_S = 30
"""Seconds beyond the ranks' grace in which an agent reports their end and exits, before the kubelet kills it."""

FABRIC_CLAIM = "fabric"
"""Name, in the pod, of the claim of the fabric's devices."""

SCRATCH = "/run/holdfast"
"""The agent's own files, the ranks' sockets and the unpacked code, on the node's disk."""


class ContainerSpec(Struct, frozen=True, kw_only=True):
    """A node pod's only container, and what it needs in addition to every node's."""

    container: Mapping[str, YamlValue]
    mounts: Sequence[YamlValue] = ()
    volumes: Sequence[YamlValue] = ()
    capabilities: tuple[str, ...] = ()
    capabilities_reason: str = ""
    """Why the capabilities are needed."""


def pod_template(
    ctx: RenderContext, spec: ContainerSpec, *, restart: str | None = None, placement_group: str | None = None
) -> YamlValue:
    """The pod template of a node; `restart` is its restart policy, if its kind of object sets none.

    Nodes of an object with several templates are placed together if these have the same `placement_group`.
    """
    annotations = fabric_annotations(ctx) | topology_request(ctx, group=placement_group)
    path = ctx.job.checkpoint.path or ""
    if "://" in path:
        annotations[CHECKPOINT_ANNOTATION] = path
    annotations |= group_annotations(ctx)
    metadata = pod_metadata(ctx, NODE, labels={FABRIC_LABEL: ctx.fabric.name}, annotations=annotations)
    template = {"metadata": metadata, "spec": _pod_spec(ctx, spec, restart)}
    return with_patch(template, ctx.target.pod.patch, to_plain(spec.container["name"]))


def helper_pod_template(ctx: RenderContext, container: Mapping[str, YamlValue], *, part: str) -> YamlValue:
    """The template of an auxiliary pod that runs on any machine: no GPU, no fabric."""
    target = ctx.target
    return {
        "metadata": pod_metadata(ctx, part),
        "spec": {
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "priorityClassName": target.priority_class,
            "tolerations": tolerations(target.tolerations) or None,
            "imagePullSecrets": [{"name": name} for name in target.image_pull_secrets] or None,
            "securityContext": pod_security_context(target.user),
            "initContainers": init_containers(ctx, container.get("resources"), container_security_context()) or None,
            "containers": [
                {
                    **container,
                    "imagePullPolicy": target.pod.pull_policy,
                    "securityContext": container_security_context(),
                    "volumeMounts": mounts(ctx),
                }
            ],
            "volumes": [home_volume(ctx)],
        },
    }


def _pod_spec(ctx: RenderContext, occupant: ContainerSpec, restart: str | None) -> YamlValue:
    target, access, own = ctx.target, ctx.pod_access, ctx.target.pod
    grace_s = math.ceil(ctx.job.recovery.stop_grace_s) + AGENT_EXIT_GRACE_S
    return {
        "restartPolicy": restart,
        "serviceAccountName": own.service_account,
        "automountServiceAccountToken": Commented(False, "Ranks do not use the API server."),
        "enableServiceLinks": Commented(False, "Otherwise ranks get variables for every Service of the namespace."),
        "terminationGracePeriodSeconds": Commented(
            grace_s,
            f"recovery.stop_grace_s for a last checkpoint, and {AGENT_EXIT_GRACE_S} s for the agent to report it; "
            "then the kubelet kills the pod.",
        ),
        "runtimeClassName": own.runtime_class,
        "schedulerName": scheduler_name(ctx),
        "schedulingGroup": scheduling_group(ctx),
        "priorityClassName": target.priority_class,
        "nodeSelector": target.node_selector or None,
        "tolerations": tolerations(target.tolerations) or None,
        "affinity": _anti_affinity(ctx) if access.host_network else None,
        "hostNetwork": Commented(True, f"{ctx.fabric.name}: its adapters are on the host network.")
        if access.host_network
        else None,
        "dnsPolicy": Commented(
            "ClusterFirstWithHostNet", "Without it a pod on the host network cannot resolve the others."
        )
        if access.host_network
        else None,
        "imagePullSecrets": [{"name": name} for name in target.image_pull_secrets] or None,
        "securityContext": pod_security_context(target.user),
        "initContainers": [
            *init_containers(ctx, _init_resources(ctx), container_security_context()),
            *([_sidecar(access.sidecar)] if access.sidecar else ()),
        ]
        or None,
        "containers": [_complete_container(ctx, occupant)],
        "resourceClaims": [
            {"name": name, "resourceClaimTemplateName": template} for name, template in claims(ctx).items()
        ]
        or None,
        "volumes": [
            {
                "name": "shm",
                "emptyDir": {
                    "medium": Commented(
                        "Memory", "The default /dev/shm has 64 MiB, too little for NCCL and data loaders."
                    ),
                    "sizeLimit": format_quantity(ctx.job.resources.shm),
                },
            },
            {"name": "scratch", "emptyDir": {}},
            home_volume(ctx),
            *({"name": volume_name(path), "hostPath": {"path": path}} for path in host_folders(access)),
            *occupant.volumes,
            *volumes(own.volumes),
        ],
    }


def pod_security_context(number: int) -> YamlValue:
    """The user of the containers; root only if the target sets 0."""
    return {
        "runAsNonRoot": True if number else None,
        "runAsUser": number,
        "runAsGroup": number,
        "fsGroup": number,
        "fsGroupChangePolicy": Commented("OnRootMismatch", "Otherwise every start walks through all checkpoints."),
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def container_security_context(
    capabilities: tuple[str, ...] = (), *, privileged: bool = False, why: str = ""
) -> YamlValue:
    """A container's security context: no privileges except those that the fabric needs."""
    added = Commented(list(capabilities), why) if capabilities else None
    if privileged:
        return {"privileged": Commented(True, why), "capabilities": {"add": added}}
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"], "add": added}}


def home_volume(ctx: RenderContext) -> YamlValue:
    """The shared volume, or an emptyDir without one."""
    volume = ctx.target.volume
    if volume is None:
        gone = "The target names no volume: checkpoints and logs are lost with the pod."
        return {"name": "home", "emptyDir": Commented({}, gone)}
    return {"name": "home", "persistentVolumeClaim": {"claimName": volume.claim}}


def _complete_container(ctx: RenderContext, occupant: ContainerSpec) -> YamlValue:
    """Add the fields that every node's container has."""
    access, own = ctx.pod_access, ctx.target.pod
    asks = [f"{ctx.fabric.name} needs it."] if access.capabilities or access.privileged else []
    return {
        **occupant.container,
        "imagePullPolicy": own.pull_policy,
        "envFrom": env_from(own.env_from),
        "resources": _resources(ctx),
        "securityContext": container_security_context(
            (*access.capabilities, *occupant.capabilities),
            privileged=access.privileged,
            why=" ".join([*asks, *([occupant.capabilities_reason] if occupant.capabilities_reason else [])]),
        ),
        "volumeMounts": [
            {"name": "shm", "mountPath": "/dev/shm"},
            {"name": "scratch", "mountPath": SCRATCH},
            *mounts(ctx),
            *_host_mounts(access.mounts),
            *occupant.mounts,
            *volume_mounts(own.volumes),
        ],
    }


def _resources(ctx: RenderContext) -> YamlValue:
    """What a node's container gets; without limits at least an empty mapping, as operators write it back."""
    limits, claimed = node_limits(ctx), [{"name": name} for name in claims(ctx)]
    if not limits:
        return {"claims": claimed or None}
    return Commented(
        {"limits": limits, "claims": claimed or None},
        "Requests default to limits; a pod whose requests equal its limits is evicted last.",
    )


def claims(ctx: RenderContext) -> dict[str, str]:
    """The claims of a node's pod: the fabric's, and the target's; by name, the template of each."""
    of_fabric = {FABRIC_CLAIM: ctx.names.fabric_claim} if ctx.pod_access.claim else {}
    return of_fabric | {each.name: each.template for each in ctx.target.pod.resource_claims}


def node_limits(ctx: RenderContext) -> Mapping[str, YamlValue]:
    """Resource limits and requests of a node, each a string, as the API server returns it."""
    job, access = ctx.job, ctx.pod_access
    amounts = {
        "cpu": format_cores(job.resources.cpu),
        "memory": format_quantity(job.resources.memory),
        "ephemeral-storage": format_quantity(ctx.target.pod.ephemeral_storage),
    }
    most: dict[str, YamlValue] = {name: amount for name, amount in amounts.items() if amount is not None}
    if job.gpus_per_node:
        most[ctx.target.gpu_resource] = str(job.gpus_per_node)
    for resource, devices in ctx.fabric_resources.items():
        most[resource] = Commented(str(devices), f"{ctx.fabric.name}: devices of the fabric.")
    if access.huge_pages:
        most["hugepages-2Mi"] = Commented(access.huge_pages, f"{ctx.fabric.name}: its library's buffers.")
    return most


def _init_resources(ctx: RenderContext) -> YamlValue:
    """The same without devices, for the init container: a pod requests the larger of both, so no more."""
    resources = ctx.job.resources
    most: dict[str, YamlValue] = {"cpu": format_cores(resources.cpu), "memory": format_quantity(resources.memory)}
    return {"limits": most} if to_plain(most) else {}


def fabric_annotations(ctx: RenderContext) -> dict[str, YamlValue]:
    """The annotations by which the cluster's network plugins attach interfaces and devices to the pod."""
    access, annotations = ctx.pod_access, dict[str, YamlValue]()
    if ctx.multus_networks:
        annotations["k8s.v1.cni.cncf.io/networks"] = Commented(
            ", ".join(ctx.multus_networks), "One interface per device; Multus pairs them in this order."
        )
    if access.gke_interfaces:
        attached = [("eth0", "default"), *access.gke_interfaces]
        annotations["networking.gke.io/default-interface"] = "eth0"
        annotations["networking.gke.io/interfaces"] = Commented(
            json.dumps([{"interfaceName": name, "network": network} for name, network in attached]),
            "GKE attaches one interface per adapter of the machine.",
        )
    if access.sidecar and access.sidecar.devices:
        annotations[f"devices.gke.io/container.{access.sidecar.name}"] = Commented(
            "".join(f"- path: {device}\n" for device in access.sidecar.devices),
            "The machine's device injector gives them to this container, which so needs no privileges.",
        )
    return annotations


def _sidecar(sidecar: Sidecar) -> YamlValue:
    """The container that serves the network plugin, from before the ranks begin until after they end."""
    return {
        "name": sidecar.name,
        "image": sidecar.image,
        "restartPolicy": Commented("Always", "A sidecar: it starts before the ranks, and does not keep the pod alive."),
        "command": list(sidecar.command),
        "env": [{"name": name, "value": value} for name, value in sidecar.env],
        "resources": {},
        "securityContext": Commented(
            {
                "runAsUser": 0,
                "runAsGroup": 0,
                "runAsNonRoot": False,
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"], "add": list(sidecar.capabilities)},
            },
            "It steers the adapters' flows, which only root may do.",
        ),
        "volumeMounts": _host_mounts(sidecar.mounts),
    }


def host_folders(access: PodAccess) -> list[str]:
    """The machine's folders that containers of the pod mount."""
    mounted = (*access.mounts, *(access.sidecar.mounts if access.sidecar else ()))
    return list(dict.fromkeys(folder for folder, _ in mounted))


def _host_mounts(mounted: Sequence[tuple[str, str]]) -> list[YamlValue]:
    return [{"name": volume_name(folder), "mountPath": path} for folder, path in mounted]


def tolerations(tolerated: Sequence[Toleration]) -> list[YamlValue]:
    """Tolerations of the run's pods."""
    return [
        {
            "key": each.key,
            "operator": "Exists" if each.value is None else "Equal",
            "value": each.value,
            "effect": each.effect,
        }
        for each in tolerated
    ]


def _anti_affinity(ctx: RenderContext) -> YamlValue:
    """Keeps two nodes of a run off one machine, where their ports would conflict."""
    return {
        "podAntiAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": Commented(
                [
                    {
                        "labelSelector": ctx.names.selector(NODE),
                        "topologyKey": "kubernetes.io/hostname",
                    }
                ],
                "On the host network the ports of two nodes on one machine would conflict.",
            )
        }
    }


def volume_name(path: str) -> str:
    """The volume's name for a folder of the machine."""
    return path.strip("/").replace("/", "-").replace("_", "-")
