"""Renders a run as an MPIJob of mpi-operator.

Without agents `mpirun` is in a launcher pod, and ranks are under sshd on the nodes. With agents the launcher is node 0.
"""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.job.targets import Workload
from holdfast.launch.kubernetes.manifests.agent_container import agent_container
from holdfast.launch.kubernetes.manifests.command_container import command_container, command_env
from holdfast.launch.kubernetes.manifests.jobset import (
    NODE_INDEX,
    RESTARTS_COUNTED_BY_CONTROLLER,
    UNLIMITED_RETRIES,
    owner,
    suspended,
    time_to_live,
)
from holdfast.launch.kubernetes.manifests.pod_template import (
    SCRATCH,
    ContainerSpec,
    helper_pod_template,
    pod_template,
)
from holdfast.launch.kubernetes.manifests.render_context import RenderContext
from holdfast.launch.kubernetes.manifests.yaml_writer import Commented, YamlValue, to_plain
from holdfast.launch.kubernetes.object_names import NODE
from holdfast.launch.kubernetes.workload_catalog import CATALOG

_MPIJOB = CATALOG[Workload.MPIJOB]
LAUNCHER, WORKER = "launcher", _MPIJOB.container
MPI_HOME = "/home/mpiuser"
"""Home folder, in mpi-operator's published images, with the configuration of a non-root sshd."""


SSHD_CAPABILITY = "NET_BIND_SERVICE"
"""File capability of sshd in the published images; the kernel executes sshd only if the container may have it."""
ROOT_SSHD_CAPABILITIES = ("AUDIT_WRITE", "SETGID", "SETUID", "SYS_CHROOT")
"""Capabilities without which a root sshd rejects logins, tested one by one with OpenSSH 9.2. AUDIT_WRITE was not
tested: sshd exits without it if the kernel audits."""


def mpijob(ctx: RenderContext) -> Mapping[str, YamlValue]:
    """The MPIJob of a run."""
    return owner(ctx, _with_agent(ctx) if ctx.target.agent else _without_agent(ctx))


def _with_agent(ctx: RenderContext) -> Mapping[str, YamlValue]:
    """The launcher is node 0, so that the MPIJob succeeds when this node's agent does."""
    workers = ctx.job.nodes.max - 1
    replicas: dict[str, YamlValue] = {"Launcher": _agent_replica(ctx, 1)}
    if workers:
        replicas["Worker"] = _agent_replica(ctx, workers)
    return {
        "slotsPerWorker": ctx.job.local_world_size,
        "runLauncherAsWorker": Commented(True, "The launcher is node 0, and the workers are numbered from 1."),
        "sshAuthMountPath": Commented(f"{SCRATCH}/ssh", "Keys that nothing uses: agents start the ranks."),
        "runPolicy": {
            "suspend": suspended(ctx),
            "cleanPodPolicy": Commented("Running", "Deletes pods that still run when the run is over."),
            "ttlSecondsAfterFinished": time_to_live(ctx),
            "backoffLimit": Commented(UNLIMITED_RETRIES, RESTARTS_COUNTED_BY_CONTROLLER),
        },
        "mpiReplicaSpecs": replicas,
    }


def _agent_replica(ctx: RenderContext, count: int) -> YamlValue:
    index: YamlValue = {"fieldRef": {"fieldPath": f"metadata.labels['{_MPIJOB.node_labels.label}']"}}
    occupant = agent_container(ctx, WORKER, index=NODE_INDEX, index_from=index)
    return {
        "replicas": count,
        "restartPolicy": Commented(
            "OnFailure", "The kubelet restarts an agent that exits; the controller counts restarts of ranks."
        ),
        "template": pod_template(ctx, occupant, placement_group=NODE if ctx.job.nodes.max > 1 else None),
    }


def _without_agent(ctx: RenderContext) -> Mapping[str, YamlValue]:
    job, root = ctx.job, ctx.target.user == 0
    return {
        "slotsPerWorker": job.local_world_size,
        "sshAuthMountPath": Commented(
            "/root/.ssh" if root else f"{MPI_HOME}/.ssh", "The folder that this user's sshd reads."
        ),
        "launcherCreationPolicy": Commented("WaitForWorkersReady", "`mpirun` fails if a node is missing."),
        "runPolicy": {
            "suspend": suspended(ctx),
            "cleanPodPolicy": Commented("Running", "sshd never exits by itself."),
            "ttlSecondsAfterFinished": time_to_live(ctx),
            "backoffLimit": Commented(job.recovery.max_restarts, "Restarts of the launcher, which restart all ranks."),
        },
        "mpiReplicaSpecs": {
            "Launcher": {
                "replicas": 1,
                "restartPolicy": Commented("OnFailure", "A failed rank ends `mpirun`; a restart starts all ranks."),
                "template": helper_pod_template(ctx, _launcher(ctx), part=LAUNCHER),
            },
            "Worker": {"replicas": job.nodes.max, "template": pod_template(ctx, _worker(ctx))},
        },
    }


def _launcher(ctx: RenderContext) -> Mapping[str, YamlValue]:
    """The job's command; `mpirun` passes its variables on to every rank."""
    names = [each["name"] for each in to_plain(command_env(ctx))]
    forwarded: YamlValue = {
        "name": "OMPI_MCA_mca_base_env_list",
        "value": Commented(";".join(names), "ssh forwards no variables; Open MPI forwards these."),
    }
    container = command_container(ctx, LAUNCHER, rank_env=[forwarded]).container
    return {**container, "resources": {"limits": {"cpu": "1", "memory": "1Gi"}}}


def _worker(ctx: RenderContext) -> ContainerSpec:
    root = ctx.target.user == 0
    options = [] if root else ["-f", f"{MPI_HOME}/.sshd_config"]
    return ContainerSpec(
        container={"name": WORKER, "image": ctx.job.image, "command": ["/usr/sbin/sshd", "-De", *options]},
        capabilities=(SSHD_CAPABILITY, *(ROOT_SSHD_CAPABILITIES if root else ())),
        capabilities_reason="sshd does not start, or rejects logins, without it.",
    )
