"""Renders the templates of the Helm chart with the code that renders runs and policies, so that both agree.

python -m deploy.render_chart

It renders each object with placeholders of a namespace, an account and so on, and replaces these by Helm's expressions.
Templates use only Go's template language, `join` and `toJson`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from holdfast.job.run_spec import RunSpec
from holdfast.job.spec import Job
from holdfast.job.targets import (
    ControllerGateway,
    ControllerPod,
    Evictions,
    GangScheduler,
    TargetSpec,
    Volume,
    Workload,
)
from holdfast.launch.kubernetes.manifests import run_objects
from holdfast.launch.kubernetes.manifests.policies import RULES, render_policies
from holdfast.launch.kubernetes.manifests.render_context import RenderContext
from holdfast.launch.kubernetes.manifests.yaml_writer import YamlValue, to_plain, to_yaml
from holdfast.launch.kubernetes.object_names import VOLUME_ROOT, ObjectNames
from holdfast.launch.kubernetes.preflight.run_permissions import required_permissions
from holdfast.launch.kubernetes.quarantine_object import NAME as QUARANTINE
from holdfast.launch.kubernetes.workload_catalog import CATALOG
from holdfast.launch.policy_request import PolicyRequest
from holdfast.observe.monitoring_files import monitoring_objects

CHART = Path(__file__).parent / "chart"
GENERATED = "{{- /* Generated: python -m deploy.render_chart */ -}}\n"
NAMESPACE, ACCOUNT = "chart-namespace", "chart-account"
GPU, LABEL, FABRIC = "chart.example/gpu", "chart.example/label", "chart-fabric"
CLAIM, CLASS, SIZE = "chart-claim", "chart-class", "7Gi"
RBAC = "rbac.authorization.k8s.io"
EXPRESSIONS = {
    NAMESPACE: "{{ .Release.Namespace }}",
    ACCOUNT: "{{ .Values.controllerAccount }}",
    GPU: "{{ .Values.policies.gpuResource }}",
    f"'{FABRIC}'": """'{{ join "', '" .Values.policies.fabrics }}'""",
    FABRIC: '{{ join ", " .Values.policies.fabrics }}',
    CLAIM: "{{ .Values.claim.name }}",
    CLASS: "{{ .Values.claim.storageClass }}",
    SIZE: "{{ .Values.claim.size }}",
}
KEEP = {"helm.sh/resource-policy": "keep"}
"""Annotation of what outlives the chart, as it outlives runs."""


Rule = Mapping[str, Sequence[str] | None]
"""A rule of a Role."""


def templates() -> Mapping[str, str]:
    """The text of each generated template, by file name."""
    return {
        "controllers.yaml": _template(_controllers()) + _if("cordon", _template(_cordon(), head="")),
        "users.yaml": _template(_users()).replace("subjects: []", "subjects: {{ toJson .Values.users }}"),
        "followers.yaml": _template(_followers()).replace("subjects: []", "subjects: {{ toJson .Values.followers }}"),
        "policies.yaml": GENERATED + "".join(_policy(rule.name) for rule in RULES),
        "lasting.yaml": GENERATED + _lasting(),
        "observe.yaml": GENERATED + _observe(),
    }


def _context(
    workload: Workload, *, account: str | None, gangs: GangScheduler | None = None, gateway: bool = False
) -> RenderContext:
    """A run of each kind: with the target's account or its own, without a volume, which takes more permissions."""
    job = Job.model_validate({"command": ["true"], "image": "image", "nodes": 2})
    spec = TargetSpec(
        kind="kubernetes",
        namespace=NAMESPACE,
        workload=workload,
        service_account=account,
        queue="queue",
        evictions=Evictions.NONE,  # takes another object, and so does the next line
        pod_group=gangs,
        controller=ControllerPod(gateway=ControllerGateway(name="runs", host="runs.example") if gateway else None),
    )
    accepted = RunSpec(
        job=job,
        base=VOLUME_ROOT,
        created_at=0.0,
        fabric="dra",  # whose devices take another object
        target_kind=spec.kind,
        workload=workload,
        durable_controller_disk=False,
    )
    return RenderContext(accepted=accepted, target=spec, names=ObjectNames("run"))


