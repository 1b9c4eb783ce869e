"""Renders a run's supporting objects: the controller's role, Secrets, ConfigMap and volume claim."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from holdfast.job.spec import SecretRef
from holdfast.launch.kubernetes import quarantine_object
from holdfast.launch.kubernetes.manifests.quantities import format_quantity
from holdfast.launch.kubernetes.manifests.render_context import SET_AT_START, RenderContext
from holdfast.launch.kubernetes.manifests.yaml_writer import Commented, YamlValue
from holdfast.launch.kubernetes.object_names import CODE_KEY, CONTROLLER, JOB_KEY, METRICS_TOKEN_KEY, NODE
from holdfast.launch.kubernetes.sync.code_upload import fits_in_secret
from holdfast.launch.kubernetes.workload_catalog import CATALOG, pod_owner

RBAC = "rbac.authorization.k8s.io"


def rbac(ctx: RenderContext) -> list[Mapping[str, YamlValue]]:
    """The controller's service account with minimal permissions, unless the target names one; the gang needs none."""
    if ctx.target.service_account is not None:
        return []
    names, owner = ctx.names, pod_owner(ctx.workload)
    rules: list[YamlValue] = [
        Commented(
            rule(owner.group, owner.resource, "get", names=[names.name]),
            "Only its own run, to mark it as failed with the reason: agents exit with code 0, which the operator would "
            "count as success.",
        ),
        rule(owner.group, f"{owner.resource}/status", "patch", names=[names.name]),
        *_scale_rules(ctx),
        *_node_replacement_rules(ctx),
        Commented(
            rule("apps", "replicasets/scale", "patch", names=[names.controller]),
            "To scale itself to 0 once the run is over; nothing else of itself.",
        ),
    ]
    remembers = "To remember machines that failed, for later runs; `holdfast nodes` lists them."
    rules.append(Commented(rule("", "configmaps", "get", "patch", names=[quarantine_object.NAME]), remembers))
    rules.append(Commented(rule("", "events", "create"), "So that `kubectl describe` of the run's object shows them."))
    if not ctx.accepted.durable_controller_disk:
        earlier = "To record the first pod: a later one restores the log from the nodes' replicas."
        rules.append(Commented(rule("", "configmaps", "get", "patch", names=[names.controller]), earlier))
    role: YamlValue = {"apiGroup": RBAC, "kind": "Role", "name": names.controller}
    subject: YamlValue = {"kind": "ServiceAccount", "name": names.controller, "namespace": ctx.target.namespace}
    return [
        ctx.manifest("v1", "ServiceAccount", names.controller, CONTROLLER),
        ctx.manifest(f"{RBAC}/v1", "Role", names.controller, CONTROLLER, rules=rules),
        ctx.manifest(f"{RBAC}/v1", "RoleBinding", names.controller, CONTROLLER, roleRef=role, subjects=[subject]),
    ]


def _scale_rules(ctx: RenderContext) -> list[YamlValue]:
    """Permission to end a run whose pods would restart for ever."""
    kind = CATALOG[ctx.workload]
    if not kind.never_completes:
        return []
    ends = "To scale its run to 0 once it is over: its pods restart whenever they exit."
    return [Commented(rule(kind.group, f"{kind.resource}/scale", "patch", names=[ctx.names.name]), ends)]


def _node_replacement_rules(ctx: RenderContext) -> list[YamlValue]:
    """Permissions to watch nodes, to replace a broken one, and to delete what remains."""
    unnamed = "Pod names are not known in advance."
    rules: list[YamlValue] = [Commented(rule("", "pods", "list", "watch", "delete"), unnamed)]
    if CATALOG[ctx.workload].job_per_node:
        jobs = [f"{ctx.names.name}-{NODE}-{node}" for node in range(ctx.job.nodes.max)]
        at_once = "A deleted Job of a node is recreated immediately; a failed pod is replaced after 10 s, then later."
        rules.append(Commented(rule("batch", "jobs", "delete", names=jobs), at_once))
    return rules


