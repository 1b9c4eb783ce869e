"""Owns what a run may do and who may reach it: the controller's role, the fence around the gang, and its secrets."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from holdfast.job.spec import SecretRef
from holdfast.job.targets import Workload
from holdfast.launch.kubernetes.manifests.pod_template import format_quantity
from holdfast.launch.kubernetes.manifests.render_context import RenderContext
from holdfast.launch.kubernetes.manifests.yaml_writer import Commented, YamlValue
from holdfast.launch.kubernetes.object_names import CODE_KEY, CONTROLLER, NODE
from holdfast.launch.kubernetes.sync.code_upload import fits_in_secret

API_RESOURCES: Mapping[Workload, tuple[str, str]] = {
    Workload.JOBSET: ("jobset.x-k8s.io", "jobsets"),
    Workload.TRAINJOB: ("trainer.kubeflow.org", "trainjobs"),
    Workload.PYTORCHJOB: ("kubeflow.org", "pytorchjobs"),
    Workload.MPIJOB: ("kubeflow.org", "mpijobs"),
}
"""API group and resource of each kind."""

POD_OWNER_RESOURCES: Mapping[Workload, tuple[str, str]] = {
    **API_RESOURCES,
    Workload.TRAINJOB: API_RESOURCES[Workload.JOBSET],
}
"""The same of what makes the pods: a TrainJob has a JobSet of its name do it, and says of itself what that says."""

SET_AT_START = "(set when the run is started)"


def rbac(ctx: RenderContext) -> list[Mapping[str, YamlValue]]:
    """The controller's account, and the least it needs, unless a ready-made one is named; the gang needs none."""
    if ctx.target.service_account is not None:
        return []
    names, namespace = ctx.names, ctx.target.namespace
    group, resource = POD_OWNER_RESOURCES[ctx.workload]
    about = {"name": names.controller, "namespace": namespace, "labels": names.labels(CONTROLLER)}
    rules: list[YamlValue] = [
        Commented(
            _rule(group, resource, "get", names=[names.name]),
            "Its own run alone, of which it says there that it has failed, and why: agents leave without an error, and "
            "the operator would call that a success.",
        ),
        _rule(group, f"{resource}/status", "patch", names=[names.name]),
        *_node_replacement_rules(ctx),
        Commented(
            _rule("apps", "replicasets/scale", "patch", names=[names.controller]),
            "That it has had its last pod, once the run is over; more of itself it cannot change.",
        ),
    ]
    if not ctx.accepted.durable_controller_disk:
        earlier = "Which pod was the first: a later one gets the log back, of which the nodes have copies."
        rules.append(Commented(_rule("", "configmaps", "get", "patch", names=[names.controller]), earlier))
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": about},
        {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": about, "rules": rules},
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "RoleBinding",
            "metadata": about,
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": names.controller},
            "subjects": [{"kind": "ServiceAccount", "name": names.controller, "namespace": namespace}],
        },
    ]


def _node_replacement_rules(ctx: RenderContext) -> list[YamlValue]:
    """What it takes to see nodes come and go, to have a broken one replaced, and to clear away what stays."""
    unnamed = "Names of pods are not known beforehand."
    rules: list[YamlValue] = [Commented(_rule("", "pods", "list", "watch", "delete"), unnamed)]
    if ctx.workload is Workload.JOBSET:
        jobs = [f"{ctx.names.name}-{NODE}-{node}" for node in range(ctx.job.nodes.max)]
        at_once = "A node's Job that is removed is made again at once; a failed pod is replaced after 10 s, then later."
        rules.append(Commented(_rule("batch", "jobs", "delete", names=jobs), at_once))
    return rules


def _rule(group: str, resource: str, *verbs: str, names: Sequence[str] | None = None) -> YamlValue:
    return {"apiGroups": [group], "resources": [resource], "resourceNames": names, "verbs": verbs}


def network_policy(ctx: RenderContext) -> Mapping[str, YamlValue]:
    """Nobody but the run's own pods reaches its pods."""
    names = ctx.names
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": names.name, "namespace": ctx.target.namespace, "labels": names.labels()},
        "spec": {
            "podSelector": names.selector(),
            "policyTypes": Commented(
                ["Ingress"], "What goes out is left open: names, data sets, checkpoints in a store."
            ),
            "ingress": Commented(
                [{"from": [{"podSelector": names.selector()}]}],
                "The ports of TCPStore, Gloo and NCCL ask nobody who they are; the run's own pods alone may connect.",
            ),
        },
    }


def key_secrets(ctx: RenderContext) -> list[Mapping[str, YamlValue]]:
    """The controller's secrets, with the job's own, and each node's token; their values are made at the start."""
    names, job = ctx.names, ctx.job
    tokens = dict.fromkeys(("ca.pem", *(f"node{node}" for node in range(job.nodes.max))), SET_AT_START)
    whence = "; ".join(f"{name}: {_secret_source(ref)}" for name, ref in job.secrets.items())
    own: dict[str, YamlValue] = {"token": SET_AT_START, "ca.pem": SET_AT_START, "identity.pem": SET_AT_START}
    own["secrets.json"] = Commented(SET_AT_START, whence or "The job names no secrets.")
    if (code := ctx.accepted.code) is not None and fits_in_secret(code.bytes):
        own[CODE_KEY] = Commented(
            SET_AT_START, "The code, which agents get from the controller; more than this is brought to it."
        )
    return [_secret(ctx, names.controller, own), _secret(ctx, names.keys, tokens)]


def job_secrets(ctx: RenderContext) -> list[Mapping[str, YamlValue]]:
    """The job's own secrets, for a command that is started without an agent."""
    values: dict[str, YamlValue] = {
        name: Commented(SET_AT_START, _secret_source(ref)) for name, ref in ctx.job.secrets.items()
    }
    return [_secret(ctx, ctx.names.secrets, values)] if values else []


def job_config_map(ctx: RenderContext) -> Mapping[str, YamlValue]:
    """The job as accepted, which is all that a controller needs beside its keys."""
    accepted = ctx.accepted.model_dump(mode="json", exclude_defaults=True)
    text = json.dumps(accepted, indent=1) + "\n"
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": ctx.names.name, "namespace": ctx.target.namespace, "labels": ctx.names.labels()},
        "immutable": True,
        "data": {"job.json": text},
    }


def volume_claim(ctx: RenderContext) -> list[Mapping[str, YamlValue]]:
    """The shared volume, where the target has it made; it is nobody's, so that it outlives the run."""
    volume = ctx.target.volume
    if volume is None or volume.size is None:
        return []
    return [
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": volume.claim, "namespace": ctx.target.namespace},
            "spec": {
                "accessModes": Commented(["ReadWriteMany"], "Every node writes its part of a checkpoint."),
                "storageClassName": volume.storage_class,
                "resources": {"requests": {"storage": format_quantity(volume.size)}},
            },
        }
    ]


def _secret(ctx: RenderContext, name: str, values: Mapping[str, YamlValue]) -> Mapping[str, YamlValue]:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, "namespace": ctx.target.namespace, "labels": ctx.names.labels()},
        "type": "Opaque",
        "stringData": values,
    }


def _secret_source(ref: SecretRef) -> str:
    return f"from the variable {ref.env}" if ref.env is not None else f"from the file {ref.file}"
