"""Owns a run as an MPIJob of mpi-operator's: `mpirun` in a launcher, ranks under sshd on the nodes, and no agent."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.launch.kubernetes.command import command, environment
from holdfast.launch.kubernetes.desk import KEPT_S
from holdfast.launch.kubernetes.jobset import owner_metadata, suspended
from holdfast.launch.kubernetes.manifest import Because, Node, plain
from holdfast.launch.kubernetes.pod import Occupant, aside, template
from holdfast.launch.kubernetes.submission import Submission

LAUNCHER, WORKER = "launcher", "worker"
HOME = "/home/mpiuser"
"""Where the images that mpi-operator publishes keep what an sshd of a user other than root reads."""


EXECUTABLE = "NET_BIND_SERVICE"
"""What the published images give the file of sshd, which the kernel executes only where a container may have it."""
OF_ROOT = ("AUDIT_WRITE", "SETGID", "SETUID", "SYS_CHROOT")
"""What an sshd of root's cannot let anybody in without; tried one by one with OpenSSH 9.2, but for the first: where the
kernel audits, one that may not write of it gives up."""


def mpijob(asked: Submission) -> Mapping[str, Node]:
    """The MPIJob of a run."""
    job, root = asked.job, asked.profile.user == 0
    return {
        "apiVersion": "kubeflow.org/v2beta1",
        "kind": "MPIJob",
        "metadata": owner_metadata(asked),
        "spec": {
            "slotsPerWorker": job.local_world_size,
            "sshAuthMountPath": Because("/root/.ssh" if root else f"{HOME}/.ssh", "Where sshd of this user looks."),
            "launcherCreationPolicy": Because("WaitForWorkersReady", "`mpirun` gives up on a node that is not there."),
            "runPolicy": {
                "suspend": suspended(asked),
                "cleanPodPolicy": Because("Running", "sshd never ends by itself."),
                "ttlSecondsAfterFinished": Because(KEPT_S, "A day to look at it; then it goes with all that it owns."),
                "backoffLimit": Because(
                    job.recovery.max_restarts, "Restarts of the launcher, and of all ranks with it."
                ),
            },
            "mpiReplicaSpecs": {
                "Launcher": {
                    "replicas": 1,
                    "restartPolicy": Because("OnFailure", "A rank that fails ends `mpirun`, which starts all again."),
                    "template": aside(asked, _launcher(asked), part=LAUNCHER),
                },
                "Worker": {"replicas": job.nodes.max, "template": template(asked, _worker(asked))},
            },
        },
    }


def _launcher(asked: Submission) -> Mapping[str, Node]:
    """The job's command; what it is given in variables, `mpirun` gives on to every rank."""
    names = [each["name"] for each in plain(environment(asked))]
    forwarded: Node = {
        "name": "OMPI_MCA_mca_base_env_list",
        "value": Because(";".join(names), "ssh hands no variables on; Open MPI does, for those it is told of."),
    }
    container = command(asked, LAUNCHER, place=[forwarded]).container
    return {**container, "resources": {"limits": {"cpu": "1", "memory": "1Gi"}}}


def _worker(asked: Submission) -> Occupant:
    root = asked.profile.user == 0
    options = [] if root else ["-f", f"{HOME}/.sshd_config"]
    return Occupant(
        container={"name": WORKER, "image": asked.job.image, "command": ["/usr/sbin/sshd", "-De", *options]},
        capabilities=(EXECUTABLE, *(OF_ROOT if root else ())),
        why="sshd cannot be executed, or lets nobody in, without.",
    )
