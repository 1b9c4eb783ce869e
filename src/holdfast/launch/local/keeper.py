"""The keeper of a local run: a tiny parent that restarts its controller (keeping.py) and sweeps up after it.

It holds the sockets the controller listens on, so agents and clients find the same address whichever controller is
alive, and it adopts every orphan of the run, so that nothing escapes the last sweep.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from holdfast.folder import AGENT_NAME, SUPERSEDED_STATUS, RunFolder
from holdfast.host.limits import receive_signals
from holdfast.host.processes import adopt_orphans, descendants, end_all, recorded
from holdfast.job.isolation import Isolation
from holdfast.launch.keeping import keep, listen, take
from holdfast.launch.local import memory_limit
from holdfast.launch.local.isolation import networks_for

SWEEP_S = 10.0


def main() -> int:
    """Keep a controller alive until its run is over; its exit code."""
    parser = argparse.ArgumentParser(prog="holdfast.launch.local.keeper")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--isolation", required=True, type=Isolation, help="how the run's nodes are kept apart")
    options = parser.parse_args()
    adopt_orphans()
    receive_signals()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    folder = RunFolder(options.folder)
    lock = take(folder)
    if lock is None:
        sys.exit("the run has a controller already")
    networks = networks_for(options.isolation, folder.run)
    address = networks.enter(_live_agents(folder))
    with listen(folder, address) as (agents, clients):
        code = keep(folder, agents, clients, lock)
    if code == SUPERSEDED_STATUS:
        return code  # what is here is another keeper's now
    nodes = list(folder.nodes.glob("*"))
    for node_folder in nodes:
        memory_limit.end(node_folder)
    end_all(lambda: {*descendants(os.getpid()), *_in_groups(nodes)}, within_s=SWEEP_S)
    for node_folder in nodes:
        memory_limit.clear(node_folder)
    folder.forget_secrets()
    folder.control_socket.unlink(missing_ok=True)
    networks.remove()
    return code


def _in_groups(nodes: Iterable[Path]) -> Iterator[int]:
    """What is left in the nodes' cgroups, of agents that died together with an earlier keeper."""
    return (pid for node_folder in nodes for pid in memory_limit.processes(node_folder))


def _live_agents(folder: RunFolder) -> Iterator[int]:
    """Agents that an earlier keeper's controller left behind."""
    for path in folder.nodes.glob(f"*/{AGENT_NAME}"):
        agent = recorded(path)
        if agent is not None and agent.alive:
            yield agent.pid


if __name__ == "__main__":
    sys.exit(main())