def _controllers() -> list[Mapping[str, YamlValue]]:
    """The account of all controllers: what a run's own Role permits, for runs of any name."""
    found = list[Rule]()
    for workload in Workload:
        (role,) = (each for each in run_objects.rbac(_context(workload, account=None)) if each["kind"] == "Role")
        found += [{**rule, "resourceNames": _lasting_names(rule)} for rule in to_plain(role)["rules"]]
    return _bound(ACCOUNT, _merged(found), [{"kind": "ServiceAccount", "name": ACCOUNT, "namespace": NAMESPACE}])


def _lasting_names(rule: Mapping[str, Sequence[str]]) -> Sequence[str] | None:
    """Names of a rule that do not depend on the run."""
    names = rule.get("resourceNames", ())
    return names if QUARANTINE in names else None


def _cordon() -> list[Mapping[str, YamlValue]]:
    """Permission to count the cluster's machines and to cordon one whose device failed."""
    name, version = f"{ACCOUNT}-{NAMESPACE}", f"{RBAC}/v1"
    rules: YamlValue = [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["list", "patch"]}]
    role: YamlValue = {"apiGroup": RBAC, "kind": "ClusterRole", "name": name}
    subject: YamlValue = {"kind": "ServiceAccount", "name": ACCOUNT, "namespace": NAMESPACE}
    return [
        {"apiVersion": version, "kind": "ClusterRole", "metadata": {"name": name}, "rules": rules},
        {
            "apiVersion": version,
            "kind": "ClusterRoleBinding",
            "metadata": {"name": name},
            "roleRef": role,
            "subjects": [subject],
        },
    ]


def _users() -> list[Mapping[str, YamlValue]]:
    """What users need to start runs with the controllers' account, and to release machines from the quarantine."""
    rules = list[Rule]()
    runs = [
        *(_context(workload, account=ACCOUNT) for workload in Workload),
        *(_context(Workload.JOBSET, account=ACCOUNT, gangs=gangs) for gangs in GangScheduler),
        _context(Workload.JOBSET, account=ACCOUNT, gateway=True),
    ]
    for each in (right for run in runs for right in required_permissions(run)):
        resource = f"{each.resource}/{each.subresource}".rstrip("/")
        rules.append({"apiGroups": [each.group], "resources": [resource], "verbs": [each.verb]})
    rules += [_rule("", "configmaps", "get"), {**_rule("", "configmaps", "patch"), "resourceNames": [QUARANTINE]}]
    return _bound("holdfast-users", _merged(rules), [])[1:]


def _followers() -> list[Mapping[str, YamlValue]]:
    """What users need to list, follow and end the runs that others started."""
    rules = [_rule(kind.group, kind.resource, "list", "get", "delete") for kind in CATALOG.values()]
    rules += [_rule("", "configmaps", "get"), _rule("", "secrets", "get"), _rule("apps", "replicasets", "get")]
    rules += [_rule("", "pods", "list"), _rule("", "pods/portforward", "get", "create"), _rule("", "pods/log", "get")]
    return _bound("holdfast-followers", _merged(rules), [])[1:]


def _rule(group: str, resource: str, *verbs: str) -> Rule:
    return {"apiGroups": [group], "resources": [resource], "verbs": verbs}


def _bound(name: str, rules: Sequence[YamlValue], subjects: Sequence[YamlValue]) -> list[Mapping[str, YamlValue]]:
    """An account, a Role, and the binding of the Role to the subjects."""
    metadata: YamlValue = {"name": name, "namespace": NAMESPACE}
    role: YamlValue = {"apiGroup": RBAC, "kind": "Role", "name": name}
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata},
        {"apiVersion": f"{RBAC}/v1", "kind": "Role", "metadata": metadata, "rules": rules},
        {
            "apiVersion": f"{RBAC}/v1",
            "kind": "RoleBinding",
            "metadata": metadata,
            "roleRef": role,
            "subjects": subjects,
        },
    ]


