"""Supervises a run's controller in its Kubernetes pod, and creates the run's folder on the volume.

After a pod restart the controller resumes from the log in that folder. Imports little, because its import time delays
the start of the run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

from holdfast.errors import ExitCode
from holdfast.host.files import atomic_write
from holdfast.host.process_limits import receive_signals
from holdfast.host.processes import adopt_orphans
from holdfast.launch.controller_supervisor import listen, lock_run, supervise
from holdfast.launch.kubernetes.incluster.sync_server import LOOPBACK, SYNC_PORT, serving
from holdfast.launch.kubernetes.object_names import CODE_KEY
from holdfast.run_dir import RunDir

ANY_ADDRESS = "0.0.0.0"
"""Nodes connect over the network; the run's NetworkPolicy restricts which."""
POLL_S = 0.2
SYNC_WAIT_S = 86_400
"""Longest time for which the pod stays when the run is over, so that the mirror can fetch the log."""


def main() -> None:
    """Keep a controller running until the run is over, then wait for deletion: an exit would restart the container."""
    parser = argparse.ArgumentParser(prog="holdfast.launch.kubernetes.incluster.pod_supervisor")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--job", type=Path, required=True, help="the job as accepted")
    parser.add_argument("--keys", type=Path, required=True, help="folder of token, certificates and the job's secrets")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--sync-port", type=int, default=SYNC_PORT)
    parser.add_argument("--gateway", action="store_true", help="a Gateway connects to the port for clients")
    options = parser.parse_args()
    adopt_orphans()
    receive_signals()
    # The first process of a container ignores signals without a handler: the pod would take its full grace to end.
    signal.signal(signal.SIGTERM, _on_sigterm)
    folder = RunDir(options.folder, secrets_dir=options.keys)
    # Others may traverse but not list it: a kubelet that is not root there mounts folders of it into nodes' pods.
    folder.path.mkdir(parents=True, exist_ok=True, mode=0o711)
    with serving(folder, options.sync_port, ANY_ADDRESS if options.gateway else LOOPBACK):
        _supervise(folder, options)


def _supervise(folder: RunDir, options: argparse.Namespace) -> None:
    lock = _lock(folder, options.port)
    _fill_run_dir(folder, options.job.read_text(), options.keys)
    with listen(folder, ANY_ADDRESS, options.port) as (agents, clients):
        if supervise(folder, agents, clients, lock) == ExitCode.SUPERSEDED:
            _log_line("another pod is this run's controller by now; this one leaves its folder and its objects alone.")
        else:
            _answer_probes(agents, SYNC_WAIT_S, folder.synced.exists)
            folder.control_socket.unlink(missing_ok=True)
            _scale_to_zero(folder.run_id)
        _answer_probes(agents, math.inf, lambda: False)


def _lock(folder: RunDir, port: int) -> int:
    """Take the run's lock; waits for another controller, which may still run on a machine the cluster has lost.

    This pod answers probes meanwhile, because restarts would not free the lock.
    """
    lock = lock_run(folder)
    if lock is not None:
        return lock
    holder = folder.read_controller_record()
    where = (
        f"at {holder['host']}:{holder['port']} (pid {holder['supervisor_pid']})"
        if "supervisor_pid" in holder
        else "elsewhere"
    )
    _log_line(f"another controller of this run, {where}, holds {folder.path}/lock; this one waits until it ends.")
    _log_line("If its machine is lost, restart that machine or release the lock on the volume's server.")
    with socket.create_server((ANY_ADDRESS, port)) as probes:
        probes.settimeout(POLL_S)
        while (lock := lock_run(folder)) is None:
            _answer_one(probes)
    _log_line("the lock is free; the run continues here.")
    return lock


def _log_line(what: str) -> None:
    sys.stderr.write(f"{what}\n")
    sys.stderr.flush()


def _on_sigterm(_signal: int, _frame: object) -> None:
    """Exit, because the pod is being deleted; the next pod, if any, resumes from the log."""
    sys.exit()


def _fill_run_dir(folder: RunDir, job: str, keys: Path) -> None:
    """Write the files that controllers read, unless an earlier pod has.

    Keys stay in this machine's memory, because others may read the volume.
    """
    if folder.job.exists():
        if folder.job.read_text() != job:
            sys.exit(
                f"{folder.path} is of another run that had this id: delete it, or render this run's tree with a new id"
            )
        return
    _copy_code(folder, job, keys / CODE_KEY)
    atomic_write(folder.job, job.encode())  # last: it marks the folder as complete


def _copy_code(folder: RunDir, job: str, code: Path) -> None:
    """Copy the run's code from its Secret, if it is there, to where controllers read it."""
    if not code.exists():
        return
    from holdfast.launch.code.archive import archive_path

    place = archive_path(folder.code, json.loads(job)["code"]["digest"])
    place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    atomic_write(place, code.read_bytes())


def _scale_to_zero(run: str) -> None:
    import asyncio  # late: imports delay the start of the run

    from holdfast.launch.kubernetes.incluster.controller_identity import scale_to_zero

    asyncio.run(scale_to_zero(run))


def _answer_probes(agents: socket.socket, longest_s: float, done: Callable[[], bool]) -> None:
    """Answer probes without a controller, until done or for `longest_s` seconds."""
    agents.settimeout(POLL_S)
    deadline = time.monotonic() + longest_s
    while not done() and time.monotonic() < deadline:
        _answer_one(agents)


def _answer_one(agents: socket.socket) -> None:
    with contextlib.suppress(TimeoutError):
        agents.accept()[0].close()


if __name__ == "__main__":
    main()
