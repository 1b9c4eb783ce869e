"""Runs nodes as local agent processes: starts them, finds them after a controller restart, and removes them completely.

Each node has a folder in the run's folder with `agent.json` (its process) and `agent.log`, and elsewhere a private
folder for the ranks' sockets (socket_dir.py).

Starting, finding and removing a node are in one long file because they must match.
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
from collections.abc import AsyncIterator
from pathlib import Path

from holdfast.events import Outcome
from holdfast.findings import Finding, Owner, Severity
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
from holdfast.job.backend import BackendNodeState, NodeId, NodeObservation
from holdfast.job.quarantine import Candidate, Certainty, MachineEvidence
from holdfast.job.run_spec import RunSpec
from holdfast.launch.local import memory_limit, socket_dir
from holdfast.launch.local.local_machines import LocalMachines
from holdfast.launch.local.run_network import RunNetwork
from holdfast.launch.quarantine_file import QuarantineFile, remember
from holdfast.run_dir import AGENT_RECORD_NAME, EXIT_REASON_NAME, RunDir, write_private
from holdfast.security.tokens import TokenIssuer

_NODE_FOLDER = re.compile(r"node(?P<node>\d{1,6})\.(?P<generation>\d{1,9})")

KILL_TIMEOUT_S = 10.0
"""Seconds to wait until killed processes have ended; only the kernel can delay that further."""


class LocalBackend:
    """Runs nodes as processes of this machine; `url` is the controller's address for agents."""

    def __init__(self, *, folder: RunDir, accepted: RunSpec, networks: RunNetwork, url: str) -> None:
        self._folder = folder
        self._accepted = accepted
        self._networks = networks
        self._url = url
        self._observed: asyncio.Queue[NodeObservation] = asyncio.Queue()
        self._quarantine = QuarantineFile(accepted.target)
        self._machines = LocalMachines(
            folder,
            accepted.capacity or accepted.job.node_slots,
            are_simulated=accepted.capacity is not None,
            quarantine=self._quarantine,
        )
        self._pending: dict[int, NodeId] = {}
        """Nodes to start once a machine is free, by node number."""
        self._current_generation: dict[int, int] = {}
        self._lock = asyncio.Lock()
        """Held while nodes start or stop: removal of a slot's earlier generation must not hit the next one."""
        self._cancelled = False
        """Whether `cancel` has removed the run's nodes."""
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        """Agents by pid, kept until their exit status is read: subprocess reaps dropped ones."""

    def generation(self, node: int, address: str) -> int | None:
        """None: every agent gets its generation on its command line."""
        return None

    async def submit(self, node_ids: tuple[NodeId, ...]) -> None:
        """Start an agent for each node that has none yet, up to the capacity."""
        async with self._lock:
            await self._submit(node_ids)

    async def _submit(self, node_ids: tuple[NodeId, ...]) -> None:
        if self._cancelled:
            return
        for node_id in node_ids:
            if self._agent_process(node_id) is None:
                self._pending[node_id.node] = node_id
            else:
                self._watch(node_id)
        for node_id in await self._start_pending():
            if node_id in node_ids:
                self._report(node_id, BackendNodeState.UNAVAILABLE, self._unavailable_reason())

    async def _start_pending(self) -> list[NodeId]:
        """Start waiting nodes while machines are free, lowest numbers first; returns the nodes that still wait.

        Raises the first error after trying all: a node that cannot start does not block the others.
        """
        live = [node_id for node_id in self._existing_nodes() if self._alive(node_id)]
        waiting = list[NodeId]()
        failed: Exception | None = None
        for _, node_id in sorted(self._pending.items()):
            if (machine := self._machines.choose(node_id, live)) is None:
                waiting.append(node_id)
                continue
            try:
                await asyncio.to_thread(self._kill_unrecorded, node_id)
                self._start(node_id, machine)
            except Exception as error:
                failed = failed or error
                continue
            del self._pending[node_id.node]
            live.append(node_id)
            self._watch(node_id)
        if failed is not None:
            raise failed
        return waiting

    def _unavailable_reason(self) -> str:
        return self._machines.unavailable_reason()

    def _alive(self, node_id: NodeId) -> bool:
        agent = self._agent_process(node_id)
        return agent is not None and agent.alive

    def observe(self) -> AsyncIterator[NodeObservation]:
        """Node starts and failures, and agent exits, including those without a running controller."""
        for node_id in self._existing_nodes():
            self._watch(node_id)
        return self._observations()

    async def _observations(self) -> AsyncIterator[NodeObservation]:
        while True:
            yield await self._observed.get()

    async def replace_node(self, node_id: NodeId, reason: str) -> None:
        """Remove the slot's earlier generations, then start this one, if a machine is free."""
        async with self._lock:
            for former in self._existing_nodes():
                if former.node == node_id.node and former.generation < node_id.generation:
                    await asyncio.to_thread(self._remove, former)
            await self._submit((node_id,))

    async def quarantined(self) -> tuple[Finding, ...]:
        """Nothing to do: nodes are never placed there, and the start of the run said so (local_preflight.py)."""
        return ()

    async def avoid_machine(
        self, node_id: NodeId, machine: str, evidence: MachineEvidence | None
    ) -> tuple[Finding, ...]:
        """Use another simulated machine if one is free; else it is impossible: all nodes are on this machine."""
        others = [other for other in self._existing_nodes() if self._alive(other) and other.node != node_id.node]
        avoided = self._machines.avoid(machine, others)
        if evidence is None:
            return ()
        findings = await asyncio.to_thread(self._remember, machine, evidence) if machine else ()
        if avoided or evidence.certainty is Certainty.CHECK:
            return findings
        same = Finding(
            code="machine-not-avoided",
            severity=Severity.WARNING,
            what=f"the replacement of node{node_id.node} runs on the same machine: a local run has no other",
            where=f"node{node_id.node}",
            remedy="If the device fails again, repair it, or run the job on a target with other machines.",
            owner=Owner.CLUSTER,
        )
        return (same, *findings)

    def _remember(self, machine: str, evidence: MachineEvidence) -> tuple[Finding, ...]:
        candidate = Candidate(machine=machine, run=self._folder.run_id, evidence=evidence)
        return remember(self._quarantine, candidate, machines=len(self._machines.names), target=self._accepted.target)

    async def cordon(self, node_id: NodeId) -> None:
        """Take a simulated machine out of use."""
        self._machines.cordon(node_id)

    async def uncordon(self, node_id: NodeId) -> None:
        """Use it again, and start a node that waits for it."""
        self._machines.uncordon(node_id)
        async with self._lock:
            await self._start_pending()

    async def report_outcome(self, outcome: Outcome, exit_code: int, reason: str) -> None:
        """Nothing to do: the run's folder has the outcome."""

    async def cancel(self) -> None:
        """Remove every node: processes, sockets, namespaces."""
        async with self._lock:
            self._cancelled = True
            self._pending.clear()
            for node_id in self._existing_nodes():
                await asyncio.to_thread(self._remove, node_id)
            await asyncio.to_thread(self._networks.remove)

    def _start(self, node_id: NodeId, machine: str) -> None:
        node_folder = self._folder.node_dir(node_id.node, node_id.generation)
        node_folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._machines.place(node_id, machine)
        folder_of_sockets = socket_dir.create(node_folder)
        node = self._networks.add_node(node_id.node)
        argv = [
            *node.command_prefix,
            sys.executable,
            "-m",
            "holdfast.agent",
            str(node_id.node),
            str(node_id.generation),
        ]
        options = {
            "--controller": self._url,
            "--controller-record": str(self._folder.controller_record),
            "--agent-record": str(node_folder / AGENT_RECORD_NAME),
            "--token-file": str(self._token_file(node_id, node_folder)),
            "--folder": str(node_folder),
            "--sockets": str(folder_of_sockets),
            "--code": str(self._folder.code),
            "--address": node.address,
            "--controller-grace-s": f"{self._accepted.job.recovery.controller_grace_s:g}",
            "--node-grace-s": f"{self._accepted.job.recovery.node_grace_s:g}",
            "--stop-grace-s": f"{self._accepted.job.recovery.stop_grace_s:g}",
        }
        if self._url.startswith("wss:"):
            options["--ca"] = str(self._folder.ca)
        environ = os.environ | {"HOLDFAST_NODE": node_mark(self._folder.run_id, node_id)}
        with (node_folder / "agent.log").open("ab") as output:
            process = subprocess.Popen(
                [*argv, *(word for option in options.items() for word in option)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=environ,
                start_new_session=True,
            )
        assert process.stdin is not None
        with process.stdin:  # closing it, here or by dying, lets the agent proceed
            restore_limits(process.pid)
            self._limit_memory(process.pid, node_id)
            self._children[process.pid] = process
            # An agent that is already dead is watched like any other, by a pid that does not exist.
            identity = identify(process.pid) or ProcessId(process.pid, -1)
            atomic_write(
                node_folder / AGENT_RECORD_NAME, json.dumps({"pid": identity.pid, "started": identity.started}).encode()
            )

    def _limit_memory(self, agent: int, node_id: NodeId) -> None:
        """Limit an agent's memory before it has children; without cgroups local_preflight.py has warned."""
        limit_bytes, where = self._accepted.job.resources.memory, cgroup_parent()
        if limit_bytes is not None and isinstance(where, CgroupParent):
            name = f"{self._folder.run_id}-{node_id.node}.{node_id.generation}"
            memory_limit.limit_agent(
                agent, limit_bytes, self._folder.node_dir(node_id.node, node_id.generation), name, where
            )

    def _token_file(self, node_id: NodeId, node_folder: Path) -> Path:
        """Write the node's token again: an interrupted start may have left half of one."""
        path = node_folder / "token"
        path.unlink(missing_ok=True)
        write_private(path, TokenIssuer(read_line(self._folder.token)).node_token(node_id.node, node_id.generation))
        return path

    def _kill_unrecorded(self, node_id: NodeId) -> None:
        """Kill an agent whose controller died between starting and recording it; it has not joined."""
        node_folder = self._folder.node_dir(node_id.node, node_id.generation)
        if node_folder.exists():
            kill_all(
                lambda: by_env(all_pids(), HOLDFAST_NODE=node_mark(self._folder.run_id, node_id)),
                within_s=KILL_TIMEOUT_S,
            )
            memory_limit.remove_cgroups(node_folder)
            socket_dir.remove(node_folder)

    def _agent_process(self, node_id: NodeId) -> ProcessId | None:
        """The node's agent, as recorded by this or an earlier controller."""
        return read_process_id(self._folder.node_dir(node_id.node, node_id.generation) / AGENT_RECORD_NAME)

    def _existing_nodes(self) -> list[NodeId]:
        """Nodes that may have processes: those with a token, which is written first and deleted last."""
        node_ids: list[NodeId] = []
        for path in sorted(self._folder.nodes.glob("node*.*/token")):
            named = _NODE_FOLDER.fullmatch(path.parent.name)
            if named is not None and int(named["node"]) < self._accepted.job.node_slots:
                node_ids.append(NodeId(node=int(named["node"]), generation=int(named["generation"])))
        return node_ids

    def _watch(self, node_id: NodeId) -> None:
        """Report when a node's agent ends, or that it already has."""
        agent = self._agent_process(node_id)
        if agent is None or self._current_generation.get(node_id.node, -1) >= node_id.generation:
            return
        self._current_generation[node_id.node] = node_id.generation
        descriptor = _open_pidfd(agent)
        if descriptor is None:
            self._report(node_id, BackendNodeState.TERMINATED, self._exit_reason(node_id, agent.pid))
        else:
            self._report(node_id, BackendNodeState.CREATED, machine=self._machines.name_of(node_id))
            asyncio.get_running_loop().add_reader(descriptor, self._on_agent_exit, descriptor, node_id, agent.pid)

    def _on_agent_exit(self, descriptor: int, node_id: NodeId, pid: int) -> None:
        asyncio.get_running_loop().remove_reader(descriptor)
        os.close(descriptor)
        self._report(node_id, BackendNodeState.TERMINATED, self._exit_reason(node_id, pid))

    def _report(self, node_id: NodeId, state: BackendNodeState, reason: str = "", *, machine: str = "") -> None:
        self._observed.put_nowait(NodeObservation(node_id=node_id, state=state, reason=reason, machine=machine))

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

    def _remove(self, node_id: NodeId) -> None:
        """Kill all processes of a node, as when a machine dies."""
        agent = self._agent_process(node_id)
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
        self._networks.remove_node(node_id.node)
        memory_limit.remove_cgroups(node_folder)
        (node_folder / "token").unlink(missing_ok=True)


def _adopted_orphans(folder: RunDir) -> list[int]:
    """Processes with a cleared environment that outlived their agent, and that the run's supervisor has adopted.

    A live agent adopts its own orphans, so none of these belongs to another node.
    """
    supervisor = os.getppid()
    if folder.read_controller_record().get("supervisor_pid") != supervisor:
        return []
    orphans = strays(children(supervisor), own={os.getsid(supervisor)}, known=(HELPER, "HOLDFAST_NODE"))
    return [pid for orphan in orphans for pid in (orphan, *descendants(orphan))]


def _open_pidfd(agent: ProcessId) -> int | None:
    """A descriptor that becomes readable when the agent ends; None if it has ended."""
    try:
        descriptor = os.pidfd_open(agent.pid)
    except ProcessLookupError:
        return None
    if agent.alive:
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
