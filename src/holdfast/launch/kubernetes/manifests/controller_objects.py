"""Renders the controller's ReplicaSet and Service, outside the gang, so that a gang restart does not restart it."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.launch.kubernetes.client.gateway_port import GatewayRoute
from holdfast.launch.kubernetes.incluster.sync_server import SYNC_PORT
from holdfast.launch.kubernetes.manifests.pod_additions import pod_metadata
from holdfast.launch.kubernetes.manifests.pod_template import (
    container_security_context,
    home_volume,
    pod_security_context,
    tolerations,
)
from holdfast.launch.kubernetes.manifests.quantities import format_cores, format_quantity
from holdfast.launch.kubernetes.manifests.render_context import RenderContext
from holdfast.launch.kubernetes.manifests.volume_mounts import whole_volume
from holdfast.launch.kubernetes.manifests.yaml_writer import Commented, YamlValue
from holdfast.launch.kubernetes.object_names import CONTROLLER, JOB_KEY, METRICS_TOKEN_KEY, QUEUE_LABEL
from holdfast.protocol import routes
from holdfast.security.tls import CONTROLLER_NAME

CONTROLLER_PORT = 7433
"""The controller's only port."""

PORT_NAME = "agents"
CLIENT_PORT_NAME = "clients"

GATEWAY_GROUP, GATEWAY_VERSION = "gateway.networking.k8s.io", "v1"
"""Of the TLSRoute, which Gateway API serves in this version since 1.5."""

KEYS_DIR = "/run/secrets/holdfast"
"""Mount path of tokens and certificates, in the controller's pod and in the nodes'."""

SUPERVISOR_MODULE = "holdfast.launch.kubernetes.incluster.pod_supervisor"
PREPARE_MODULE = "holdfast.launch.kubernetes.incluster.prepare_controller"
JOB_DIR, SECRETS_DIR, CODE_DIR = "/etc/holdfast", "/run/secrets/job", "/run/holdfast/code"
"""Mount paths of the ConfigMap with the job, and in a tree of the job's secrets and the code."""


def service(ctx: RenderContext) -> Mapping[str, YamlValue]:
    """The headless Service that gives the controller its DNS name."""
    names = ctx.names
    return ctx.manifest(
        "v1",
        "Service",
        names.controller,
        CONTROLLER,
        spec={
            "clusterIP": Commented(
                "None", "The name resolves to the pod's address; agents look it up at every connection."
            ),
            "publishNotReadyAddresses": Commented(True, "The name also resolves while a new controller reads its log."),
            "selector": names.selector(CONTROLLER)["matchLabels"],
            "ports": [
                {"name": PORT_NAME, "port": CONTROLLER_PORT},
                *([{"name": CLIENT_PORT_NAME, "port": SYNC_PORT}] if ctx.target.controller.gateway else ()),
            ],
        },
    )


def tls_route(ctx: RenderContext) -> list[Mapping[str, YamlValue]]:
    """The TLSRoute that leads from the target's Gateway to the controller, if users reach it so."""
    gateway, route = ctx.target.controller.gateway, GatewayRoute.of(ctx.target.controller.gateway, ctx.names.name)
    if gateway is None or route is None:
        return []
    names = ctx.names
    parent: YamlValue = {"name": gateway.name, "namespace": gateway.namespace or ctx.target.namespace}
    backend: YamlValue = {"name": names.controller, "port": SYNC_PORT}
    spec: YamlValue = {
        "parentRefs": [parent],
        "hostnames": Commented(
            [route.host], "The Gateway routes by this name and does not decrypt: TLS ends at the controller."
        ),
        "rules": [{"backendRefs": [backend]}],
    }
    return [ctx.manifest(f"{GATEWAY_GROUP}/{GATEWAY_VERSION}", "TLSRoute", names.name, CONTROLLER, spec=spec)]


