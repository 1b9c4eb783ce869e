"""The batch script's process: keeps the run's controller on this node, and starts a process on each of the job's nodes.

`python -m holdfast.launch.slurm.batch_step RUN_FOLDER`. If Slurm starts the job again, the next one continues the run
from the log in its folder.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from holdfast.errors import ExitCode, HoldfastError, failure
from holdfast.findings import Owner
from holdfast.host.files import atomic_write, read_line
from holdfast.host.processes import adopt_orphans, descendants, kill_all
from holdfast.launch import prestarted_supervisor
from holdfast.launch.slurm.own_job import OwnJob
from holdfast.launch.slurm.slurm_commands import node_address
from holdfast.run_dir import RunDir
from holdfast.security.tokens import TokenIssuer

if TYPE_CHECKING:
    from holdfast.job.run_spec import RunSpec

log = logging.getLogger("holdfast.batch_step")

POLL_S = 0.1
KILL_TIMEOUT_S = 10.0
LOCK_TIMEOUT_S = 300.0
"""Longest wait for the controller of the run's former allocation: a file server may keep the lock of a lost node."""


def main(environ: Mapping[str, str] = os.environ) -> int:
    """Run the controller and the nodes until the run is over or the allocation ends; returns the exit status."""
    folder, own = RunDir(Path(sys.argv[1])), OwnJob.of(environ)
    if not folder.secrets.exists():
        log.warning("%s is over", folder.run_id)
        return 0
    signal.signal(signal.SIGTERM, _stay)
    adopt_orphans()  # a controller whose supervisor was killed
    if not folder.is_free(within_s=LOCK_TIMEOUT_S):
        log.error("another controller of %s has held its lock for %g s", folder.run_id, LOCK_TIMEOUT_S)
        return ExitCode.UNAVAILABLE
    prestarted_supervisor.prestart(own_session=False)  # while the slow imports run
    from holdfast.job.run_spec import RunSpec
    from holdfast.launch.slurm.slurm_backend import JOB_NAME, PORT_NAME

    accepted, address = RunSpec.read(folder.job), own_address(own)
    atomic_write(folder.path / JOB_NAME, own.number.encode())
    (folder.path / PORT_NAME).unlink(missing_ok=True)  # a former controller's
    controller = _start_controller(folder, address, environ)
    nodes: subprocess.Popen[bytes] | None = None
    while controller.poll() is None and (nodes is None or nodes.poll() is None):
        if nodes is None and (folder.path / PORT_NAME).exists():
            nodes = _start_nodes(folder, accepted, address, environ)
        time.sleep(POLL_S)
    code = controller.returncode
    kill_all(lambda: descendants(os.getpid()), within_s=KILL_TIMEOUT_S)
    if code is None or code < 0:  # the supervisor, or srun, was killed
        own.continue_elsewhere()
        return ExitCode.UNAVAILABLE
    return code


def own_address(own: OwnJob) -> str:
    """Where other machines reach this node; raises HoldfastError if only this node itself would."""
    name = node_address(own.node)
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        raise _no_address(own, f"{name}: {error}") from error
    if address.startswith("127.") and address != name:  # Debian's installer writes such a line to /etc/hosts
        raise _no_address(own, f"{name} means {address} there")
    return address


def _no_address(own: OwnJob, why: str) -> HoldfastError:
    return failure(
        "no-address",
        f"it is not known how other machines reach {own.node}, where the controller is to run",
        exit_code=ExitCode.CANNOT_RUN_HERE,
        where=own.node,
        evidence=(why,),
        remedy="Have the node's /etc/hosts, or its NodeAddr in slurm.conf, name its address on the cluster's network, "
        "or set `slurm: {controller: login}` in the target.",
        owner=Owner.CLUSTER,
    )


def _stay(_number: int, _frame: FrameType | None) -> None:
    """Slurm signals all processes of the script when it ends the job; this one has the job started again."""


def _start_controller(folder: RunDir, address: str, environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start the controller's supervisor, with the environment of the run's first start and Slurm's."""
    from holdfast.job.run_spec import RunSecrets

    of_job = {name: value for name, value in environ.items() if name.startswith("SLURM")}
    words = (prestarted_supervisor.SUPERVISOR, str(folder.path), "--isolation", "process", "--listen", address)
    environ = {**RunSecrets.read(folder.secrets).environ, **of_job}
    return prestarted_supervisor.begin(words, environ, folder.controller_log, own_session=False)


def _start_nodes(
    folder: RunDir, accepted: RunSpec, address: str, environ: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    from holdfast.launch.slurm.batch_script import Meeting, node_environ, node_step
    from holdfast.launch.slurm.slurm_backend import PORT_NAME

    meeting = Meeting(
        address=address,
        port=read_line(folder.path / PORT_NAME),
        key=TokenIssuer(read_line(folder.token)).host_key(),
        ca=folder.ca.read_text(),
    )
    return subprocess.Popen(
        node_step(accepted, meeting, "--in-job"),
        stdin=subprocess.DEVNULL,
        env={**environ, **node_environ(accepted, meeting)},
    )


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        sys.exit(main())
    except HoldfastError as error:
        log.critical("%s", error)
        sys.exit(error.exit_code)
