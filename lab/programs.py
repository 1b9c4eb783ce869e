"""Command, configuration, environment and readiness URL of each program of a lab.

One function per program, in start order. Each program listens on the loopback address only.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.launch.local.netns import NetnsInterface
from lab.kubelet.configuration import KubeletConfig
from lab.kubelet.nodes import NodeSpec
from lab.state import NODE_LOST_AFTER_S, SUPERVISOR

"""Seconds after its last heartbeat at which a node counts as lost."""
_RATE = ("--kube-api-qps=200", "--kube-api-burst=400")
_LOOPBACK = "127.0.0.1"
_POD_GROUPS = "--feature-gates=GenericWorkload=true"
"""Lets the scheduler place the pods of a PodGroup together or not at all."""


@dataclass(frozen=True, kw_only=True)
class LabPaths:
    """Paths and addresses of a lab."""

    folder: Path
    data: Path
    """etcd's data folder."""
    controlplane: Path
    operators: Path
    operator_manifests: Path
    """The operators' manifests (manifests.py)."""
    ports: Mapping[str, int]
    nodes: tuple[NodeSpec, ...]
    interfaces: tuple[NetnsInterface, ...] = (NetnsInterface(),)
    node_lost_after_s: int = NODE_LOST_AFTER_S
    kubelet_python: tuple[str, ...] = (sys.executable,)

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
        """`127.0.0.1:PORT`, with the port of this name."""
        return f"{_LOOPBACK}:{self.ports[name]}"

    def configuration(self, name: str) -> Path:
        return self.folder / "configuration" / f"{name}.yaml"


def lab_tag(folder: Path) -> str:
    """Tag of the lab's resources outside its folder: its network, its memory."""
    return f"lab{hashlib.sha256(str(folder).encode()).hexdigest()[:8]}"


@dataclass(frozen=True, kw_only=True)
class LabProgram:
    """A program of a lab."""

    name: str
    argv: tuple[str | Path, ...]
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    configuration: Any = None
    """Written to `paths.configuration(name)` before the start."""
    ready: str = ""
    """URL that returns 200 when the program is ready; empty if no caller waits for it."""


def etcd(paths: LabPaths) -> LabProgram:
    """Stores the API server's data, in memory if enough is free."""
    client, peer = (f"http://{paths.address(name)}" for name in ("etcd", "etcd-peer"))
    return LabProgram(
        name="etcd",
        argv=(
            paths.controlplane / "etcd",
            "--name=lab",
            f"--data-dir={paths.data}",
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


def apiserver(paths: LabPaths) -> LabProgram:
    """The API server, with RBAC and its default admission plugins."""
    pki = paths.pki
    return LabProgram(
        name="kube-apiserver",
        argv=(
            paths.controlplane / "kube-apiserver",
            f"--etcd-servers=http://{paths.address('etcd')}",
            f"--bind-address={_LOOPBACK}",
            f"--advertise-address={_LOOPBACK}",
            f"--secure-port={paths.ports['kube-apiserver']}",
            *_serving(paths),
            f"--client-ca-file={pki / 'ca.crt'}",
            f"--token-auth-file={pki / 'tokens.csv'}",
            "--authorization-mode=RBAC",
            "--allow-privileged=true",
            _POD_GROUPS,
            "--runtime-config=scheduling.k8s.io/v1beta1=true",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={pki / 'sa.pub'}",
            f"--service-account-signing-key-file={pki / 'sa.key'}",
            "--service-cluster-ip-range=10.96.0.0/16",
            # It would publish its loopback address, which endpoints must not have.
            "--endpoint-reconciler-type=none",
            f"--kubelet-certificate-authority={pki / 'ca.crt'}",
            f"--kubelet-client-certificate={pki / 'kubelet-client.crt'}",
            f"--kubelet-client-key={pki / 'kubelet-client.key'}",
            "--kubelet-preferred-address-types=InternalIP",
            "--default-not-ready-toleration-seconds=5",
            "--default-unreachable-toleration-seconds=5",
        ),
        ready=f"{paths.server}/readyz",
    )


def controller_manager(paths: LabPaths) -> LabProgram:
    """The controllers of Kubernetes; they usually consider a node lost sooner than the default of 50 s."""
    return LabProgram(
        name="kube-controller-manager",
        argv=(
            paths.controlplane / "kube-controller-manager",
            *_delegated(paths, "kube-controller-manager"),
            f"--service-account-private-key-file={paths.pki / 'sa.key'}",
            f"--root-ca-file={paths.pki / 'ca.crt'}",
            "--use-service-account-credentials=true",
            _POD_GROUPS,
            "--node-monitor-period=1s",
            f"--node-monitor-grace-period={paths.node_lost_after_s}s",
        ),
        ready=f"https://{paths.address('kube-controller-manager')}/healthz",
    )


def scheduler(paths: LabPaths) -> LabProgram:
    """The scheduler with its defaults, and with gangs."""
    return LabProgram(
        name="kube-scheduler",
        argv=(paths.controlplane / "kube-scheduler", *_delegated(paths, "kube-scheduler"), _POD_GROUPS),
        ready=f"https://{paths.address('kube-scheduler')}/readyz",
    )


def kueue(paths: LabPaths) -> LabProgram:
    """Queues and quotas for every kind of job in the lab; the default configuration omits some."""
    return LabProgram(
        name="kueue",
        argv=(
            paths.operators / "kueue",
            f"--config={paths.configuration('kueue')}",
            f"--kubeconfig={paths.kubeconfig}",
            "--zap-log-level=2",
        ),
        configuration={
            "apiVersion": "config.kueue.x-k8s.io/v1beta2",
            "kind": "Configuration",
            "namespace": "kueue-system",
            "health": {"healthProbeBindAddress": paths.address("kueue")},
            "metrics": {"bindAddress": "0"},
            "webhook": _webhook(paths, "kueue") | {"certDir": str(paths.pki)},
            "leaderElection": {"leaderElect": False},
            # Without this it reads its metrics certificates from a folder under /etc that no flag changes.
            "internalCertManagement": {
                "enable": True,
                "webhookServiceName": "kueue-webhook-service",
                "webhookSecretName": "kueue-webhook-server-cert",
            },
            "clientConnection": {"qps": 300, "burst": 500},
            # It would be an aggregated API server, for which the lab has no address.
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
                    "leaderworkerset.x-k8s.io/leaderworkerset",
                    "trainer.kubeflow.org/trainjob",
                    "pod",
                ]
            },
        },
        ready=f"http://{paths.address('kueue')}/readyz",
    )


