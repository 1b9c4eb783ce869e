"""Checks a target's `pod.patch`: it may add to the nodes' pods, and change nothing that holdfast renders."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from msgspec import Struct
from msgspec.structs import replace

from holdfast.findings import Finding, Severity
from holdfast.job.rules import RESERVED_NAMES, RESERVED_PREFIXES
from holdfast.job.validation_messages import suggest
from holdfast.job.yaml_source import Path, printable
from holdfast.launch.kubernetes.manifests.pod_patch import (
    CONTAINERS,
    INIT_CONTAINERS,
    MERGE_KEYS,
    RANKS_CONTAINERS,
    Fields,
    with_container_name,
)
from holdfast.launch.kubernetes.manifests.render_context import RenderContext
from holdfast.launch.kubernetes.manifests.run_manifests import render
from holdfast.launch.kubernetes.object_names import NODE, PART_LABEL
from holdfast.launch.kubernetes.preflight.dry_run_pods import templates
from holdfast.launch.kubernetes.preflight.pod_checks import (
    about_target,
    covered,
    key_owner,
    own_volume_names,
    reserved_key,
)
from holdfast.launch.kubernetes.workload_catalog import CATALOG

POD_FIELDS = frozenset(
    {"activeDeadlineSeconds", "affinity", "automountServiceAccountToken", "containers", "dnsConfig", "dnsPolicy"}
    | {"enableServiceLinks", "ephemeralContainers", "evictionResponders", "hostAliases", "hostIPC", "hostNetwork"}
    | {"hostPID", "hostUsers", "hostname", "hostnameOverride", "imagePullSecrets", "initContainers", "nodeName"}
    | {"nodeSelector", "os", "overhead", "preemptionPolicy", "priority", "priorityClassName", "readinessGates"}
    | {"resourceClaims", "resources", "restartPolicy", "runtimeClassName", "schedulerName", "schedulingGates"}
    | {"schedulingGroup", "securityContext", "serviceAccount", "serviceAccountName", "setHostnameAsFQDN"}
    | {"shareProcessNamespace", "subdomain", "terminationGracePeriodSeconds", "tolerations"}
    | {"topologySpreadConstraints", "volumes"}
)
CONTAINER_FIELDS = frozenset(
    {"args", "command", "env", "envFrom", "image", "imagePullPolicy", "lifecycle", "livenessProbe", "name", "ports"}
    | {"readinessProbe", "resizePolicy", "resources", "restartPolicy", "restartPolicyRules", "securityContext"}
    | {"startupProbe", "stdin", "stdinOnce", "terminationMessagePath", "terminationMessagePolicy", "tty"}
    | {"volumeDevices", "volumeMounts", "workingDir"}
)
"""Fields of Kubernetes 1.37; a test compares them with its OpenAPI document. `holdfast check` finds deeper mistakes."""

_OPERATOR = "the run's object or its operator sets it"
_NODES_FIND_ONE_ANOTHER = "ranks find one another by the name that the operator gives the pod"
_USE_FIELD = "holdfast reads it from the target, also to check the cluster"
NOT_TO_SET: Mapping[Fields, tuple[str, str]] = {
    ("spec", "restartPolicy"): (_OPERATOR, ""),
    ("spec", "hostname"): (_NODES_FIND_ONE_ANOTHER, ""),
    ("spec", "subdomain"): (_NODES_FIND_ONE_ANOTHER, ""),
    ("spec", "setHostnameAsFQDN"): (_NODES_FIND_ONE_ANOTHER, ""),
    ("spec", "hostnameOverride"): (_NODES_FIND_ONE_ANOTHER, ""),
    ("spec", "nodeName"): ("it bypasses the scheduler and the queue", "node_selector"),
    ("spec", "schedulingGates"): ("Kueue and the scheduler set them", ""),
    ("spec", "schedulingGroup"): ("Kueue and the scheduler set it", ""),
    ("spec", "activeDeadlineSeconds"): ("a pod that Kubernetes ends counts as a failure, and is replaced", ""),
    ("spec", "ephemeralContainers"): ("a pod cannot be created with them", ""),
    ("spec", "hostNetwork"): ("the fabric decides it", "fabric"),
    ("spec", "priority"): (_USE_FIELD, "priority_class"),
    ("spec", "priorityClassName"): (_USE_FIELD, "priority_class"),
    ("spec", "nodeSelector"): (_USE_FIELD, "node_selector"),
    ("spec", "serviceAccount"): (_USE_FIELD, "pod.service_account"),
    ("spec", "serviceAccountName"): (_USE_FIELD, "pod.service_account"),
    (*CONTAINERS, "args"): ("they would change the command that runs the agent or the ranks", "command"),
    (*CONTAINERS, "workingDir"): ("the job decides where its ranks run", "workdir"),
    (*CONTAINERS, "restartPolicy"): (_OPERATOR, ""),
    (*CONTAINERS, "restartPolicyRules"): (_OPERATOR, ""),
    (*CONTAINERS, "livenessProbe"): ("a kubelet that kills a busy agent kills its ranks", ""),
    (*CONTAINERS, "startupProbe"): ("a kubelet that kills a busy agent kills its ranks", ""),
    (*CONTAINERS, "resources", "requests"): ("a pod's requests equal its limits, so that it is evicted last", ""),
}
"""Fields that a patch may not set even where holdfast renders none: why, and the field of the target or job to use."""

FIELD_FOR: Mapping[Fields, str] = {
    ("spec", "terminationGracePeriodSeconds"): "recovery.stop_grace_s",
    ("spec", "securityContext"): "user",
    (*CONTAINERS, "command"): "command",
    (*CONTAINERS, "env"): "env",
    (*CONTAINERS, "image"): "image",
    (*CONTAINERS, "resources"): "resources",
}
"""The field of the job or the target that decides what holdfast renders, by the first names of a field."""

CHANGEABLE: frozenset[Fields] = frozenset(
    {
        ("spec", "automountServiceAccountToken"),
        ("spec", "enableServiceLinks"),
        ("spec", "tolerations"),
        (*CONTAINERS, "securityContext", "allowPrivilegeEscalation"),
        ("spec", "securityContext", "fsGroupChangePolicy"),
        ("spec", "securityContext", "seccompProfile", "type"),
    }
)
"""Values that holdfast renders and a patch may replace."""

LOOSENED: Mapping[str, tuple[Any, ...]] = {
    "allowPrivilegeEscalation": (True,),
    "hostIPC": (True,),
    "hostPID": (True,),
    "privileged": (True,),
    "procMount": ("Unmasked",),
    "runAsNonRoot": (False,),
    "runAsUser": (0,),
    "type": ("Unconfined",),
}
"""Fields of pods and security contexts, and the values that Pod Security's level `restricted` refuses."""


