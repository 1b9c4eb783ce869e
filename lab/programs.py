"""Owns how each program of a lab is called: words, configuration, environment, and where it says that it is ready.

One row a program, in the order of their start. Each listens on the loopback address only.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.kubelet.configuration import Configuration
from lab.kubelet.nodes import NodeSpec
from lab.state import SUPERVISOR

_LOST_AFTER_S = 10
"""How long after its last word a node is lost."""
_RATE = ("--kube-api-qps=200", "--kube-api-burst=400")
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a lab's things are."""

    folder: Path
    data: Path
    """etcd's."""
    controlplane: Path
    operators: Path
    published: Path
    """What the operators publish (manifests.py)."""
    ports: Mapping[str, int]
    nodes: tuple[NodeSpec, ...]

    @property
    def pki(self) -> Path:
        return self.folder / "pki"

    @property
    def kubeconfig(self) -> Path:
        return self.folder / "kubeconfig"

    @property
    def server(self) -> str:
        return f"https://{self.address('kube-apiserver')}"

    def address(self, name: str) -> str:
        """`127.0.0.1:PORT`, the port being the one with this name."""
        return f"{_LOOPBACK}:{self.ports[name]}"

    def configuration(self, name: str) -> Path:
        return self.folder / "configuration" / f"{name}.yaml"


def tag(folder: Path) -> str:
    """What a lab's things are called that do not lie in its folder: its network, its memory."""
    return f"lab{hashlib.sha256(str(folder).encode()).hexdigest()[:8]}"


@dataclass(frozen=True, kw_only=True)
class Program:
    """A program of a lab."""

    name: str
    argv: tuple[str | Path, ...]
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    configuration: Any = None
    """Written to `place.configuration(name)` before it starts."""
    ready: str = ""
    """What answers 200 when it is; empty where nothing waits for that."""


def etcd(place: Place) -> Program:
    """Keeps what the API server is told, in memory where there is enough."""
    client, peer = (f"http://{place.address(name)}" for name in ("etcd", "etcd-peer"))
    return Program(
        name="etcd",
        argv=(
            place.controlplane / "etcd",
            "--name=lab",
            f"--data-dir={place.data}",
            "--unsafe-no-fsync",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=lab={peer}",
            "--log-level=warn",
        ),
        ready=f"{client}/health",
    )


def apiserver(place: Place) -> Program:
    """The API server, with roles enforced and admission as it ships."""
    pki = place.pki
    return Program(
        name="kube-apiserver",
        argv=(
            place.controlplane / "kube-apiserver",
            f"--etcd-servers=http://{place.address('etcd')}",
            f"--bind-address={_LOOPBACK}",
            f"--advertise-address={_LOOPBACK}",
            f"--secure-port={place.ports['kube-apiserver']}",
            *_serving(place),
            f"--client-ca-file={pki / 'ca.crt'}",
            f"--token-auth-file={pki / 'tokens.csv'}",
            "--authorization-mode=RBAC",
            "--allow-privileged=true",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={pki / 'sa.pub'}",
            f"--service-account-signing-key-file={pki / 'sa.key'}",
            "--service-cluster-ip-range=10.96.0.0/16",
            # It would publish its loopback address, which is none that endpoints may have.
            "--endpoint-reconciler-type=none",
            f"--kubelet-certificate-authority={pki / 'ca.crt'}",
            f"--kubelet-client-certificate={pki / 'kubelet-client.crt'}",
            f"--kubelet-client-key={pki / 'kubelet-client.key'}",
            "--kubelet-preferred-address-types=InternalIP",
            "--default-not-ready-toleration-seconds=5",
            "--default-unreachable-toleration-seconds=5",
        ),
        ready=f"{place.server}/readyz",
    )


def controller_manager(place: Place) -> Program:
    """The controllers of Kubernetes itself; they hold a node for lost sooner than elsewhere, where it takes 40 s."""
    return Program(
        name="kube-controller-manager",
        argv=(
            place.controlplane / "kube-controller-manager",
            *_delegated(place, "kube-controller-manager"),
            f"--service-account-private-key-file={place.pki / 'sa.key'}",
            f"--root-ca-file={place.pki / 'ca.crt'}",
            "--use-service-account-credentials=true",
            "--node-monitor-period=1s",
            f"--node-monitor-grace-period={_LOST_AFTER_S}s",
        ),
        ready=f"https://{place.address('kube-controller-manager')}/healthz",
    )