def pod_monitor(ctx: RenderContext) -> list[Mapping[str, YamlValue]]:
    """The PodMonitor by which the Prometheus operator scrapes the controller, if the target wants one."""
    if not ctx.target.pod_monitor:
        return []
    names = ctx.names
    endpoint: YamlValue = {
        "port": PORT_NAME,
        "path": routes.METRICS,
        "scheme": "https",
        "authorization": Commented(
            {"credentials": {"name": names.keys, "key": METRICS_TOKEN_KEY}}, "A token that only reads metrics."
        ),
        "tlsConfig": {"ca": {"secret": {"name": names.keys, "key": "ca.pem"}}, "serverName": CONTROLLER_NAME},
    }
    spec: YamlValue = {"selector": names.selector(CONTROLLER), "podMetricsEndpoints": [endpoint]}
    return [ctx.manifest("monitoring.coreos.com/v1", "PodMonitor", names.controller, CONTROLLER, spec=spec)]


def first_pod_marker(ctx: RenderContext) -> list[Mapping[str, YamlValue]]:
    """The ConfigMap in which the first controller pod records itself, for later pods without a volume with the log."""
    if ctx.accepted.durable_controller_disk:
        return []
    return [ctx.manifest("v1", "ConfigMap", ctx.names.controller, CONTROLLER)]


def replicaset(ctx: RenderContext) -> Mapping[str, YamlValue]:
    """The ReplicaSet that keeps one controller running until the run is over."""
    names, target, own = ctx.names, ctx.target, ctx.target.controller
    return ctx.manifest(
        "apps/v1",
        "ReplicaSet",
        names.controller,
        CONTROLLER,
        spec={
            "replicas": _replicas(ctx),
            "selector": names.selector(CONTROLLER),
            "template": {
                "metadata": pod_metadata(ctx, CONTROLLER, labels=_queue_label(ctx)),
                "spec": {
                    "serviceAccountName": target.service_account or names.controller,
                    "automountServiceAccountToken": Commented(
                        True, "The controller calls the API server, even if its service account disables the token."
                    ),
                    "enableServiceLinks": False,
                    "priorityClassName": target.priority_class,
                    "nodeSelector": own.node_selector or None,
                    "tolerations": tolerations(own.tolerations) or None,
                    "imagePullSecrets": [{"name": name} for name in target.image_pull_secrets] or None,
                    "securityContext": pod_security_context(target.user),
                    "initContainers": [_prepare_container(ctx)] if ctx.accepted.from_tree else None,
                    "containers": [_container(ctx)],
                    "volumes": [home_volume(ctx), *(_tree_volumes(ctx) if ctx.accepted.from_tree else _volumes(ctx))],
                },
            },
        },
    )


def _replicas(ctx: RenderContext) -> YamlValue:
    if ctx.accepted.from_tree:
        return None  # a tree that is applied again must not start another controller
    if ctx.target.multikueue:
        return Commented(0, "The controller runs in the worker cluster, with a copy of these objects.")
    return Commented(1, "Lost pods are replaced immediately, without limit; 0 once the run is over.")


def _queue_label(ctx: RenderContext) -> Mapping[str, YamlValue]:
    """The queue of the controller's pod in a tree, where it has no owner that Kueue has admitted."""
    queue = ctx.target.controller.queue
    if queue is None or not ctx.accepted.from_tree:
        return {}
    return {QUEUE_LABEL: Commented(queue, "Of all controllers: in the run's queue it could wait for its own nodes.")}


def requests(ctx: RenderContext) -> Mapping[str, YamlValue]:
    """Resource requests of the controller's pod."""
    own = ctx.target.controller
    return {"cpu": format_cores(own.cpu), "memory": format_quantity(own.memory)}


def limits(ctx: RenderContext) -> Mapping[str, YamlValue]:
    """Resource limits of the controller's pod."""
    own = ctx.target.controller
    return {
        "cpu": format_cores(own.cpu_limit),
        "memory": Commented(
            format_quantity(own.memory_limit), "A run of 2,048 nodes needs 142 MiB; more than this limit is a fault."
        ),
    }