def rule(group: str, resource: str, *verbs: str, names: Sequence[str] | None = None) -> YamlValue:
    """A rule of a Role, for all objects of a kind or for some."""
    return {"apiGroups": [group], "resources": [resource], "resourceNames": names, "verbs": verbs}


def key_secrets(ctx: RenderContext) -> list[Mapping[str, YamlValue]]:
    """The controller's secrets with the job's, and the tokens of nodes and scrapers; a run's start sets the values."""
    names, job = ctx.names, ctx.job
    tokens = dict.fromkeys(
        ("ca.pem", METRICS_TOKEN_KEY, *(f"node{node}" for node in range(job.nodes.max))), SET_AT_START
    )
    whence = "; ".join(f"{name}: {_secret_source(ref)}" for name, ref in job.secrets.items())
    own: dict[str, YamlValue] = {"token": SET_AT_START, "ca.pem": SET_AT_START, "identity.pem": SET_AT_START}
    own["secrets.json"] = Commented(SET_AT_START, whence or "The job names no secrets.")
    if (code := ctx.accepted.code) is not None and fits_in_secret(code.bytes):
        own[CODE_KEY] = Commented(
            SET_AT_START,
            "The job's code, which agents download from the controller; larger code is uploaded to it later.",
        )
    return [_secret(ctx, names.controller, own), _secret(ctx, names.keys, tokens)]


def job_secrets(ctx: RenderContext) -> list[Mapping[str, YamlValue]]:
    """The job's secrets, for a command without an agent."""
    values: dict[str, YamlValue] = {
        name: Commented(SET_AT_START, _secret_source(ref)) for name, ref in ctx.job.secrets.items()
    }
    return [_secret(ctx, ctx.names.secrets, values)] if values else []


def fabric_claim(ctx: RenderContext) -> list[Mapping[str, YamlValue]]:
    """The template of the claims by which the scheduler allocates the fabric's devices to each node."""
    claim = ctx.pod_access.claim
    if claim is None:
        return []
    exactly: YamlValue = {
        "deviceClassName": claim.device_class,
        "allocationMode": "ExactCount",
        "count": claim.count,
        "selectors": [{"cel": {"expression": claim.selector}}] if claim.selector else None,
    }
    requests: YamlValue = {"devices": {"requests": [{"name": "devices", "exactly": exactly}]}}
    spec: YamlValue = {"spec": requests}
    return [ctx.manifest("resource.k8s.io/v1", "ResourceClaimTemplate", ctx.names.fabric_claim, spec=spec)]


def job_config_map(ctx: RenderContext) -> Mapping[str, YamlValue]:
    """The accepted job: the controller's only input except its keys, and what another machine adopts the run with."""
    accepted = ctx.accepted.model_dump(mode="json", exclude_defaults=True)
    text = json.dumps(accepted, indent=1) + "\n"
    return ctx.manifest("v1", "ConfigMap", ctx.names.name, immutable=True, data={JOB_KEY: text})


def volume_claim(ctx: RenderContext) -> list[Mapping[str, YamlValue]]:
    """The shared volume's claim, if the target asks for one; it has no owner, so that it outlives the run."""
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


def quarantine(ctx: RenderContext) -> Mapping[str, YamlValue]:
    """What the namespace remembers of bad machines; it has no owner, so that it outlives the run."""
    manifest = quarantine_object.MANIFEST
    metadata: YamlValue = {**manifest["metadata"], "namespace": ctx.target.namespace}
    outlives = "Machines that failed: later runs get a node affinity that excludes them. It is created once."
    return {**manifest, "metadata": Commented(metadata, outlives)}


def _secret(ctx: RenderContext, name: str, values: Mapping[str, YamlValue]) -> Mapping[str, YamlValue]:
    return ctx.manifest("v1", "Secret", name, type="Opaque", stringData=values)


def _secret_source(ref: SecretRef) -> str:
    return f"from the variable {ref.env}" if ref.env is not None else f"from the file {ref.file}"