def scheduler(place: Place) -> Program:
    """The scheduler, as it ships."""
    return Program(
        name="kube-scheduler",
        argv=(place.controlplane / "kube-scheduler", *_delegated(place, "kube-scheduler")),
        ready=f"https://{place.address('kube-scheduler')}/readyz",
    )


def kueue(place: Place) -> Program:
    """Queues and quotas, for every kind of job that the lab knows; its shipped configuration leaves some out."""
    return Program(
        name="kueue",
        argv=(
            place.operators / "kueue",
            f"--config={place.configuration('kueue')}",
            f"--kubeconfig={place.kubeconfig}",
            "--zap-log-level=2",
        ),
        configuration={
            "apiVersion": "config.kueue.x-k8s.io/v1beta2",
            "kind": "Configuration",
            "namespace": "kueue-system",
            "health": {"healthProbeBindAddress": place.address("kueue")},
            "metrics": {"bindAddress": "0"},
            "webhook": _webhook(place, "kueue") | {"certDir": str(place.pki)},
            "leaderElection": {"leaderElect": False},
            # Without this it reads certificates of its metrics from a folder under /etc that no flag changes.
            "internalCertManagement": {
                "enable": True,
                "webhookServiceName": "kueue-webhook-service",
                "webhookSecretName": "kueue-webhook-server-cert",
            },
            "clientConnection": {"qps": 300, "burst": 500},
            # It would be an API server of its own, for which the lab has no address.
            "featureGates": {"VisibilityOnDemand": False},
            "waitForPodsReady": {"timeout": "10m", "blockAdmission": False},
            "managedJobsNamespaceSelector": {
                "matchExpressions": [
                    {
                        "key": "kubernetes.io/metadata.name",
                        "operator": "NotIn",
                        "values": ["kube-system", "kueue-system"],
                    }
                ]
            },
            "integrations": {
                "frameworks": [
                    "batch/job",
                    "jobset.x-k8s.io/jobset",
                    "kubeflow.org/mpijob",
                    "kubeflow.org/pytorchjob",
                    "trainer.kubeflow.org/trainjob",
                    "pod",
                ]
            },
        },
        ready=f"http://{place.address('kueue')}/readyz",
    )


def jobset(place: Place) -> Program:
    """Sets of Jobs."""
    return Program(
        name="jobset",
        argv=(
            place.operators / "jobset",
            f"--config={place.configuration('jobset')}",
            f"--kubeconfig={place.kubeconfig}",
        ),
        configuration={
            "apiVersion": "config.jobset.x-k8s.io/v1alpha1",
            "kind": "Configuration",
            "leaderElection": {"leaderElect": False},
            "internalCertManagement": {"enable": False},
            "webhook": _webhook(place, "jobset") | {"certDir": str(place.pki)},
            "health": {"healthProbeBindAddress": place.address("jobset")},
            "metrics": {"bindAddress": "0"},
        },
        ready=f"http://{place.address('jobset')}/readyz",
    )


def trainer(place: Place) -> Program:
    """Kubeflow Trainer v2: TrainJobs and their runtimes."""
    return Program(
        name="trainer",
        argv=(
            place.operators / "trainer-controller-manager",
            f"--config={place.configuration('trainer')}",
            f"--kubeconfig={place.kubeconfig}",
        ),
        environment=_certificates_by_tmpdir(place),
        configuration={
            "apiVersion": "config.trainer.kubeflow.org/v1alpha1",
            "kind": "Configuration",
            "health": {"healthProbeBindAddress": place.address("trainer")},
            "metrics": {"bindAddress": "0"},
            "webhook": _webhook(place, "trainer"),
            "leaderElection": {"leaderElect": False},
            "certManagement": {"enable": False},
            "clientConnection": {"qps": 200, "burst": 400},
        },
        ready=f"http://{place.address('trainer')}/readyz",
    )


