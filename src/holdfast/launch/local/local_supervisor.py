"""Supervises a local run: restarts its controller (controller_supervisor.py) and removes leftovers at the end.

It owns the sockets that the controller listens on, so the address survives a restart. It adopts every orphan of the
run, so that the final cleanup finds all processes.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path

from holdfast.errors import ExitCode
from holdfast.host.process_limits import receive_signals
from holdfast.host.processes import adopt_orphans, descendants, kill_all, read_process_id
from holdfast.job.isolation import Isolation
from holdfast.launch.controller_supervisor import listen, lock_run, supervise
from holdfast.launch.local import memory_limit, socket_dir
from holdfast.launch.local.run_network import run_network_for
from holdfast.launch.waiting_controller import WaitingController
from holdfast.run_dir import AGENT_RECORD_NAME, RunDir

KILL_TIMEOUT_S = 10.0


def main(waiting: WaitingController | None = None) -> int:
    """Keep a controller running, the first of which may be waiting, until its run is over; returns its exit code."""
    parser = argparse.ArgumentParser(prog="holdfast.launch.local.local_supervisor")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--isolation", required=True, type=Isolation, help="how the run's nodes are kept apart")
    parser.add_argument("--interface", action="append", default=[], metavar="NAME=MBIT", help="of isolated nodes")
    parser.add_argument("--listen", default="", help="address on which the controller listens instead of loopback")
    parser.add_argument("--prestart", default="", help="module whose `prestart` starts what the controller will need")
    options = parser.parse_args()
    if waiting is not None and options.isolation is not Isolation.PROCESS:
        waiting.end()  # it is outside of the namespaces that this process enters
        waiting = None
    adopt_orphans()
    receive_signals()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    folder = RunDir(options.folder)
    lock = lock_run(folder)
    if lock is None:
        sys.exit("the run has a controller already")
    networks = run_network_for(options.isolation, folder.run_id, _interfaces(options.interface))
    address = networks.enter(_live_agents(folder))
    begun = waiting.agents if waiting else None
    with listen(folder, options.listen or address, agents=begun) as (agents, clients):
        if options.prestart:
            _prestart(options.prestart, folder)
        code = supervise(folder, agents, clients, lock, waiting)
    if code == ExitCode.SUPERSEDED:
        return code  # another supervisor owns the run now
    nodes = list(folder.nodes.glob("*"))
    for node_folder in nodes:
        memory_limit.kill_all(node_folder)
    kill_all(lambda: {*descendants(os.getpid()), *_cgroup_pids(nodes)}, within_s=KILL_TIMEOUT_S)
    for node_folder in nodes:
        memory_limit.remove_cgroups(node_folder)
        socket_dir.remove(node_folder)
    folder.delete_secrets()
    folder.control_socket.unlink(missing_ok=True)
    networks.remove()
    return code


def _prestart(module: str, folder: RunDir) -> None:
    """Start what the controller will need; if that fails, the controller starts it, or reports why it cannot."""
    try:
        import_module(module).prestart(folder)
    except OSError as error:
        sys.stderr.write(f"{module}: nothing was started before the controller: {error}\n")


def _interfaces(words: Sequence[str]) -> Mapping[str, int]:
    return {name: int(mbit) for name, _, mbit in (word.partition("=") for word in words)}


def _cgroup_pids(nodes: Iterable[Path]) -> Iterator[int]:
    """Processes left in the nodes' cgroups by agents that died together with an earlier supervisor."""
    return (pid for node_folder in nodes for pid in memory_limit.processes(node_folder))


def _live_agents(folder: RunDir) -> Iterator[int]:
    """Live agents of an earlier supervisor's controller."""
    for path in folder.nodes.glob(f"*/{AGENT_RECORD_NAME}"):
        agent = read_process_id(path)
        if agent is not None and agent.alive:
            yield agent.pid


if __name__ == "__main__":
    sys.exit(main())
