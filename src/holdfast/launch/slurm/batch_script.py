"""The batch scripts by which Slurm allocates a run's nodes, with the controller on one of them or elsewhere; pure."""

from __future__ import annotations

import base64
import os
import shlex
import sys
from collections.abc import Collection

from msgspec import Struct

from holdfast.job.run_spec import RunSpec
from holdfast.launch.hosts.ssh_command import default_folder
from holdfast.run_dir import RunDir

END_SIGNAL_S = 120
"""Seconds before the time limit at which agents have ranks save a checkpoint, unless the job's grace is longer."""
NOT_SHARED = os.EX_NOINPUT
"""Exit status of a batch script whose node does not see the run's folder."""


class Meeting(Struct, frozen=True, kw_only=True):
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
    """The script for `sbatch` of a controller that is elsewhere; none on the excluded nodes."""
    exports = (f"export {name}={shlex.quote(value)}" for name, value in node_environ(accepted, meeting).items())
    return _script(accepted, run, exclude, "--no-requeue", *exports, f"exec {shlex.join(node_step(accepted, meeting))}")


def controller_script(accepted: RunSpec, folder: RunDir, exclude: Collection[str] = ()) -> str:
    """The script for `sbatch` of a controller on the first node, which Slurm starts again when it loses that node."""
    path, python = shlex.quote(str(folder.path)), shlex.quote(node_python(accepted))
    return _script(
        accepted,
        folder.run_id,
        exclude,
        "--requeue",
        f"if [ ! -r {path}/job.json ]; then",
        f'  echo "holdfast: $(hostname) cannot read" {path}": set HOLDFAST_HOME to a folder that all nodes share" >&2',
        f"  exit {NOT_SHARED}",
        "fi",
        f"exec {python} -m holdfast.launch.slurm.batch_step {path} >> {path}/batch.log 2>&1",
    )


def node_step(accepted: RunSpec, meeting: Meeting, *options: str) -> tuple[str, ...]:
    """The command that starts a process on each node, which stays while others fail."""
    # `--wait=0 --kill-on-bad-exit=0`: a node that is lost ends no other.
    srun = ("srun", "--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--unbuffered")
    module = ("-m", "holdfast.launch.slurm.slurm_node", *options)
    return (*srun, node_python(accepted), *module, meeting.address, meeting.port)


def node_environ(accepted: RunSpec, meeting: Meeting) -> dict[str, str]:
    """The variables that it needs."""
    return {
        "HOLDFAST_HOME": node_folder(accepted),
        "HOLDFAST_HOST_KEY": meeting.key,
        "HOLDFAST_CA": base64.b64encode(meeting.ca.encode()).decode(),
    }


def _script(accepted: RunSpec, run: str, exclude: Collection[str], requeue: str, *commands: str) -> str:
    """A script with the options for all nodes and spares.

    With excluded nodes the run takes an allocation without spares too: the cluster may have no more.
    """
    wanted = _options(accepted, run)
    if exclude:
        wanted |= {"exclude": ",".join(sorted(exclude)), "nodes": f"{accepted.job.nodes.min}-{wanted['nodes']}"}
    options = [f"--{name}={value}" for name, value in wanted.items() if value]
    options += ["--ntasks-per-node=1", "--no-kill", requeue, *accepted.slurm.options]
    return "\n".join(["#!/bin/bash", *(f"#SBATCH {option}" for option in options), *commands, ""])


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