def training_operator(place: Place) -> Program:
    """PyTorchJobs; its MPIJobs are older than those of mpi-operator, which bear the same name."""
    return Program(
        name="training-operator",
        argv=(
            place.operators / "training-operator.v1",
            f"--kubeconfig={place.kubeconfig}",
            "--enable-scheme=pytorchjob",
            "--metrics-bind-address=0",
            f"--health-probe-bind-address={place.address('training-operator')}",
            f"--webhook-server-port={place.ports['training-operator-webhook']}",
            f"--pytorch-init-container-template-file={place.configuration('training-operator')}",
            *_RATE,
        ),
        environment=_certificates_by_tmpdir(place),
        # Its own looks the master up with nslookup, which asks name servers only.
        configuration=[
            {
                "name": "init-pytorch",
                "image": "{{.InitContainerImage}}",
                "imagePullPolicy": "IfNotPresent",
                "command": ["sh", "-c", "until getent hosts {{.MasterAddr}}; do sleep 0.2; done"],
            }
        ],
        ready=f"http://{place.address('training-operator')}/readyz",
    )


def mpi_operator(place: Place) -> Program:
    """MPIJobs."""
    return Program(
        name="mpi-operator",
        argv=(
            place.operators / "mpi-operator",
            f"--kubeConfig={place.kubeconfig}",
            f"--master={place.server}",
            "--lock-namespace=mpi-operator",
            "--monitoring-port=0",
            *_RATE,
        ),
        environment={"HEALTH_ADDRESS": place.address("mpi-operator"), "KUBEFLOW_NAMESPACE": ""},
        ready=f"http://{place.address('mpi-operator')}/healthz",
    )


def kwok(place: Place) -> Program:
    """Nodes and pods that are only said to be there, for questions of placing: nodes labelled `type=kwok`."""
    return Program(
        name="kwok",
        argv=(
            place.operators / "kwok",
            f"--kubeconfig={place.kubeconfig}",
            "--manage-nodes-with-label-selector=type=kwok",
            f"--config={place.published / 'stages.yaml'}",
            # It renews them at a quarter of this.
            f"--node-lease-duration-seconds={_LOST_AFTER_S}",
            f"--server-address={place.address('kwok')}",
        ),
        ready=f"http://{place.address('kwok')}/healthz",
    )


def kubelet(place: Place) -> Program:
    """Nodes, and the pods on them as processes of this machine."""
    folder = place.folder / "kubelet"
    last = place.nodes[-1].name
    return Program(
        name="kubelet",
        argv=(sys.executable, "-m", "lab.kubelet", place.configuration("kubelet")),
        configuration=Configuration(
            folder=folder,
            pki=place.pki,
            tag=tag(place.folder),
            host=_LOOPBACK,
            port=place.ports["kubelet"],
            apiserver=place.ports["kube-apiserver"],
            nodes=place.nodes,
            bad_images=BAD_IMAGES,
        ),
        ready=f"{place.server}/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/{last}",
    )


def supervisor(place: Place) -> Program:
    """Starts again what ends of the others."""
    return Program(name=SUPERVISOR, argv=(sys.executable, "-m", "lab.supervisor", place.folder))


CONTROLPLANE = (etcd, apiserver, controller_manager, scheduler)
OPERATORS = (kueue, jobset, trainer, training_operator, mpi_operator, kwok)
ALL = (*CONTROLPLANE, *OPERATORS, kubelet)
"""Those that are started again when they end."""

BAD_IMAGES = ("missing.example/*",)
"""Those that no node can pull."""


def _delegated(place: Place, name: str) -> tuple[str, ...]:
    """What the scheduler and the controller manager are both told."""
    return (
        f"--kubeconfig={place.kubeconfig}",
        f"--authentication-kubeconfig={place.kubeconfig}",
        f"--authorization-kubeconfig={place.kubeconfig}",
        "--authentication-skip-lookup=true",
        "--leader-elect=false",
        f"--bind-address={_LOOPBACK}",
        f"--secure-port={place.ports[name]}",
        *_serving(place),
        "--kube-api-qps=200",
        "--kube-api-burst=400",
    )


def _serving(place: Place) -> tuple[str, ...]:
    return (f"--tls-cert-file={place.pki / 'tls.crt'}", f"--tls-private-key-file={place.pki / 'tls.key'}")


def _webhook(place: Place, name: str) -> dict[str, Any]:
    return {"host": _LOOPBACK, "port": place.ports[f"{name}-webhook"]}


def _certificates_by_tmpdir(place: Place) -> dict[str, str]:
    """Where no setting names the folder of certificates, it is one below $TMPDIR."""
    return {"TMPDIR": str(place.folder / "tmp")}
