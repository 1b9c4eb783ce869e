"""Renders admission policies by which a platform team allows only runs that are set up as its cluster needs.

The API server itself evaluates ValidatingAdmissionPolicies, without a webhook. They apply to a whole namespace, also to
what others than holdfast create there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct

from holdfast.job.targets import TargetSpec
from holdfast.launch.kubernetes.manifests.yaml_writer import Commented, YamlValue
from holdfast.launch.kubernetes.object_names import (
    CHECKPOINT_ANNOTATION,
    FABRIC_LABEL,
    QUEUE_LABEL,
    RUN_LABEL,
    VOLCANO_GROUP,
)
from holdfast.launch.kubernetes.workload_catalog import CATALOG
from holdfast.launch.policy_request import PolicyRequest

_VERSION, _KIND = "admissionregistration.k8s.io/v1", "ValidatingAdmissionPolicy"
POLICY_PREFIX = "holdfast-policy-"
"""Begins the names of the policies: the API server's refusal names the policy."""


class _Rule(Struct, frozen=True, kw_only=True):
    """One policy."""

    name: str
    why: str
    of_pods: bool
    """Whether it is about pods with GPUs, or about the objects from which operators create pods."""
    expressions: Callable[[PolicyRequest], Sequence[tuple[str, str]]]
    """CEL expressions that must hold, each with the message of a refusal; none if nothing is requested."""


def _shm(_: PolicyRequest) -> Sequence[tuple[str, str]]:
    mounted = (
        "(has(object.spec.hostIPC) && object.spec.hostIPC) || variables.trainers.all(c, has(c.volumeMounts) && "
        "c.volumeMounts.exists(m, m.mountPath == '/dev/shm' && object.spec.volumes.exists(v, v.name == m.name && "
        "has(v.emptyDir) && has(v.emptyDir.medium) && v.emptyDir.medium == 'Memory')))"
    )
    return [(mounted, "a container with GPUs needs an emptyDir of medium Memory at /dev/shm: its own has 64 MiB")]


def _storage(_: PolicyRequest) -> Sequence[tuple[str, str]]:
    lasting = " || ".join(f"has(v.{kind})" for kind in ("persistentVolumeClaim", "csi", "nfs"))
    kept = (
        f"(has(object.spec.volumes) && object.spec.volumes.exists(v, {lasting})) || "
        f"(has(object.metadata.annotations) && '{CHECKPOINT_ANNOTATION}' in object.metadata.annotations)"
    )
    message = (
        "checkpoints would be lost with the pod: mount a volume that outlives it, or name an object store in the "
        f"annotation {CHECKPOINT_ANNOTATION}"
    )
    return [(kept, message)]


def _gang(_: PolicyRequest) -> Sequence[tuple[str, str]]:
    queued = f"(has(object.metadata.labels) && '{QUEUE_LABEL}' in object.metadata.labels)"
    metadata = "r.template.spec.template.metadata"
    by_volcano = f"(has({metadata}.annotations) && '{VOLCANO_GROUP}' in {metadata}.annotations)"
    grouped = (
        "(object.kind == 'JobSet' && object.spec.replicatedJobs.all(r, "
        f"has(r.template.spec.template.spec.schedulingGroup) || {by_volcano}))"
    )
    message = f"without a queue some nodes may start and wait for the rest: set the label {QUEUE_LABEL}"
    return [(f"{queued} || {grouped}", f"{message}, or have the pods in a PodGroup")]


def _labels(request: PolicyRequest) -> Sequence[tuple[str, str]]:
    return [
        (
            f"has(object.metadata.labels) && '{label}' in object.metadata.labels",
            f"pods with GPUs need the label `{label}`",
        )
        for label in request.labels
    ]


def _fabrics(request: PolicyRequest) -> Sequence[tuple[str, str]]:
    if not request.fabrics:
        return []
    approved = ", ".join(f"'{fabric}'" for fabric in request.fabrics)
    runs = f"has(object.metadata.labels) && '{RUN_LABEL}' in object.metadata.labels"
    labelled = f"'{FABRIC_LABEL}' in object.metadata.labels && object.metadata.labels['{FABRIC_LABEL}'] in [{approved}]"
    return [(f"!({runs}) || ({labelled})", f"runs here may use the fabrics {', '.join(request.fabrics)}")]


RULES = (
    _Rule(name="shm", why="NCCL and data workers fail with a small /dev/shm.", of_pods=True, expressions=_shm),
    _Rule(name="storage", why="A run without lasting checkpoints begins again.", of_pods=True, expressions=_storage),
    _Rule(name="gang", why="Half of a gang holds machines and does nothing.", of_pods=False, expressions=_gang),
    _Rule(name="labels", why="Somebody must be asked about every GPU in use.", of_pods=True, expressions=_labels),
    _Rule(name="fabric", why="On another network a run takes many times longer.", of_pods=True, expressions=_fabrics),
)


def render_policies(spec: TargetSpec, request: PolicyRequest) -> list[Mapping[str, YamlValue]]:
    """The policies of a target's namespace, and their bindings."""
    found = [(rule, validations) for rule in RULES if (validations := rule.expressions(request))]
    return [each for rule, validations in found for each in _policy(spec, request, rule, validations)]


def _policy(
    spec: TargetSpec, request: PolicyRequest, rule: _Rule, validations: Sequence[tuple[str, str]]
) -> list[Mapping[str, YamlValue]]:
    name = f"{POLICY_PREFIX}{rule.name}-{spec.namespace}"
    groups: list[YamlValue] = (
        [_resources("", "v1", ["pods"])]
        if rule.of_pods
        else [_resources(kind.group, kind.version, [kind.resource]) for kind in CATALOG.values()]
    )
    policy: dict[str, YamlValue] = {
        "failurePolicy": "Fail",
        "matchConstraints": {"resourceRules": groups},
        "validations": [{"expression": expression, "message": message} for expression, message in validations],
    }
    if rule.of_pods:
        uses = f"has(c.resources) && has(c.resources.limits) && '{spec.gpu_resource}' in c.resources.limits"
        policy["matchConditions"] = [
            {"name": "gpus", "expression": f"object.spec.containers.exists(c, {uses})"},
        ]
        trainers = f"object.spec.containers.filter(c, {uses})"
        policy["variables"] = [{"name": "trainers", "expression": trainers}]
    binding: YamlValue = {
        "policyName": name,
        "validationActions": ["Deny"] if request.enforce else ["Warn", "Audit"],
        "matchResources": {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": spec.namespace}}},
    }
    metadata = Commented({"name": name}, rule.why)
    return [
        {"apiVersion": _VERSION, "kind": _KIND, "metadata": metadata, "spec": policy},
        {"apiVersion": _VERSION, "kind": f"{_KIND}Binding", "metadata": {"name": name}, "spec": binding},
    ]


def _resources(group: str, version: str, resources: Sequence[str]) -> YamlValue:
    return {"apiGroups": [group], "apiVersions": [version], "operations": ["CREATE"], "resources": resources}
