"""The agents of a run's nodes on one machine: starts them, finds them after a restart, and removes them completely.

Each node has a folder in the run's folder with `agent.json` (its process) and `agent.log`, and elsewhere a private
folder for the ranks' sockets (socket_dir.py).

Starting, finding and removing a node are in one file because they must match.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from msgspec import Struct, field

from holdfast.host.cgroups import CgroupParent, cgroup_parent
from holdfast.host.files import atomic_write, read_line
from holdfast.host.process_limits import restore_limits
from holdfast.host.processes import (
    HELPER,
    ProcessId,
    all_pids,
    by_env,
    children,
    descendants,
    identify,
    kill_all,
    read_process_id,
    send_signal,
    signal_name,
    strays,
)
from holdfast.job.backend import NodeId
from holdfast.launch.local import memory_limit, socket_dir
from holdfast.run_dir import AGENT_RECORD_NAME, EXIT_REASON_NAME, RunDir, write_private

_NODE_FOLDER = re.compile(r"node(?P<node>\d{1,6})\.(?P<generation>\d{1,9})")

KILL_TIMEOUT_S = 10.0
"""Seconds to wait until killed processes have ended; only the kernel can delay that further."""


class AgentStart(Struct, frozen=True, kw_only=True):
    """How to start a node's agent."""

    url: str
    """WebSocket URL of the controller."""
    token: str
    """The node's own token."""
    address: str
    """Address at which other nodes reach this one."""
    controller_grace_s: float
    node_grace_s: float
    stop_grace_s: float
    memory_bytes: int | None = None
    """Limit of the memory of all processes of the node; none means no limit."""
    command_prefix: tuple[str, ...] = ()
    """What runs a command in the node's namespaces."""
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    inherited: tuple[int, ...] = ()
    """Descriptors that stay open as long as the agent runs."""


