"""Checks whether the Gateway leads to the controllers of runs: its conditions and its listeners. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from holdfast.findings import Finding
from holdfast.job.targets import ControllerGateway
from holdfast.launch.kubernetes.client.api_paths import KubeObject
from holdfast.launch.kubernetes.manifests.render_context import RenderContext
from holdfast.launch.kubernetes.preflight.cluster_finding import cluster_finding
from holdfast.launch.kubernetes.preflight.cluster_inventory import NOT_READABLE, ClusterInventory
from holdfast.launch.kubernetes.preflight.operator_kinds import TLS_ROUTES


def gateway(ctx: RenderContext, cluster: ClusterInventory) -> Iterator[Finding]:
    """Checks that the Gateway exists, works, and passes the TLS connections of this namespace's runs through."""
    wanted = ctx.target.controller.gateway
    served = cluster.served.get((TLS_ROUTES.group, TLS_ROUTES.resource))
    if wanted is None or cluster.gateway is NOT_READABLE or not served:
        return
    field, where = "controller.gateway", f"Gateway {wanted.namespace or ctx.target.namespace}/{wanted.name}"
    if cluster.gateway is None:
        remedy = "`kubectl get gateways -A` lists those there are."
        yield cluster_finding("referenced-object-missing", field, f"there is no {where}", remedy)
        return
    if reason := _why_not_programmed(cluster.gateway):
        remedy = f"`kubectl describe gateway {wanted.name}`; the controller of its GatewayClass may not run."
        yield cluster_finding("gateway-not-ready", field, f"{where} is not programmed", remedy, reason)
    if reasons := _why_no_listener(cluster.gateway, wanted, ctx.target.namespace):
        what = f"no listener of {where} passes TLS to RUN.{wanted.host} through to namespace {ctx.target.namespace}"
        remedy = (
            f'Have one added: `protocol: TLS`, `tls: {{mode: Passthrough}}`, `hostname: "*.{wanted.host}"`, and '
            f"`allowedRoutes` that admit the namespace."
        )
        yield cluster_finding("gateway-no-listener", field, what, remedy, *reasons)


def _why_not_programmed(gateway: KubeObject) -> str:
    """What its condition `Programmed` says instead of true; empty if it is true."""
    conditions = {each["type"]: each for each in gateway.get("status", {}).get("conditions", ())}
    found = conditions.get("Programmed", {"status": "missing"})
    if found["status"] == "True":
        return ""
    said = " ".join(f"{found.get('reason', '')} {found.get('message', '')}".split())
    return f"Programmed: {found['status']}" + (f" ({said})" if said else "")


def _why_no_listener(gateway: KubeObject, wanted: ControllerGateway, namespace: str) -> tuple[str, ...]:
    """Why each listener does not take the routes of the namespace's runs; empty if one does."""
    home = gateway["metadata"]["namespace"]
    reasons = [
        (each["name"], next(_obstacles(each, wanted.host, namespace, home), ""))
        for each in gateway["spec"].get("listeners", ())
    ]
    if any(not reason for _, reason in reasons):
        return ()
    return tuple(f"listener {name}: {reason}" for name, reason in reasons) or ("it has no listeners",)


def _obstacles(listener: Any, host: str, namespace: str, home: str) -> Iterator[str]:
    """What keeps a listener from passing the connections through."""
    if listener["protocol"] != "TLS":
        yield f"its protocol is {listener['protocol']}"
    if (mode := listener.get("tls", {}).get("mode", "Terminate")) != "Passthrough":
        yield f"its TLS mode is {mode}"
    if (name := listener.get("hostname")) and not _covers(name, host):
        yield f"its hostname is {name}"
    allowed = listener.get("allowedRoutes", {})
    if (kinds := [each["kind"] for each in allowed.get("kinds", ())]) and "TLSRoute" not in kinds:
        yield f"it takes only routes of kind {', '.join(kinds)}"
    # With `Selector` the labels of the namespace decide, which this user may not read.
    if allowed.get("namespaces", {}).get("from", "Same") == "Same" and namespace != home:
        yield f"it takes only routes of its namespace, {home}"


def _covers(name: str, host: str) -> bool:
    """Whether a listener's hostname matches the names below `host`: its `*.` stands for one or more labels."""
    return name.startswith("*.") and f".{host}".endswith(name[1:])
