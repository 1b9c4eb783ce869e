"""The batch script by which Slurm allocates a run's nodes and starts a process on each; pure."""

from __future__ import annotations

import base64
import shlex
import sys
from collections.abc import Collection
from dataclasses import dataclass

from holdfast.job.run_spec import RunSpec
from holdfast.launch.hosts.ssh_command import default_folder

END_SIGNAL_S = 120
"""Seconds before the time limit at which agents have ranks save a checkpoint, unless the job's grace is longer."""


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """How a node's process finds the controller and proves that the run asked for it."""

    address: str
    port: str
    """A number, or a placeholder where it is not known yet."""
    key: str
    ca: str
    """The certificate that the controller presents, as PEM."""


def slurm_job_name(run: str) -> str:
    """The name of all Slurm jobs of a run."""
    return f"holdfast-{run}"


def node_folder(accepted: RunSpec) -> str:
    """The folder for holdfast's files on every node."""
    return accepted.slurm.folder or default_folder()


def node_python(accepted: RunSpec) -> str:
    """The Python with holdfast on every node."""
    return accepted.slurm.python or sys.executable


def batch_script(accepted: RunSpec, run: str, meeting: Meeting, exclude: Collection[str] = ()) -> str:
    """The script for `sbatch`: one task on each node, which stays while others fail; none on the excluded nodes.

    With excluded nodes the run takes an allocation without spares too: the cluster may have no more.
    """
    wanted = _options(accepted, run)
    if exclude:
        wanted |= {"exclude": ",".join(sorted(exclude)), "nodes": f"{accepted.job.nodes.min}-{wanted['nodes']}"}
    options = [f"--{name}={value}" for name, value in wanted.items() if value]
    options += ["--ntasks-per-node=1", "--no-kill", "--no-requeue", *accepted.slurm.options]
    env = {
        "HOLDFAST_HOME": node_folder(accepted),
        "HOLDFAST_HOST_KEY": meeting.key,
        "HOLDFAST_CA": base64.b64encode(meeting.ca.encode()).decode(),
    }
    program = f"{shlex.quote(node_python(accepted))} -m holdfast.launch.slurm.slurm_node"
    # `--wait=0 --kill-on-bad-exit=0`: a node that is lost ends no other.
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {option}" for option in options),
            *(f"export {name}={shlex.quote(value)}" for name, value in env.items()),
            "exec srun --no-kill --kill-on-bad-exit=0 --wait=0 --unbuffered \\",
            f"  {program} {meeting.address} {meeting.port}",
            "",
        ]
    )


def _options(accepted: RunSpec, run: str) -> dict[str, str]:
    job, wanted = accepted.job, accepted.slurm
    gpus = f"gpu:{job.gpus_per_node}" if job.gpus_per_node else ""
    signal_s = max(END_SIGNAL_S, int(job.recovery.stop_grace_s) + 30)
    return {
        "job-name": slurm_job_name(run),
        "nodes": str(job.node_slots + wanted.spares),
        "partition": wanted.partition or "",
        "account": wanted.account or "",
        "qos": wanted.qos or "",
        "time": wanted.time or "",
        "constraint": wanted.constraint or "",
        "reservation": wanted.reservation or "",
        "gres": wanted.gres or gpus,
        "cpus-per-task": str(max(1, int(job.resources.cpu))) if job.resources.cpu else "",
        "mem": f"{job.resources.memory >> 20}M" if job.resources.memory else "",
        "signal": f"TERM@{signal_s}",
        "output": f"/tmp/holdfast-{run}-%j.log",
    }