class NodeProcesses:
    """The agents of one run on this machine; `on_exit` receives how a watched one ended."""

    def __init__(self, folder: RunDir, node_slots: int, on_exit: Callable[[NodeId, str], None]) -> None:
        self._folder = folder
        self._node_slots = node_slots
        self._on_exit = on_exit
        self._watched: dict[int, int] = {}
        """The generation that is watched, by node number."""
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        """Agents by pid, kept until their exit status is read: subprocess reaps dropped ones."""

    def existing(self) -> list[NodeId]:
        """Nodes that may have processes: those with a token, which is written first and deleted last."""
        return existing_nodes(self._folder, self._node_slots)

    def has_agent(self, node_id: NodeId) -> bool:
        """Whether an agent was started for a node, by this or an earlier process."""
        return self._agent(node_id) is not None

    def alive(self, node_id: NodeId) -> bool:
        """Whether a node's agent runs."""
        agent = self._agent(node_id)
        return agent is not None and agent.alive

    def start(self, node_id: NodeId, how: AgentStart) -> None:
        """Start a node's agent; raises OSError if that is impossible."""
        folder = self._folder
        node_folder = folder.node_dir(node_id.node, node_id.generation)
        node_folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder_of_sockets = socket_dir.create(node_folder)
        argv = [
            *how.command_prefix,
            sys.executable,
            "-m",
            "holdfast.agent",
            str(node_id.node),
            str(node_id.generation),
        ]
        options = {
            "--controller": how.url,
            "--controller-record": str(folder.controller_record),
            "--agent-record": str(node_folder / AGENT_RECORD_NAME),
            "--token-file": str(write_token(folder, node_id, how.token)),
            "--folder": str(node_folder),
            "--sockets": str(folder_of_sockets),
            "--code": str(folder.code),
            "--address": how.address,
            "--controller-grace-s": f"{how.controller_grace_s:g}",
            "--node-grace-s": f"{how.node_grace_s:g}",
            "--stop-grace-s": f"{how.stop_grace_s:g}",
        }
        if how.url.startswith("wss:"):
            options["--ca"] = str(folder.ca)
        environ = {**how.environ, "HOLDFAST_NODE": node_mark(folder.run_id, node_id)}
        with (node_folder / "agent.log").open("ab") as output:
            process = subprocess.Popen(
                [*argv, *(word for option in options.items() for word in option)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=environ,
                start_new_session=True,
                pass_fds=how.inherited,
            )
        assert process.stdin is not None
        with process.stdin:  # closing it, here or by dying, lets the agent proceed
            restore_limits(process.pid)
            self._limit_memory(process.pid, node_id, how.memory_bytes)
            self._children[process.pid] = process
            # An agent that is already dead is watched like any other, by a pid that does not exist.
            identity = identify(process.pid) or ProcessId(process.pid, -1)
            atomic_write(
                node_folder / AGENT_RECORD_NAME, json.dumps({"pid": identity.pid, "started": identity.started}).encode()
            )

    def _limit_memory(self, agent: int, node_id: NodeId, limit_bytes: int | None) -> None:
        """Limit an agent's memory before it has children; without cgroups local_preflight.py has warned."""
        where = cgroup_parent()
        if limit_bytes is not None and isinstance(where, CgroupParent):
            name = f"{self._folder.run_id}-{node_id.node}.{node_id.generation}"
            memory_limit.limit_agent(
                agent, limit_bytes, self._folder.node_dir(node_id.node, node_id.generation), name, where
            )

    def kill_unrecorded(self, node_id: NodeId) -> None:
        """Kill all processes that name a node in their environment, also those of an agent that nothing records.

        Before a start, of an agent whose starter died between starting and recording it, which has not joined. As a
        fence, of a node that must act no more (monarch_backend.py); `remove` follows, which finds the others.
        """
        node_folder = self._folder.node_dir(node_id.node, node_id.generation)
        if node_folder.exists():
            kill_all(
                lambda: by_env(all_pids(), HOLDFAST_NODE=node_mark(self._folder.run_id, node_id)),
                within_s=KILL_TIMEOUT_S,
            )
            memory_limit.remove_cgroups(node_folder)
            socket_dir.remove(node_folder)

    def watch(self, node_id: NodeId) -> bool:
        """Have `on_exit` called when a node's agent ends; returns whether it runs and was not watched before."""
        agent = self._agent(node_id)
        if agent is None or self._watched.get(node_id.node, -1) >= node_id.generation:
            return False
        self._watched[node_id.node] = node_id.generation
        descriptor = open_pidfd(agent)
        if descriptor is None:
            self._on_exit(node_id, self._exit_reason(node_id, agent.pid))
            return False
        asyncio.get_running_loop().add_reader(descriptor, self._on_agent_exit, descriptor, node_id, agent.pid)
        return True

    def _on_agent_exit(self, descriptor: int, node_id: NodeId, pid: int) -> None:
        asyncio.get_running_loop().remove_reader(descriptor)
        os.close(descriptor)
        self._on_exit(node_id, self._exit_reason(node_id, pid))

    def _agent(self, node_id: NodeId) -> ProcessId | None:
        """The node's agent, as recorded by this or an earlier process."""
        return read_process_id(self._folder.node_dir(node_id.node, node_id.generation) / AGENT_RECORD_NAME)

    def _exit_reason(self, node_id: NodeId, pid: int) -> str:
        """How an agent ended; unknown for one that an earlier controller started, which is not this process's child.

        An agent that exited by itself without a controller has recorded the reason.
        """
        with contextlib.suppress(OSError):
            return read_line(self._folder.node_dir(node_id.node, node_id.generation) / EXIT_REASON_NAME)
        child = self._children.pop(pid, None)
        # Not `poll()`: it reports exit code 0 for a child that was reaped when its node was removed.
        status = _reap(pid) if child is not None else None
        if child is None or status is None:
            return "its agent ended"
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode < 0:
            return f"its agent was ended by {signal_name(-child.returncode)}"
        return f"its agent exited with code {child.returncode}"

    def remove(self, node_id: NodeId) -> None:
        """Kill all processes of a node, as when a machine dies."""
        agent = self._agent(node_id)
        node_folder, mark = (
            self._folder.node_dir(node_id.node, node_id.generation),
            node_mark(self._folder.run_id, node_id),
        )
        # Check its mark too: after a reboot another process may have the same pid and start time.
        ours = agent is not None and agent.alive and by_env((agent.pid,), HOLDFAST_NODE=mark)
        root = agent.pid if agent is not None and ours else None
        if root is not None:
            # Stop it first, so that it starts nothing more, and kill it last, so that its process tree stays known.
            send_signal(root, signal.SIGSTOP)

        def tree() -> list[int]:
            below = descendants(root) if root is not None else _adopted_orphans(self._folder)
            known = {*below, *by_env(all_pids(), HOLDFAST_NODE=mark), *memory_limit.processes(node_folder)}
            return [pid for pid in known if pid != root]

        memory_limit.kill_all(node_folder)
        kill_all(tree, within_s=KILL_TIMEOUT_S)
        if agent is not None and root is not None:
            kill_all(lambda: [root] if agent.alive else [], within_s=KILL_TIMEOUT_S)
        socket_dir.remove(node_folder)
        memory_limit.remove_cgroups(node_folder)
        (node_folder / "token").unlink(missing_ok=True)


def existing_nodes(folder: RunDir, node_slots: int) -> list[NodeId]:
    """Nodes of a run that may have processes, here or elsewhere: those with a token in their folder."""
    names = (_NODE_FOLDER.fullmatch(path.parent.name) for path in sorted(folder.nodes.glob("node*.*/token")))
    found = (NodeId(node=int(name["node"]), generation=int(name["generation"])) for name in names if name)
    return [node_id for node_id in found if node_id.node < node_slots]


def write_token(folder: RunDir, node_id: NodeId, token: str) -> Path:
    """Write a node's token again: an interrupted start may have left half of one."""
    path = folder.node_dir(node_id.node, node_id.generation) / "token"
    path.unlink(missing_ok=True)
    write_private(path, token)
    return path


def _adopted_orphans(folder: RunDir) -> list[int]:
    """Processes with a cleared environment that outlived their agent, and that the run's supervisor has adopted.

    A live agent adopts its own orphans, so none of these belongs to another node.
    """
    supervisor = os.getppid()
    if folder.read_controller_record().get("supervisor_pid") != supervisor:
        return []
    orphans = strays(children(supervisor), own={os.getsid(supervisor)}, known=(HELPER, "HOLDFAST_NODE"))
    return [pid for orphan in orphans for pid in (orphan, *descendants(orphan))]


def open_pidfd(process: ProcessId) -> int | None:
    """A descriptor that becomes readable when the process ends; None if it has ended."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    if process.alive:
        return descriptor
    os.close(descriptor)
    return None


def _reap(child: int) -> int | None:
    """The wait status of a child that has ended; None if it was reaped elsewhere."""
    try:
        pid, status = os.waitpid(child, os.WNOHANG)
    except ChildProcessError:
        return None
    return status if pid else None


def node_mark(run: str, node_id: NodeId) -> str:
    """The value of HOLDFAST_NODE in all processes of a node."""
    return f"{run}/node{node_id.node}.{node_id.generation}"
