"""Owns the controller's pod: outside the gang, so that nothing that restarts the gang restarts it; and its address."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.launch.kubernetes.manifest import Because, Node
from holdfast.launch.kubernetes.names import CONTROLLER
from holdfast.launch.kubernetes.pod import confined, home_mount, home_volume, tolerations, user
from holdfast.launch.kubernetes.submission import Submission

PORT = 7433
"""The controller's one port."""

KEYS = "/run/secrets/holdfast"
"""Where tokens and certificates are seen, in the controller's pod and in the nodes'."""

ENTRY = "holdfast.launch.kubernetes.keeper"
NEVER_TOO_OFTEN = 2**31 - 1


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


def job(asked: Submission) -> Mapping[str, Node]:
    """The Job that keeps one controller alive until the run is over."""
    names, profile = asked.names, asked.profile
    labels = names.labels(CONTROLLER)
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": names.controller, "namespace": profile.namespace, "labels": labels},
        "spec": {
            "backoffLimit": Because(
                NEVER_TOO_OFTEN, "Whether the run is over is in its log; no count of ours ends it."
            ),
            "template": {
                "metadata": {"labels": labels},
                "spec": {
                    "restartPolicy": Because("OnFailure", "It goes on from its log, in the same pod where it can."),
                    "serviceAccountName": names.controller,
                    "enableServiceLinks": False,
                    "priorityClassName": profile.priority_class,
                    "tolerations": tolerations(asked) or None,
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


def _container(asked: Submission) -> Node:
    listens: Node = {"tcpSocket": {"port": PORT}}
    return {
        "name": CONTROLLER,
        "image": asked.job.image,
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
        "resources": {
            "requests": {"cpu": "250m", "memory": "256Mi"},
            "limits": {"memory": Because("1Gi", "A run of 2,048 nodes takes 142 MiB; beyond this something is wrong.")},
        },
        "startupProbe": Because(
            {**listens, "periodSeconds": 2, "failureThreshold": 150}, "Five minutes to read a long log."
        ),
        "readinessProbe": listens,
        "livenessProbe": {**listens, "periodSeconds": 10, "failureThreshold": 6},
        "securityContext": confined(),
        "volumeMounts": [
            home_mount(),
            {"name": "job", "mountPath": "/etc/holdfast", "readOnly": True},
            {"name": "keys", "mountPath": KEYS, "readOnly": True},
        ],
    }
