"""Owns a run as an MPIJob of mpi-operator's: `mpirun` in a launcher, ranks under sshd on the nodes, and no agent."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.launch.kubernetes.incluster.exec_commands import RETENTION_S
from holdfast.launch.kubernetes.manifests.command_container import command_container, command_env
from holdfast.launch.kubernetes.manifests.jobset import owner_metadata, suspended
from holdfast.launch.kubernetes.manifests.pod_template import ContainerSpec, helper_pod_template, pod_template
from holdfast.launch.kubernetes.manifests.render_context import RenderContext
from holdfast.launch.kubernetes.manifests.yaml_writer import Commented, YamlValue, to_plain

LAUNCHER, WORKER = "launcher", "worker"
MPI_HOME = "/home/mpiuser"
"""Where the images that mpi-operator publishes keep what an sshd of a user other than root reads."""


SSHD_CAPABILITY = "NET_BIND_SERVICE"
"""What the published images give the file of sshd, which the kernel executes only where a container may have it."""
ROOT_SSHD_CAPABILITIES = ("AUDIT_WRITE", "SETGID", "SETUID", "SYS_CHROOT")
"""What an sshd of root's cannot let anybody in without; tried one by one with OpenSSH 9.2, but for the first: where the
kernel audits, one that may not write of it gives up."""


def mpijob(ctx: RenderContext) -> Mapping[str, YamlValue]:
    """The MPIJob of a run."""
    job, root = ctx.job, ctx.target.user == 0
    return {
        "apiVersion": "kubeflow.org/v2beta1",
        "kind": "MPIJob",
        "metadata": owner_metadata(ctx),
        "spec": {
            "slotsPerWorker": job.local_world_size,
            "sshAuthMountPath": Commented(
                "/root/.ssh" if root else f"{MPI_HOME}/.ssh", "Where sshd of this user looks."
            ),
            "launcherCreationPolicy": Commented(
                "WaitForWorkersReady", "`mpirun` gives up on a node that is not there."
            ),
            "runPolicy": {
                "suspend": suspended(ctx),
                "cleanPodPolicy": Commented("Running", "sshd never ends by itself."),
                "ttlSecondsAfterFinished": Commented(
                    RETENTION_S, "A day to look at it; then it goes with all that it owns."
                ),
                "backoffLimit": Commented(
                    job.recovery.max_restarts, "Restarts of the launcher, and of all ranks with it."
                ),
            },
            "mpiReplicaSpecs": {
                "Launcher": {
                    "replicas": 1,
                    "restartPolicy": Commented("OnFailure", "A rank that fails ends `mpirun`, which starts all again."),
                    "template": helper_pod_template(ctx, _launcher(ctx), part=LAUNCHER),
                },
                "Worker": {"replicas": job.nodes.max, "template": pod_template(ctx, _worker(ctx))},
            },
        },
    }


def _launcher(ctx: RenderContext) -> Mapping[str, YamlValue]:
    """The job's command; what it is given in variables, `mpirun` gives on to every rank."""
    names = [each["name"] for each in to_plain(command_env(ctx))]
    forwarded: YamlValue = {
        "name": "OMPI_MCA_mca_base_env_list",
        "value": Commented(";".join(names), "ssh hands no variables on; Open MPI does, for those it is told of."),
    }
    container = command_container(ctx, LAUNCHER, rank_env=[forwarded]).container
    return {**container, "resources": {"limits": {"cpu": "1", "memory": "1Gi"}}}


def _worker(ctx: RenderContext) -> ContainerSpec:
    root = ctx.target.user == 0
    options = [] if root else ["-f", f"{MPI_HOME}/.sshd_config"]
    return ContainerSpec(
        container={"name": WORKER, "image": ctx.job.image, "command": ["/usr/sbin/sshd", "-De", *options]},
        capabilities=(SSHD_CAPABILITY, *(ROOT_SSHD_CAPABILITIES if root else ())),
        capabilities_reason="sshd cannot be executed, or lets nobody in, without.",
    )
