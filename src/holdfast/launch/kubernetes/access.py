"""Owns what a run may do and who may reach it: the controller's role, the fence around the gang, and its secrets."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from holdfast.job.profile import Workload
from holdfast.job.spec import SecretRef
from holdfast.launch.kubernetes.delivery import in_secret
from holdfast.launch.kubernetes.manifest import Because, Node
from holdfast.launch.kubernetes.names import CODE, CONTROLLER, NODE
from holdfast.launch.kubernetes.pod import quantity
from holdfast.launch.kubernetes.submission import Submission

GROUPS: Mapping[Workload, tuple[str, str]] = {
    Workload.JOBSET: ("jobset.x-k8s.io", "jobsets"),
    Workload.TRAINJOB: ("trainer.kubeflow.org", "trainjobs"),
    Workload.PYTORCHJOB: ("kubeflow.org", "pytorchjobs"),
    Workload.MPIJOB: ("kubeflow.org", "mpijobs"),
}
"""API group and resource of each kind."""

GANGS: Mapping[Workload, tuple[str, str]] = {**GROUPS, Workload.TRAINJOB: GROUPS[Workload.JOBSET]}
"""The same of what makes the pods: a TrainJob has a JobSet of its name do it, and says of itself what that says."""

UNTOLD = "(set when the run is started)"


def rbac(asked: Submission) -> list[Mapping[str, Node]]:
    """The controller's account, and the least it needs, unless a ready-made one is named; the gang needs none."""
    if asked.profile.service_account is not None:
        return []
    names, namespace = asked.names, asked.profile.namespace
    group, resource = GANGS[asked.workload]
    about = {"name": names.controller, "namespace": namespace, "labels": names.labels(CONTROLLER)}
    rules: list[Node] = [
        Because(
            _rule(group, resource, "get", names=[names.name]),
            "Its own run alone, of which it says there that it has failed, and why: agents leave without an error, and "
            "the operator would call that a success.",
        ),
        _rule(group, f"{resource}/status", "patch", names=[names.name]),
        *_replacing(asked),
        Because(
            _rule("apps", "replicasets/scale", "patch", names=[names.controller]),
            "That it has had its last pod, once the run is over; more of itself it cannot change.",
        ),
    ]
    if not asked.accepted.lasting:
        earlier = "Which pod was the first: a later one gets the log back, of which the nodes have copies."
        rules.append(Because(_rule("", "configmaps", "get", "patch", names=[names.controller]), earlier))
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


def _replacing(asked: Submission) -> list[Node]:
    """What it takes to see nodes come and go, to have a broken one replaced, and to clear away what stays."""
    unnamed = "Names of pods are not known beforehand."
    rules: list[Node] = [Because(_rule("", "pods", "list", "watch", "delete"), unnamed)]
    if asked.workload is Workload.JOBSET:
        jobs = [f"{asked.names.name}-{NODE}-{node}" for node in range(asked.job.nodes.max)]
        at_once = "A node's Job that is removed is made again at once; a failed pod is replaced after 10 s, then later."
        rules.append(Because(_rule("batch", "jobs", "delete", names=jobs), at_once))
    return rules


def _rule(group: str, resource: str, *verbs: str, names: Sequence[str] | None = None) -> Node:
    return {"apiGroups": [group], "resources": [resource], "resourceNames": names, "verbs": verbs}


def network_policy(asked: Submission) -> Mapping[str, Node]:
    """Nobody but the run's own pods reaches its pods."""
    names = asked.names
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": names.name, "namespace": asked.profile.namespace, "labels": names.labels()},
        "spec": {
            "podSelector": names.selector(),
            "policyTypes": Because(
                ["Ingress"], "What goes out is left open: names, data sets, checkpoints in a store."
            ),
            "ingress": Because(
                [{"from": [{"podSelector": names.selector()}]}],
                "The ports of TCPStore, Gloo and NCCL ask nobody who they are; the run's own pods alone may connect.",
            ),
        },
    }


def keys(asked: Submission) -> list[Mapping[str, Node]]:
    """The controller's secrets, with the job's own, and each node's token; their values are made at the start."""
    names, job = asked.names, asked.job
    tokens = dict.fromkeys(("ca.pem", *(f"node{node}" for node in range(job.nodes.max))), UNTOLD)
    whence = "; ".join(f"{name}: {_whence(ref)}" for name, ref in job.secrets.items())
    own: dict[str, Node] = {"token": UNTOLD, "ca.pem": UNTOLD, "identity.pem": UNTOLD}
    own["secrets.json"] = Because(UNTOLD, whence or "The job names no secrets.")
    if (code := asked.accepted.code) is not None and in_secret(code.bytes):
        own[CODE] = Because(UNTOLD, "The code, which agents get from the controller; more than this is brought to it.")
    return [_secret(asked, names.controller, own), _secret(asked, names.keys, tokens)]


def job_secrets(asked: Submission) -> list[Mapping[str, Node]]:
    """The job's own secrets, for a command that is started without an agent."""
    values: dict[str, Node] = {name: Because(UNTOLD, _whence(ref)) for name, ref in asked.job.secrets.items()}
    return [_secret(asked, asked.names.secrets, values)] if values else []


def description(asked: Submission) -> Mapping[str, Node]:
    """The job as accepted, which is all that a controller needs beside its keys."""
    accepted = asked.accepted.model_dump(mode="json", exclude_defaults=True)
    text = json.dumps(accepted, indent=1) + "\n"
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": asked.names.name, "namespace": asked.profile.namespace, "labels": asked.names.labels()},
        "immutable": True,
        "data": {"job.json": text},
    }


def claim(asked: Submission) -> list[Mapping[str, Node]]:
    """The shared volume, where the profile has it made; it is nobody's, so that it outlives the run."""
    volume = asked.profile.volume
    if volume is None or volume.size is None:
        return []
    return [
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": volume.claim, "namespace": asked.profile.namespace},
            "spec": {
                "accessModes": Because(["ReadWriteMany"], "Every node writes its part of a checkpoint."),
                "storageClassName": volume.storage_class,
                "resources": {"requests": {"storage": quantity(volume.size)}},
            },
        }
    ]


def _secret(asked: Submission, name: str, values: Mapping[str, Node]) -> Mapping[str, Node]:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, "namespace": asked.profile.namespace, "labels": asked.names.labels()},
        "type": "Opaque",
        "stringData": values,
    }


def _whence(ref: SecretRef) -> str:
    return f"from the variable {ref.env}" if ref.env is not None else f"from the file {ref.file}"