class _Part(Struct, frozen=True, kw_only=True):
    """A value of the patch, and what holdfast renders in its place."""

    path: Path
    fields: Fields
    value: Any
    rendered: Any


def patch(ctx: RenderContext) -> Iterator[Finding]:
    """A patch adds to the template, and changes only what holdfast leaves to it."""
    own = ctx.target.pod.patch
    if not own:
        return
    named = with_container_name(own, CATALOG[ctx.workload].container)
    whole = _Part(path=("pod", "patch"), fields=(), value=named, rendered=_without_patch(ctx))
    findings = tuple(_check(ctx, whole))
    yield from findings
    if not findings:
        yield from _loosened(named)
        yield from _sidecars(named)


def _without_patch(ctx: RenderContext) -> Mapping[str, Any]:
    """The pod template of a node as holdfast renders it."""
    pod = ctx.target.pod.model_copy(update={"patch": {}})
    plain = render(replace(ctx, target=ctx.target.model_copy(update={"pod": pod})))
    return next(each for each in templates(plain.objects) if each["metadata"]["labels"][PART_LABEL] == NODE)


def rejected_fields(ctx: RenderContext, message: str) -> tuple[Finding, ...]:
    """The fields of the patch that the API server does not know, by its message; empty if it is about others."""
    known = {key: path for path, key, _ in _fields(ctx.target.pod.patch, ("pod", "patch"))}
    names = [name.rpartition(".")[2] for name in _UNKNOWN_FIELD.findall(message)]
    if not names or not known.keys() >= set(names):
        return ()
    what = "the API server knows no field `{}` here"
    remedy = "Write it as in a pod's manifest; `kubectl explain pod.spec` lists the fields."
    return tuple(_error("unknown-field", known[name], what.format(name), remedy) for name in dict.fromkeys(names))


_UNKNOWN_FIELD = re.compile(r'unknown field "([^"]+)"')
"""400 Pod in version "v1" cannot be handled as a Pod: strict decoding error: unknown field "spec.dnsConfig.servers"."""