def jobset(paths: LabPaths) -> LabProgram:
    """JobSets."""
    return LabProgram(
        name="jobset",
        argv=(
            paths.operators / "jobset",
            f"--config={paths.configuration('jobset')}",
            f"--kubeconfig={paths.kubeconfig}",
        ),
        configuration={
            "apiVersion": "config.jobset.x-k8s.io/v1alpha1",
            "kind": "Configuration",
            "leaderElection": {"leaderElect": False},
            "internalCertManagement": {"enable": False},
            "webhook": _webhook(paths, "jobset") | {"certDir": str(paths.pki)},
            "health": {"healthProbeBindAddress": paths.address("jobset")},
            "metrics": {"bindAddress": "0"},
        },
        ready=f"http://{paths.address('jobset')}/readyz",
    )


def trainer(paths: LabPaths) -> LabProgram:
    """Kubeflow Trainer v2: TrainJobs and their runtimes."""
    return LabProgram(
        name="trainer",
        argv=(
            paths.operators / "trainer-controller-manager",
            f"--config={paths.configuration('trainer')}",
            f"--kubeconfig={paths.kubeconfig}",
        ),
        environment=_certificates_by_tmpdir(paths),
        configuration={
            "apiVersion": "config.trainer.kubeflow.org/v1alpha1",
            "kind": "Configuration",
            "health": {"healthProbeBindAddress": paths.address("trainer")},
            "metrics": {"bindAddress": "0"},
            "webhook": _webhook(paths, "trainer"),
            "leaderElection": {"leaderElect": False},
            "certManagement": {"enable": False},
            "clientConnection": {"qps": 200, "burst": 400},
        },
        ready=f"http://{paths.address('trainer')}/readyz",
    )


def training_operator(paths: LabPaths) -> LabProgram:
    """PyTorchJobs; its MPIJobs have the same name as those of mpi-operator but an older version."""
    return LabProgram(
        name="training-operator",
        argv=(
            paths.operators / "training-operator.v1",
            f"--kubeconfig={paths.kubeconfig}",
            "--enable-scheme=pytorchjob",
            "--metrics-bind-address=0",
            f"--health-probe-bind-address={paths.address('training-operator')}",
            f"--webhook-server-port={paths.ports['training-operator-webhook']}",
            f"--pytorch-init-container-template-file={paths.configuration('training-operator')}",
            *_RATE,
        ),
        environment=_certificates_by_tmpdir(paths),
        # The default container resolves the master with nslookup, which only queries name servers.
        configuration=[
            {
                "name": "init-pytorch",
                "image": "{{.InitContainerImage}}",
                "imagePullPolicy": "IfNotPresent",
                "command": ["sh", "-c", "until getent hosts {{.MasterAddr}}; do sleep 0.2; done"],
            }
        ],
        ready=f"http://{paths.address('training-operator')}/readyz",
    )


