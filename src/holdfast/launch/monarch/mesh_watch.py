"""Watches the Monarch processes that started the agents of this machine, and fences a node whose one has ended."""

from __future__ import annotations

import asyncio
import os

from holdfast.host.processes import ProcessId, read_process_id
from holdfast.job.backend import NodeId
from holdfast.launch.local.node_processes import NodeProcesses, open_pidfd
from holdfast.launch.monarch.monarch_messages import MESH_RECORD_NAME
from holdfast.run_dir import RunDir


class MeshWatch:
    """Has a node end with its process mesh: its agent notices nothing of that."""

    def __init__(self, folder: RunDir, processes: NodeProcesses) -> None:
        self._folder, self._processes = folder, processes
        self._watched: set[NodeId] = set()
        """Nodes that end with their mesh."""
        self._reasons: dict[NodeId, str] = {}
        """Why nodes were killed."""
        self._killing: set[asyncio.Task[None]] = set()

    def forget(self, node_id: NodeId) -> None:
        """Leave a node alone: it is being removed."""
        self._watched.discard(node_id)

    def watch(self, node_id: NodeId) -> None:
        """Fence a node when its Monarch process ends, or now if it has; nothing if Monarch did not start its agent."""
        mesh = mesh_process(self._folder, node_id)
        if mesh is None or node_id in self._watched:
            return
        self._watched.add(node_id)
        if (descriptor := open_pidfd(mesh)) is None:
            self._on_end(node_id)
            return
        asyncio.get_running_loop().add_reader(descriptor, self._on_exit, descriptor, node_id)

    def fence(self, node_id: NodeId, why: str) -> None:
        """Kill the processes of a node, whose end is then seen as any other's."""
        if node_id not in self._watched or not self._processes.alive(node_id):
            return
        self._reasons.setdefault(node_id, why)
        killing = asyncio.ensure_future(asyncio.to_thread(self._processes.kill_unrecorded, node_id))
        self._killing.add(killing)
        killing.add_done_callback(self._killing.discard)

    def take_reason(self, node_id: NodeId, otherwise: str) -> str:
        """Why a node was fenced, if it was."""
        return self._reasons.pop(node_id, otherwise)

    def _on_exit(self, descriptor: int, node_id: NodeId) -> None:
        asyncio.get_running_loop().remove_reader(descriptor)
        os.close(descriptor)
        self._on_end(node_id)

    def _on_end(self, node_id: NodeId) -> None:
        self.fence(node_id, "its Monarch process has ended")


def mesh_process(folder: RunDir, node_id: NodeId) -> ProcessId | None:
    """The Monarch process that started a node's agent; None if there is none."""
    return read_process_id(folder.node_dir(node_id.node, node_id.generation) / MESH_RECORD_NAME)