def _check(ctx: RenderContext, part: _Part) -> Iterator[Finding]:
    value, fields = part.value, part.fields
    if fields in NOT_TO_SET:
        yield _not_to_set(part)
    elif value is None:
        yield _error("pod-patch-refused", part.path, "a patch of a target removes nothing", "Remove the line.")
    elif fields in MERGE_KEYS:
        yield from _check_items(ctx, part)
    elif isinstance(value, dict) and (part.rendered is None or isinstance(part.rendered, dict)):
        yield from _check_fields(ctx, part)
    elif isinstance(part.rendered, dict) or fields in _MAPPINGS:
        yield _wrong_type(part, "a group of fields")
    elif fields[:-1] in _TEXTS and not isinstance(value, str):
        yield _wrong_type(part, "text")
    elif part.rendered is not None and part.rendered != value and fields not in CHANGEABLE:
        yield _changed(part)


_TEXTS: frozenset[Fields] = frozenset({("metadata", "labels"), ("metadata", "annotations")})
_MAPPINGS: frozenset[Fields] = _TEXTS | {("metadata",), ("spec",)}


def _check_fields(ctx: RenderContext, part: _Part) -> Iterator[Finding]:
    known = _KNOWN_FIELDS.get(part.fields)
    rendered: Mapping[str, Any] = part.rendered or {}
    for key, value in cast("Mapping[str, Any]", part.value).items():
        path = (*part.path, key)
        if part.fields in _TEXTS and (owner := key_owner(ctx, key)):
            yield reserved_key(path, key, owner)
        elif known is not None and key not in known:
            yield _unknown(path, key, known)
        else:
            yield from _check(
                ctx, _Part(path=path, fields=(*part.fields, key), value=value, rendered=rendered.get(key))
            )


_KNOWN_FIELDS: Mapping[Fields, frozenset[str]] = {
    (): frozenset({"metadata", "spec"}),
    ("metadata",): frozenset({"labels", "annotations"}),
    ("spec",): POD_FIELDS,
    CONTAINERS: CONTAINER_FIELDS,
    INIT_CONTAINERS: CONTAINER_FIELDS,
}


def _check_items(ctx: RenderContext, part: _Part) -> Iterator[Finding]:
    """Items of a list that Kubernetes merges by a key: new ones are added; of holdfast's only the container changes."""
    if not isinstance(part.value, list):
        yield _wrong_type(part, "a list")
        return
    key = MERGE_KEYS[part.fields]
    there: Mapping[Any, Any] = {each[key]: each for each in part.rendered or ()}
    for number, item in enumerate(cast("Sequence[Any]", part.value)):
        path = (*part.path, number)
        if not isinstance(item, dict) or not isinstance(item.get(key), str | int):
            yield _error(
                "pod-patch-refused", path, f"an item of `{part.fields[-1]}` needs its `{key}`", f"Add `{key}: ...`."
            )
            continue
        name = cast("Mapping[str, Any]", item)[key]
        changed = _Part(path=path, fields=part.fields, value=item, rendered=there.get(name))
        if part.fields == CONTAINERS and name in there:
            yield from _check_fields(ctx, changed)
        elif name in there:
            yield _changed(changed)
        else:
            yield from _check_new_item(ctx, changed, str(name))


def _check_new_item(ctx: RenderContext, part: _Part, name: str) -> Iterator[Finding]:
    """An item that the patch adds; those of sidecars and init containers are theirs, except for holdfast's volumes."""
    item = cast("Mapping[str, Any]", part.value)
    if part.fields in {CONTAINERS, INIT_CONTAINERS}:
        yield from (_unknown((*part.path, key), key, CONTAINER_FIELDS) for key in item if key not in CONTAINER_FIELDS)
        mounts = item.get("volumeMounts")
        for number, mount in enumerate(cast("Sequence[Any]", mounts if isinstance(mounts, list) else ())):
            yield from _own_volume(ctx, (*part.path, "volumeMounts", number), mount)
    elif part.fields == (*CONTAINERS, "volumeMounts"):
        yield from _own_volume(ctx, part.path, item)
        if other := covered(ctx, name):
            what = f"`{printable(name)}` covers or is in {other}, which holdfast mounts"
            yield _error("volume-clash", (*part.path, "mountPath"), what, "Mount it elsewhere.")
    elif part.fields == (*CONTAINERS, "env") and (name in RESERVED_NAMES or name.startswith(RESERVED_PREFIXES)):
        what = f"`{printable(name)}` is set by holdfast for every rank"
        yield _error("reserved-name", part.path, what, "Remove it.")


