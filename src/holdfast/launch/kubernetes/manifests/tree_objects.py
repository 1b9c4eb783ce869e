"""Renders the objects that only a tree of manifests has: it is applied by others, so it has no key and no ids in it."""

from __future__ import annotations

import base64
from collections.abc import Mapping

from holdfast.launch.kubernetes.manifests.render_context import RenderContext
from holdfast.launch.kubernetes.manifests.run_objects import RBAC, rule
from holdfast.launch.kubernetes.manifests.yaml_writer import Commented, YamlValue
from holdfast.launch.kubernetes.object_names import CONTROLLER
from holdfast.launch.kubernetes.tree_job import COMPRESSED_CODE_KEY


def empty_secret(ctx: RenderContext) -> Mapping[str, YamlValue]:
    """The controller's Secret, into which its first pod writes the keys that it generates."""
    kind = Commented("Opaque", "No data: the controller's first pod generates the run's keys.")
    return ctx.manifest("v1", "Secret", ctx.names.controller, CONTROLLER, type=kind)


def key_role(ctx: RenderContext) -> list[Mapping[str, YamlValue]]:
    """What the controller's pod may do to provide the run's keys."""
    names, shared = ctx.names, ctx.target.service_account
    others = (
        f"All trees with the account {shared} let it read their keys, so each of their controllers can read them all."
        if shared
        else "It reads no Secret but its own, so it learns nothing from one that it creates."
    )
    rules: list[YamlValue] = [
        rule("", "secrets", "get", "patch", names=[names.controller]),
        Commented(rule("", "secrets", "create"), f"For {names.keys}, the nodes' tokens. {others}"),
        Commented(rule("", "configmaps", "get", names=[names.name]), "The job, and when it was created."),
    ]
    account = shared or names.controller
    role: YamlValue = {"apiGroup": RBAC, "kind": "Role", "name": names.keys}
    subject: YamlValue = {"kind": "ServiceAccount", "name": account, "namespace": ctx.target.namespace}
    return [
        ctx.manifest(f"{RBAC}/v1", "Role", names.keys, CONTROLLER, rules=rules),
        ctx.manifest(f"{RBAC}/v1", "RoleBinding", names.keys, CONTROLLER, roleRef=role, subjects=[subject]),
    ]


def code_config_map(ctx: RenderContext, compressed_code: bytes) -> list[Mapping[str, YamlValue]]:
    """The job's code; none if the image has it."""
    if ctx.accepted.code is None:
        return []
    data: YamlValue = {COMPRESSED_CODE_KEY: base64.b64encode(compressed_code).decode()}
    return [ctx.manifest("v1", "ConfigMap", ctx.names.code, CONTROLLER, immutable=True, binaryData=data)]