def mpi_operator(paths: LabPaths) -> LabProgram:
    """MPIJobs."""
    return LabProgram(
        name="mpi-operator",
        argv=(
            paths.operators / "mpi-operator",
            f"--kubeConfig={paths.kubeconfig}",
            f"--master={paths.server}",
            "--lock-namespace=mpi-operator",
            "--monitoring-port=0",
            *_RATE,
        ),
        environment={"HEALTH_ADDRESS": paths.address("mpi-operator"), "KUBEFLOW_NAMESPACE": ""},
        ready=f"http://{paths.address('mpi-operator')}/healthz",
    )


def lws(paths: LabPaths) -> LabProgram:
    """LeaderWorkerSets."""
    return LabProgram(
        name="lws",
        argv=(
            paths.operators / "cmd",  # Go names a program by the last part of its package
            f"--config={paths.configuration('lws')}",
            f"--kubeconfig={paths.kubeconfig}",
        ),
        configuration={
            "apiVersion": "config.lws.x-k8s.io/v1alpha1",
            "kind": "Configuration",
            "leaderElection": {"leaderElect": False},
            "internalCertManagement": {"enable": False},
            "webhook": _webhook(paths, "lws") | {"certDir": str(paths.pki)},
            "health": {"healthProbeBindAddress": paths.address("lws")},
            "metrics": {"bindAddress": "0"},
        },
        ready=f"http://{paths.address('lws')}/readyz",
    )


def kwok(paths: LabPaths) -> LabProgram:
    """Simulated nodes and pods without processes, for scheduling tests: nodes labelled `type=kwok`."""
    return LabProgram(
        name="kwok",
        argv=(
            paths.operators / "kwok",
            f"--kubeconfig={paths.kubeconfig}",
            "--manage-nodes-with-label-selector=type=kwok",
            f"--config={paths.operator_manifests / 'stages.yaml'}",
            # KWOK renews leases at a quarter of this.
            f"--node-lease-duration-seconds={NODE_LOST_AFTER_S}",
            f"--server-address={paths.address('kwok')}",
        ),
        ready=f"http://{paths.address('kwok')}/healthz",
    )


def kubelet(paths: LabPaths) -> LabProgram:
    """Nodes, and their pods as processes of this machine."""
    folder = paths.folder / "kubelet"
    last = paths.nodes[-1].name
    return LabProgram(
        name="kubelet",
        argv=(*paths.kubelet_python, "-m", "lab.kubelet", paths.configuration("kubelet")),
        configuration=KubeletConfig(
            folder=folder,
            pki=paths.pki,
            tag=lab_tag(paths.folder),
            host=_LOOPBACK,
            port=paths.ports["kubelet"],
            apiserver=paths.ports["kube-apiserver"],
            nodes=paths.nodes,
            interfaces=paths.interfaces,
            bad_images=BAD_IMAGES,
        ),
        ready=f"{paths.server}/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/{last}",
    )


def supervisor(paths: LabPaths) -> LabProgram:
    """Restarts the other programs when they exit."""
    return LabProgram(name=SUPERVISOR, argv=(sys.executable, "-m", "lab.supervisor", paths.folder))


CONTROLPLANE = (etcd, apiserver, controller_manager, scheduler)
OPERATORS = (kueue, jobset, trainer, training_operator, mpi_operator, lws, kwok)
ALL = (*CONTROLPLANE, *OPERATORS, kubelet)
"""The programs that the supervisor restarts."""

BAD_IMAGES = ("missing.example/*",)
"""Image patterns that no node can pull."""


def _delegated(paths: LabPaths, name: str) -> tuple[str, ...]:
    """Common flags of the scheduler and the controller manager."""
    return (
        f"--kubeconfig={paths.kubeconfig}",
        f"--authentication-kubeconfig={paths.kubeconfig}",
        f"--authorization-kubeconfig={paths.kubeconfig}",
        "--authentication-skip-lookup=true",
        "--leader-elect=false",
        f"--bind-address={_LOOPBACK}",
        f"--secure-port={paths.ports[name]}",
        *_serving(paths),
        "--kube-api-qps=200",
        "--kube-api-burst=400",
    )


def _serving(paths: LabPaths) -> tuple[str, ...]:
    return (f"--tls-cert-file={paths.pki / 'tls.crt'}", f"--tls-private-key-file={paths.pki / 'tls.key'}")


def _webhook(paths: LabPaths, name: str) -> dict[str, Any]:
    return {"host": _LOOPBACK, "port": paths.ports[f"{name}-webhook"]}


def _certificates_by_tmpdir(paths: LabPaths) -> dict[str, str]:
    """$TMPDIR, which decides the certificate folder of programs without a setting for it."""
    return {"TMPDIR": str(paths.folder / "tmp")}