def _own_volume(ctx: RenderContext, path: Path, mount: Any) -> Iterator[Finding]:
    """Holdfast's volumes hold tokens and the files of all runs; only /dev/shm may be shared."""
    volume = cast("Mapping[str, Any]", mount).get("name") if isinstance(mount, dict) else None
    if volume in own_volume_names(ctx) - {"shm"}:
        what = f"volume `{volume}` is holdfast's, with tokens of the run or files of other runs"
        yield _error("pod-patch-refused", path, what, "Add a volume for it, in `pod.volumes` or in the patch.")


def _not_to_set(part: _Part) -> Finding:
    why, field = NOT_TO_SET[part.fields]
    what = f"`{part.fields[-1]}` is not for a patch: {why}"
    return _error("pod-patch-refused", part.path, what, f"Use `{field}`." if field else "Remove it.")


def _changed(part: _Part) -> Finding:
    """The patch would change something that holdfast renders."""
    field = next((field for first, field in FIELD_FOR.items() if part.fields[: len(first)] == first), "")
    name = part.value.get(MERGE_KEYS[part.fields]) if part.fields in MERGE_KEYS else None
    shown = f"`{printable(str(name))}` in `{part.fields[-1]}`" if name else f"`{part.fields[-1]}`"
    value = "" if isinstance(part.rendered, dict | list) else f" as {printable(str(part.rendered), 60)}"
    what = f"holdfast renders {shown}{value}, and a patch only adds to that"
    remedy = "Remove it; to add, give another name." if name else "Remove it."
    return _error("pod-patch-refused", part.path, what, f"Use `{field}`." if field else remedy)


def _wrong_type(part: _Part, wanted: str) -> Finding:
    return _error("wrong-type", part.path, f"`{part.fields[-1]}` must be {wanted}", "Write it as in a pod's manifest.")


def _unknown(path: Path, key: str, known: frozenset[str]) -> Finding:
    remedy = suggest(key, sorted(known)) or "Use a field of a pod's manifest."
    return _error("unknown-field", path, f"a pod template has no field `{printable(key, 60)}` here", remedy)


def _loosened(named: Mapping[str, Any]) -> Iterator[Finding]:
    """What takes the pods out of Pod Security's level `restricted`."""
    for path, key, value in _fields(named.get("spec"), ("pod", "patch", "spec")):
        added = key == "add" and "capabilities" in path and bool(value)
        if added or any(value == each and type(value) is type(each) for each in LOOSENED.get(key, ())):
            shown = printable(str(value), 60)
            what = f"`{key}: {shown}` gives the pods more rights than Pod Security's `restricted` allows"
            remedy = "`holdfast check` asks whether the namespace allows it."
            yield _warning("pod-patch-loosens-security", path, what, remedy)


def _fields(value: Any, path: Path) -> Iterator[tuple[Path, str, Any]]:
    """Every field in a value: its path, its name, and its own value."""
    match value:
        case dict():
            for key, each in cast("Mapping[str, Any]", value).items():
                yield (*path, key), key, each
                yield from _fields(each, (*path, key))
        case list():
            for number, each in enumerate(cast("Sequence[Any]", value)):
                yield from _fields(each, (*path, number))
        case _:
            pass


def _sidecars(named: Mapping[str, Any]) -> Iterator[Finding]:
    """A pod ends only when all its containers have ended; a sidecar is an init container that restarts."""
    for number, container in enumerate(named.get("spec", {}).get("containers", ())):
        if container["name"] not in RANKS_CONTAINERS:
            path: Path = ("pod", "patch", "spec", "containers", number)
            what = f"a pod ends when all its containers have ended, so `{container['name']}` must end with the ranks"
            remedy = "If it runs until it is stopped, write it under `initContainers` with `restartPolicy: Always`."
            yield _warning("sidecar-keeps-pod", path, what, remedy)


def _error(code: str, path: Path, what: str, remedy: str) -> Finding:
    return about_target(code, path, what, remedy)


def _warning(code: str, path: Path, what: str, remedy: str) -> Finding:
    return about_target(code, path, what, remedy, severity=Severity.WARNING)
