"""A Gateway of Traefik in a lab, for as long as a test needs it; built with Go the first time.

Traefik runs in a pod, with the rights of its account, and reaches other pods over their network. `pod_forward` has the
role of the load balancer before it.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Generator
from typing import Any

from holdfast.host import processes
from lab.install import await_established
from lab.lab import Lab
from lab.runner import MARK
from lab.toolchain import TRAEFIK, program_folder, source_folder

NAME = "runs"
"""Of the Gateway, and of what belongs to it."""
PORT = 8443
"""Of its listener."""
_GROUP = "gateway.networking.k8s.io"
_CRDS = "config/crd/standard"
_KINDS = tuple(
    f"{kind}.{_GROUP}"
    for kind in (
        "backendtlspolicies",
        "gatewayclasses",
        "gateways",
        "grpcroutes",
        "httproutes",
        "referencegrants",
        "tlsroutes",
    )
)
_WITHIN = "60s"


def install_gateway_kinds(lab: Lab) -> None:
    """Have a lab serve the kinds of Gateway API."""
    lab.kubectl("apply", "--server-side", "-f", source_folder(TRAEFIK, "sigs.k8s.io/gateway-api") / _CRDS)
    await_established(lab.client(), _KINDS)


@contextlib.contextmanager
def traefik_gateway(lab: Lab, namespace: str, host: str) -> Generator[int]:
    """Run Traefik and a Gateway that passes TLS for `*.HOST` through to any namespace; yields its port here."""
    install_gateway_kinds(lab)
    objects = _objects(namespace, host)
    listed = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
    lab.kubectl("apply", "--server-side", "-f", "-", input=listed)  # else it downloads the kinds of the whole server
    try:
        for what, condition in ((f"pod/{NAME}", "Ready"), (f"gateway/{NAME}", "Programmed")):
            lab.kubectl("wait", what, "-n", namespace, f"--for=condition={condition}", f"--timeout={_WITHIN}")
        with _forwarded(lab, namespace) as port:
            yield port
    finally:
        lab.kubectl("delete", "namespace", namespace, "--wait=false")
        for kind in ("gatewayclass", "clusterrole", "clusterrolebinding"):
            lab.kubectl("delete", kind, NAME)


@contextlib.contextmanager
def _forwarded(lab: Lab, namespace: str) -> Generator[int]:
    forwarder = subprocess.Popen(
        (sys.executable, "-m", "lab.pod_forward", namespace, NAME, str(PORT)),
        env={**os.environ, MARK: str(lab.folder), "KUBECONFIG": str(lab.kubeconfig)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=processes.die_with_parent,  # noqa: PLW1509 it makes one system call
    )
    assert forwarder.stdout is not None
    try:
        yield int(forwarder.stdout.readline())
    finally:
        forwarder.kill()
        forwarder.wait()
        forwarder.stdout.close()


def _objects(namespace: str, host: str) -> list[dict[str, Any]]:
    own = {"name": NAME, "namespace": namespace}
    rbac = "rbac.authorization.k8s.io"
    read = ["get", "list", "watch"]
    rules = [
        {"apiGroups": [""], "resources": ["namespaces", "services", "secrets", "configmaps"], "verbs": read},
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": read},
        {"apiGroups": [_GROUP], "resources": ["*"], "verbs": [*read, "update"]},
    ]
    command = [
        str(program_folder(TRAEFIK) / "traefik"),
        "--providers.kubernetesgateway",
        f"--entrypoints.{NAME}.address=:{PORT}",
        "--providers.kubernetesgateway.statusaddress.hostname=localhost",
        "--global.checknewversion=false",
        "--global.sendanonymoususage=false",
    ]
    container = {
        "name": NAME,
        "image": "none",
        "command": command,
        "readinessProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 1},
    }
    listener = {
        "name": "tls",
        "protocol": "TLS",
        "port": PORT,
        "hostname": f"*.{host}",
        "tls": {"mode": "Passthrough"},
        "allowedRoutes": {"namespaces": {"from": "All"}},
    }
    return [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}},
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": own},
        {"apiVersion": f"{rbac}/v1", "kind": "ClusterRole", "metadata": {"name": NAME}, "rules": rules},
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": NAME},
            "roleRef": {"apiGroup": rbac, "kind": "ClusterRole", "name": NAME},
            "subjects": [{"kind": "ServiceAccount", **own}],
        },
        {
            "apiVersion": f"{_GROUP}/v1",
            "kind": "GatewayClass",
            "metadata": {"name": NAME},
            "spec": {"controllerName": "traefik.io/gateway-controller"},
        },
        {
            "apiVersion": f"{_GROUP}/v1",
            "kind": "Gateway",
            "metadata": own,
            "spec": {"gatewayClassName": NAME, "listeners": [listener]},
        },
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": own,
            "spec": {"serviceAccountName": NAME, "containers": [container]},
        },
    ]