def _volumes(ctx: RenderContext) -> list[YamlValue]:
    return [
        {"name": "job", "configMap": {"name": ctx.names.name}},
        {"name": "keys", "secret": {"secretName": ctx.names.controller, "defaultMode": Commented(0o440, "0440")}},
    ]


def _tree_volumes(ctx: RenderContext) -> list[YamlValue]:
    """The keys, and what the init container makes them and the controller's other inputs of."""
    volumes: list[YamlValue] = [
        {"name": "keys", "emptyDir": {"medium": Commented("Memory", "Keys are never on a disk.")}}
    ]
    if items := [{"key": name, "path": name} for name in ctx.job.secrets]:
        whence = "The job's secrets. The tree has none: create this Secret, for example with External Secrets."
        source: YamlValue = {
            "secretName": Commented(ctx.names.secrets, whence),
            "items": items,
            "defaultMode": Commented(0o440, "0440"),
        }
        volumes.append({"name": "secrets", "secret": source})
    if ctx.accepted.code is not None:
        volumes.append({"name": "code", "configMap": {"name": ctx.names.code}})
    return volumes


def _prepare_container(ctx: RenderContext) -> YamlValue:
    """The init container that collects the controller's inputs: the first pod's generates the run's keys."""
    own = ctx.target.controller
    mounted: list[YamlValue] = [{"name": "keys", "mountPath": KEYS_DIR}]
    if ctx.job.secrets:
        mounted.append({"name": "secrets", "mountPath": SECRETS_DIR, "readOnly": True})
    if ctx.accepted.code is not None:
        mounted.append({"name": "code", "mountPath": CODE_DIR, "readOnly": True})
    words = [ctx.names.name, KEYS_DIR, "--secrets", SECRETS_DIR, "--code", CODE_DIR]
    return {
        "name": "keys",
        "image": own.image or ctx.job.image,
        "imagePullPolicy": ctx.target.pod.pull_policy,
        "command": Commented(
            ["python", "-m", PREPARE_MODULE, *words],
            f"The first pod generates the run's keys, into the Secrets {ctx.names.controller} and {ctx.names.keys}; "
            "the nodes' pods wait for the second.",
        ),
        "resources": {"requests": requests(ctx), "limits": limits(ctx)},
        "securityContext": container_security_context(),
        "volumeMounts": mounted,
    }


def _container(ctx: RenderContext) -> YamlValue:
    own, from_tree = ctx.target.controller, ctx.accepted.from_tree
    job: YamlValue = {"name": "job", "mountPath": JOB_DIR, "readOnly": True}
    listens: YamlValue = {"tcpSocket": {"port": CONTROLLER_PORT}}
    return {
        "name": CONTROLLER,
        "image": own.image or ctx.job.image,
        "imagePullPolicy": ctx.target.pod.pull_policy,
        "command": [
            "python",
            "-m",
            SUPERVISOR_MODULE,
            ctx.run_dir,
            "--job",
            f"{KEYS_DIR if from_tree else JOB_DIR}/{JOB_KEY}",
            "--keys",
            KEYS_DIR,
            "--port",
            str(CONTROLLER_PORT),
            *(["--gateway"] if own.gateway else ()),
        ],
        "ports": [
            {"name": PORT_NAME, "containerPort": CONTROLLER_PORT},
            *([{"name": CLIENT_PORT_NAME, "containerPort": SYNC_PORT}] if own.gateway else ()),
        ],
        "resources": {"requests": requests(ctx), "limits": limits(ctx)},
        "startupProbe": Commented(
            {**listens, "periodSeconds": 2, "failureThreshold": 150}, "A long log takes up to 5 minutes to read."
        ),
        "readinessProbe": listens,
        "livenessProbe": {**listens, "periodSeconds": 10, "failureThreshold": 6},
        "securityContext": container_security_context(),
        "volumeMounts": [
            whole_volume(),
            *(() if from_tree else (job,)),
            {"name": "keys", "mountPath": KEYS_DIR, "readOnly": True},
        ],
    }
