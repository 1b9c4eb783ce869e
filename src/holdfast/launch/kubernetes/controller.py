"""Owns the controller's pod: outside the gang, so that nothing that restarts the gang restarts it; and its address."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.launch.kubernetes.manifest import Because, Node
from holdfast.launch.kubernetes.mounts import whole
from holdfast.launch.kubernetes.names import CONTROLLER
from holdfast.launch.kubernetes.pod import confined, cores, home_volume, quantity, tolerations, user
from holdfast.launch.kubernetes.submission import Submission

PORT = 7433
"""The controller's one port."""

KEYS = "/run/secrets/holdfast"
"""Where tokens and certificates are seen, in the controller's pod and in the nodes'."""

ENTRY = "holdfast.launch.kubernetes.keeper"


def service(asked: Submission) -> Mapping[str, Node]:
    """The controller's name in the cluster."""
    names = asked.names
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": names.controller,
            "namespace": asked.profile.namespace,
            "labels": names.labels(CONTROLLER),
        },
        "spec": {
            "clusterIP": Because(
                "None", "The name is the pod's own address, which agents look up each time they connect."
            ),
            "publishNotReadyAddresses": Because(
                True, "A controller that is reading its log is waited for, not unknown."
            ),
            "selector": names.selector(CONTROLLER)["matchLabels"],
            "ports": [{"name": "agents", "port": PORT}],
        },
    }


def mark(asked: Submission) -> list[Mapping[str, Node]]:
    """Where the first pod says that there was one, which a later one cannot know where no volume has the log."""
    if asked.accepted.lasting:
        return []
    about = {
        "name": asked.names.controller,
        "namespace": asked.profile.namespace,
        "labels": asked.names.labels(CONTROLLER),
    }
    return [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": about}]


def replicaset(asked: Submission) -> Mapping[str, Node]:
    """What keeps one controller alive, until that says that the run is over."""
    names, profile, own = asked.names, asked.profile, asked.profile.controller
    labels = names.labels(CONTROLLER)
    return {
        "apiVersion": "apps/v1",
        "kind": "ReplicaSet",
        "metadata": {"name": names.controller, "namespace": profile.namespace, "labels": labels},
        "spec": {
            "replicas": Because(1, "A lost pod is replaced at once, however often. The last one sets this to 0."),
            "selector": names.selector(CONTROLLER),
            "template": {
                "metadata": {"labels": labels},
                "spec": {
                    "serviceAccountName": profile.service_account or names.controller,
                    "automountServiceAccountToken": Because(
                        True, "It asks the API server, whatever a ready-made account says."
                    ),
                    "enableServiceLinks": False,
                    "priorityClassName": profile.priority_class,
                    "nodeSelector": own.node_selector or None,
                    "tolerations": tolerations(own.tolerations) or None,
                    "imagePullSecrets": [{"name": name} for name in profile.image_pull_secrets] or None,
                    "securityContext": user(profile.user),
                    "containers": [_container(asked)],
                    "volumes": [
                        home_volume(asked),
                        {"name": "job", "configMap": {"name": names.name}},
                        {
                            "name": "keys",
                            "secret": {"secretName": names.controller, "defaultMode": Because(0o440, "0440")},
                        },
                    ],
                },
            },
        },
    }


def requests(asked: Submission) -> Mapping[str, Node]:
    """What the controller's pod asks its machine for."""
    own = asked.profile.controller
    return {"cpu": cores(own.cpu), "memory": quantity(own.memory)}


def limits(asked: Submission) -> Mapping[str, Node]:
    """What the controller's pod may use of its machine."""
    own = asked.profile.controller
    return {
        "cpu": cores(own.cpu_limit),
        "memory": Because(
            quantity(own.memory_limit), "A run of 2,048 nodes takes 142 MiB; beyond this something is wrong."
        ),
    }


def _container(asked: Submission) -> Node:
    own = asked.profile.controller
    listens: Node = {"tcpSocket": {"port": PORT}}
    return {
        "name": CONTROLLER,
        "image": own.image or asked.job.image,
        "command": [
            "python",
            "-m",
            ENTRY,
            asked.run_folder,
            "--job",
            "/etc/holdfast/job.json",
            "--keys",
            KEYS,
            "--port",
            str(PORT),
        ],
        "ports": [{"name": "agents", "containerPort": PORT}],
        "resources": {"requests": requests(asked), "limits": limits(asked)},
        "startupProbe": Because(
            {**listens, "periodSeconds": 2, "failureThreshold": 150}, "Five minutes to read a long log."
        ),
        "readinessProbe": listens,
        "livenessProbe": {**listens, "periodSeconds": 10, "failureThreshold": 6},
        "securityContext": confined(),
        "volumeMounts": [
            whole(),
            {"name": "job", "mountPath": "/etc/holdfast", "readOnly": True},
            {"name": "keys", "mountPath": KEYS, "readOnly": True},
        ],
    }
