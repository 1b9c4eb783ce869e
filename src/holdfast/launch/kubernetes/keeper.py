"""The keeper of a run on Kubernetes: the controller's pod starts it, and it makes the run's folder on the volume.

A pod that is started again finds the folder as it was left, and its controller goes on from the log in it. Imports
little: a run cannot begin before it has.
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

from holdfast.folder import SUPERSEDED_STATUS, RunFolder
from holdfast.host.files import put
from holdfast.host.limits import receive_signals
from holdfast.host.processes import adopt_orphans
from holdfast.launch.keeping import keep, listen, take
from holdfast.launch.kubernetes.desk import KEPT_S
from holdfast.launch.kubernetes.names import CODE

EVERYWHERE = "0.0.0.0"
"""Nodes come over the network; the run's NetworkPolicy says which."""
BEAT_S = 0.2


def main() -> None:
    """Keep a controller alive until its run is over, and wait to be taken away: what ends is started again."""
    parser = argparse.ArgumentParser(prog="holdfast.launch.kubernetes.keeper")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--job", type=Path, required=True, help="the job as accepted")
    parser.add_argument("--keys", type=Path, required=True, help="folder of token, certificates and the job's secrets")
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args()
    adopt_orphans()
    receive_signals()
    # The first process of a container ignores what it does not handle, and would be waited for until its grace is over.
    signal.signal(signal.SIGTERM, _leave)
    folder = RunFolder(options.folder, keys=options.keys)
    # Others may pass through, but not list it: a kubelet that is not root there mounts folders of it into nodes' pods.
    folder.path.mkdir(parents=True, exist_ok=True, mode=0o711)
    lock = _lock(folder, options.port)
    _fill(folder, options.job.read_text(), options.keys)
    with listen(folder, EVERYWHERE, options.port) as (agents, clients):
        if keep(folder, agents, clients, lock) == SUPERSEDED_STATUS:
            _say("another pod is this run's controller by now; this one leaves its folder and its objects alone.")
        else:
            _answer_probes(agents, KEPT_S, folder.collected.exists)
            folder.control_socket.unlink(missing_ok=True)
            _retire(folder.run)
        _answer_probes(agents, math.inf, lambda: False)


def _lock(folder: RunFolder, port: int) -> int:
    """The run's lock, once no other controller holds it: one on a machine that the cluster has lost may live on.

    This pod answers probes meanwhile, since to be started again and again would not free the lock.
    """
    lock = take(folder)
    if lock is not None:
        return lock
    holder = folder.description()
    where = f"at {holder['host']}:{holder['port']} (pid {holder['keeper']})" if "keeper" in holder else "elsewhere"
    _say(f"another controller of this run, {where}, holds {folder.path}/lock; this one waits until it ends.")
    _say("If its machine is lost, restart that machine or release the lock on the volume's server.")
    with socket.create_server((EVERYWHERE, port)) as probes:
        probes.settimeout(BEAT_S)
        while (lock := take(folder)) is None:
            _answer_one(probes)
    _say("the lock is free; the run continues here.")
    return lock


def _say(what: str) -> None:
    sys.stderr.write(f"{what}\n")
    sys.stderr.flush()


def _leave(_signal: int, _frame: object) -> None:
    """The pod is taken away: the next one, if there is to be one, goes on from the log."""
    sys.exit()


def _fill(folder: RunFolder, job: str, keys: Path) -> None:
    """Write what controllers need to know, once; what is there already is of an earlier pod.

    Keys stay where they are, in the memory of this machine: others may read the volume.
    """
    if folder.job.exists():
        return
    _take_code(folder, job, keys / CODE)
    put(folder.job, job.encode())  # the last: where it is, all is


def _take_code(folder: RunFolder, job: str, code: Path) -> None:
    """Put the run's code, where its Secret has that, where controllers look for it."""
    if not code.exists():
        return
    from holdfast.launch.code.archive import archive_path

    place = archive_path(folder.code, json.loads(job)["code"]["digest"])
    place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    put(place, code.read_bytes())


def _retire(run: str) -> None:
    import asyncio  # a run cannot begin before its keeper has all imports

    from holdfast.launch.kubernetes.succession import retire

    asyncio.run(retire(run))


def _answer_probes(agents: socket.socket, longest_s: float, enough: Callable[[], bool]) -> None:
    """Live on without a controller."""
    agents.settimeout(BEAT_S)
    deadline = time.monotonic() + longest_s
    while not enough() and time.monotonic() < deadline:
        _answer_one(agents)


def _answer_one(agents: socket.socket) -> None:
    with contextlib.suppress(TimeoutError):
        agents.accept()[0].close()


if __name__ == "__main__":
    main()
