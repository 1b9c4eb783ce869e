"""Renders a run's NetworkPolicies: who may connect to its pods, and to what its pods may connect.

The policies of a pod add up: it may do what any of them allows. They do not apply to the host network, to interfaces
that Multus or GKE add, or to RDMA, which bypasses the kernel.
"""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.job.egress import EgressRule
from holdfast.launch.kubernetes.incluster.sync_server import SYNC_PORT
from holdfast.launch.kubernetes.manifests.controller_objects import CONTROLLER_PORT
from holdfast.launch.kubernetes.manifests.render_context import RenderContext
from holdfast.launch.kubernetes.manifests.yaml_writer import Commented, YamlValue
from holdfast.launch.kubernetes.object_names import CONTROLLER

API_SERVER_PORTS = (443, 6443)
"""Its Service's port, and the usual port of the server itself, which most networks compare after translation."""
DNS_PORT = 53


def network_policies(ctx: RenderContext) -> list[Mapping[str, YamlValue]]:
    """The policy of all pods of the run, and if its target restricts outgoing traffic that of its controller."""
    if not ctx.target.agent:
        return [_of_run(ctx)]
    of_controller = [_of_controller(ctx)] if ctx.target.egress is not None else []
    scrapers = [_of_scrapers(ctx)] if ctx.target.pod_monitor else []
    return [_of_run(ctx), *of_controller, *scrapers, *_of_gateway(ctx)]


def _of_run(ctx: RenderContext) -> Mapping[str, YamlValue]:
    """Allows connections to the run's pods only from its own pods, and from them to what the target allows."""
    names, allowed = ctx.names, ctx.target.egress
    own: YamlValue = [{"podSelector": names.selector()}]
    spec: dict[str, YamlValue] = {
        "podSelector": names.selector(),
        "policyTypes": Commented(["Ingress"], "Outgoing traffic is not restricted: DNS, data sets, checkpoint stores.")
        if allowed is None
        else ["Ingress", "Egress"],
        "ingress": Commented(
            [{"from": own}],
            "TCPStore, Gloo and NCCL ports have no authentication; only the run's own pods may connect.",
        ),
    }
    if allowed is not None:
        dns: YamlValue = [{"protocol": protocol, "port": DNS_PORT} for protocol in ("UDP", "TCP")]
        spec["egress"] = [
            Commented({"to": own}, "Ranks, agents and the controller reach one another."),
            Commented({"ports": dns}, "DNS at any address, as it may be the machine's own cache."),
            *map(_rule, allowed),
        ]
    return ctx.manifest("networking.k8s.io/v1", "NetworkPolicy", names.name, spec=spec)


def _of_controller(ctx: RenderContext) -> Mapping[str, YamlValue]:
    """Allows the controller to reach the API server, whose addresses are not known in advance."""
    ports: YamlValue = [{"protocol": "TCP", "port": port} for port in API_SERVER_PORTS]
    return ctx.manifest(
        "networking.k8s.io/v1",
        "NetworkPolicy",
        ctx.names.controller,
        CONTROLLER,
        spec={
            "podSelector": ctx.names.selector(CONTROLLER),
            "policyTypes": ["Egress"],
            "egress": Commented([{"ports": ports}], "The API server; a policy cannot name it."),
        },
    )


def _of_scrapers(ctx: RenderContext) -> Mapping[str, YamlValue]:
    """Allows connections to the controller from anywhere: where Prometheus runs is not known."""
    anywhere: YamlValue = [{"ports": [{"protocol": "TCP", "port": CONTROLLER_PORT}]}]
    return ctx.manifest(
        "networking.k8s.io/v1",
        "NetworkPolicy",
        f"{ctx.names.controller}-metrics",
        CONTROLLER,
        spec={
            "podSelector": ctx.names.selector(CONTROLLER),
            "policyTypes": ["Ingress"],
            "ingress": Commented(anywhere, "Prometheus; this port requires TLS and a token."),
        },
    )


def _of_gateway(ctx: RenderContext) -> list[Mapping[str, YamlValue]]:
    """Allows the pods that carry a Gateway's traffic to connect to the controller's port for clients."""
    gateway = ctx.target.controller.gateway
    if gateway is None:
        return []
    namespace = gateway.proxies or gateway.namespace or ctx.target.namespace
    pods: YamlValue = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}}}
    ports: YamlValue = [{"protocol": "TCP", "port": SYNC_PORT}]
    spec: YamlValue = {
        "podSelector": ctx.names.selector(CONTROLLER),
        "policyTypes": ["Ingress"],
        "ingress": Commented(
            [{"from": [pods], "ports": ports}], "The Gateway's pods; this port requires TLS and the run's token."
        ),
    }
    name = f"{ctx.names.controller}-gateway"
    return [ctx.manifest("networking.k8s.io/v1", "NetworkPolicy", name, CONTROLLER, spec=spec)]


def _rule(allowed: EgressRule) -> YamlValue:
    to: YamlValue = None
    if allowed.cidr is not None:
        to = [{"ipBlock": {"cidr": allowed.cidr}}]
    elif allowed.namespace is not None or allowed.pods:
        namespace = {"kubernetes.io/metadata.name": allowed.namespace}
        peer: dict[str, YamlValue] = {
            "namespaceSelector": {"matchLabels": namespace} if allowed.namespace else None,
            "podSelector": {"matchLabels": allowed.pods} if allowed.pods else None,
        }
        to = [peer]
    ports: YamlValue = [{"protocol": allowed.protocol, "port": port} for port in allowed.ports] or None
    return {"to": to, "ports": ports}