def _merged(rules: Sequence[Rule]) -> list[YamlValue]:
    """The rules, with one for all verbs of the same resources."""
    verbs = dict[str, dict[str, None]]()
    for each in rules:
        about = {key: value for key, value in each.items() if key != "verbs" and value}
        verbs.setdefault(json.dumps(about), {}).update(dict.fromkeys(each["verbs"] or ()))
    return [{**json.loads(about), "verbs": list(found)} for about, found in verbs.items()]


def _policy(name: str) -> str:
    """A policy and its binding, if the values ask for it."""
    spec = TargetSpec(kind="kubernetes", namespace=NAMESPACE, gpu_resource=GPU)
    enforced, warned = (
        to_yaml(
            [
                each
                for each in render_policies(spec, PolicyRequest(fabrics=[FABRIC], labels=[LABEL], enforce=enforce))
                if f"-{name}-" in to_plain(each)["metadata"]["name"]
            ]
        )
        for enforce in (True, False)
    )
    deny, warn = (re.findall(r"  validationActions: (\[.*\])\n", text)[0] for text in (enforced, warned))
    choice = f"{{{{ if .Values.policies.enforce }}}}{deny}{{{{ else }}}}{warn}{{{{ end }}}}"
    text = enforced.replace(f"validationActions: {deny}", f"validationActions: {choice}")
    if LABEL in text:
        items = r"(  validations:\n)((?:  (?:-|  ).*\n)+)"
        repeated = r"\1{{- range .Values.policies.labels }}\n\2{{- end }}\n"
        text = re.sub(items, repeated, text).replace(LABEL, "{{ . }}")
    values = {"fabric": "fabrics"}
    return _if(f"policies.{values.get(name, name)}", _filled(text))


def _lasting() -> str:
    """What outlives runs and the chart: the quarantine and the claim."""
    ctx = _context(Workload.JOBSET, account=None)
    volume = Volume(claim=CLAIM, size=7 << 30, storage_class=CLASS)
    with_claim = RenderContext(
        accepted=ctx.accepted, target=ctx.target.model_copy(update={"volume": volume}), names=ctx.names
    )
    quarantine = to_plain(run_objects.quarantine(ctx))
    (claim,) = map(to_plain, run_objects.volume_claim(with_claim))
    for each in (quarantine, claim):
        each["metadata"]["annotations"] = KEEP
    text = _filled(to_yaml([claim]))
    line = f"  storageClassName: {EXPRESSIONS[CLASS]}\n"
    assert line in text
    text = text.replace(line, _if("claim.storageClass", line))
    return _if("quarantine", _filled(to_yaml([quarantine]))) + _if("claim.size", text)


def _observe() -> str:
    """The alerts and dashboards of `holdfast observe render`, whose texts have braces that are not Helm's."""
    alerts, *dashboards = (
        cast("Mapping[str, YamlValue]", {**each, "metadata": {**each["metadata"], "namespace": NAMESPACE}})
        for each in cast("list[dict[str, Any]]", monitoring_objects())
    )

    def verbatim(objects: Sequence[Mapping[str, YamlValue]]) -> str:
        return _filled(to_yaml(objects).replace("{{", '{{ "{{" }}'))

    return _if("alerts", verbatim([alerts])) + _if("dashboards", verbatim(dashboards))


def _template(objects: Sequence[Mapping[str, YamlValue]], *, head: str = GENERATED) -> str:
    return head + _filled(to_yaml(objects))


def _filled(text: str) -> str:
    for placeholder, expression in EXPRESSIONS.items():
        text = text.replace(placeholder, expression)
    return text


def _if(value: str, text: str) -> str:
    return f"{{{{- if .Values.{value} }}}}\n{text}{{{{- end }}}}\n"


def main() -> None:
    """Write the templates."""
    for name, text in templates().items():
        (CHART / "templates" / name).write_text(text)


if __name__ == "__main__":
    main()
