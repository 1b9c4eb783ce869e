"""A run's process on one host: starts and removes its node there, and sends what the node writes.

`ssh` starts it (host_boot.py), and it ends with the connection; agents stay. The next one finds them again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

from holdfast.host.files import atomic_write
from holdfast.job.backend import NodeId
from holdfast.launch.changed_files import SYNCED_FILES, changes, read_range
from holdfast.launch.code.archive import CorruptArchive, store
from holdfast.launch.hosts.host_address import own_address
from holdfast.launch.hosts.host_lock import lock_host
from holdfast.launch.hosts.host_messages import (
    EndAnnounced,
    EndRun,
    FileChunk,
    FromHost,
    HostBusy,
    HostReady,
    HostReserved,
    NodeEnded,
    NodeNotStarted,
    NodePrepared,
    NodeRemoved,
    NodeRunning,
    ReleaseHost,
    RemoveNode,
    ReserveHost,
    RunEnded,
    Setup,
    SmallCode,
    StartNode,
    WatchNode,
    decode_to_host,
    encode,
)
from holdfast.launch.local.node_processes import AgentStart, NodeProcesses
from holdfast.launch.monarch.mesh_tls import MeshIdentity
from holdfast.launch.monarch.mesh_watch import MeshWatch
from holdfast.launch.monarch.monarch_host import remove_host, start_host
from holdfast.launch.monarch.monarch_messages import write_order
from holdfast.protocol import routes
from holdfast.run_dir import RunDir, runs_root

SYNC_POLL_S = 0.5
LINE_LIMIT = 1 << 20


class HostProcess:
    """Carries out the controller's messages for one run on this host."""

    def __init__(self, setup: Setup, output: asyncio.StreamWriter) -> None:
        self._folder = RunDir(runs_root() / setup.run)
        self._folder.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._setup = setup
        atomic_write(self._folder.ca, setup.ca.encode())
        record = {"host": setup.controller_host, "port": setup.controller_port}
        atomic_write(self._folder.controller_record, json.dumps(record).encode())
        self._output = output
        self._sent = dict(setup.sizes)
        self._reserved: tuple[socket.socket, ...] = ()
        """The lock of the host, until an agent inherits it."""
        self._sending = asyncio.Lock()
        """Held while changed files are sent, so that their order is that of the offsets."""
        self._processes = NodeProcesses(self._folder, setup.node_slots, self._on_exit)
        self._meshes = MeshWatch(self._folder, self._processes)

    def begin(self) -> None:
        """Say what is here, and watch the agents that an earlier process started."""
        found = self._processes.existing()
        self._send(
            HostReady(
                hostname=socket.gethostname(),
                address=own_address(),
                cpus=len(os.sched_getaffinity(0)),
                gpus=sum(1 for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia[0-9]+", path.name)),
                nodes=tuple((node_id.node, node_id.generation) for node_id in found),
            )
        )
        for node_id in found:
            if (node_id.node, node_id.generation) in self._setup.nodes:  # another host may share the folder
                self._watch(node_id)

    async def handle(self, message: ReserveHost | ReleaseHost | StartNode | WatchNode | RemoveNode | EndRun) -> None:
        """Carry out a message."""
        match message:
            case ReserveHost():
                self._send(HostBusy(reason=why) if (why := self._reserve()) else HostReserved())
            case ReleaseHost():
                self._release()
            case StartNode():
                await asyncio.to_thread(self._processes.kill_unrecorded, message.node_id)
                await self._start(message)
            case WatchNode():
                self._watch(message.node_id)
            case RemoveNode():
                self._meshes.forget(message.node_id)
                await asyncio.to_thread(self._processes.remove, message.node_id)
                remove_host(self._folder, message.node_id)
                await self.send_changes()
                self._send(NodeRemoved(node=message.node, generation=message.generation))
            case EndRun():
                await self.send_changes()
                await asyncio.to_thread(self._delete_files)
                self._send(RunEnded())

    def announce_end(self) -> None:
        """Say that this host is about to be taken back; its agents learn that by themselves."""
        self._send(EndAnnounced())

    async def sync(self) -> None:
        """Send what the node writes, until cancelled."""
        while True:
            await self.send_changes()
            await asyncio.sleep(SYNC_POLL_S)

    async def send_changes(self) -> None:
        """Send what the controller lacks of the logs of ranks and of the agent."""
        async with self._sending:
            for name, start, end in (*changes(self._folder, self._sent, with_log=False), *self._node_files()):
                with contextlib.suppress(FileNotFoundError):  # trimmed or removed meanwhile
                    for at, data in read_range(self._folder.path / name, start, end):
                        self._output.write(encode(FileChunk(name=name, at=at, bytes=len(data))) + data)
                        await self._output.drain()
                self._sent[name] = end

    def _node_files(self) -> Iterator[tuple[str, int, int]]:
        """Byte ranges of the files in the node's folder that the controller lacks."""
        for path in self._folder.nodes.glob("node*/**/*"):
            name = str(path.relative_to(self._folder.path))
            with contextlib.suppress(FileNotFoundError):
                found = path.lstat()
                if not stat.S_ISREG(found.st_mode) or not SYNCED_FILES.fullmatch(name):
                    continue
                known = self._sent.get(name, 0)
                if found.st_size != known:
                    yield name, known if found.st_size > known else 0, found.st_size

    def _reserve(self) -> str:
        """Keep the host from other runs; returns which run has it, if another does."""
        if self._reserved or not self._setup.exclusive:
            return ""
        held = lock_host(self._folder.run_id)
        if isinstance(held, str):
            return held
        self._reserved = held
        return ""

    def _release(self) -> None:
        for each in self._reserved:
            each.close()
        self._reserved = ()

    async def _start(self, wanted: StartNode) -> None:
        node_id = wanted.node_id
        if self._processes.has_agent(node_id):
            self._watch(node_id)
            return
        if busy := self._reserve():
            self._send(NodeNotStarted(node=wanted.node, generation=wanted.generation, reason=busy))
            return
        how = AgentStart(
            url=f"wss://{self._setup.controller_host}:{self._setup.controller_port}{routes.AGENT_SOCKET}",
            token=wanted.token,
            address=wanted.address or own_address(),
            controller_grace_s=wanted.controller_grace_s,
            node_grace_s=wanted.node_grace_s,
            stop_grace_s=wanted.stop_grace_s,
            memory_bytes=wanted.memory_bytes,
            inherited=tuple(each.fileno() for each in self._reserved),
        )
        try:
            if wanted.code is not None:
                await asyncio.to_thread(self._store_code, wanted.code)
            if wanted.mesh is not None:
                await self._prepare(node_id, how, wanted.mesh)
                return
            self._processes.start(node_id, how)
        except OSError as error:
            self._send(NodeNotStarted(node=wanted.node, generation=wanted.generation, reason=str(error)))
        finally:
            self._release()
        self._watch(node_id)

    def _store_code(self, code: SmallCode) -> None:
        """Unpack the code; if that is impossible, the agent downloads it, and reports why it cannot."""
        with contextlib.suppress(OSError, CorruptArchive):
            store(code.archive, self._folder.code, code.digest)

    async def _prepare(self, node_id: NodeId, how: AgentStart, own: MeshIdentity) -> None:
        """Have Monarch's process wait for its client, which starts the agent; raises OSError if that is impossible."""
        order = write_order(self._folder, self._setup.node_slots, node_id, how)
        try:
            mesh = await asyncio.to_thread(start_host, self._folder, node_id, own, how.inherited)
        except OSError:
            order.unlink()
            raise
        prepared = NodePrepared(node=node_id.node, generation=node_id.generation, mesh=mesh, order=str(order))
        self._send(prepared)

    def _watch(self, node_id: NodeId) -> None:
        if self._processes.watch(node_id):
            self._send(NodeRunning(node=node_id.node, generation=node_id.generation))
        self._meshes.watch(node_id)

    def _on_exit(self, node_id: NodeId, reason: str) -> None:
        reason = self._meshes.take_reason(node_id, reason)
        self._send(NodeEnded(node=node_id.node, generation=node_id.generation, reason=reason[:4096]))

    def _delete_files(self) -> None:
        """Delete the run's files; checkpoints stay, for a run that resumes from them."""
        try:
            paths = [*self._folder.path.iterdir()]
        except FileNotFoundError:  # another host that shares the folder was faster
            return
        for path in paths:
            if path == self._folder.checkpoints:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self._folder.path.rmdir()

    def _send(self, message: FromHost) -> None:
        self._output.write(encode(message))


async def _run() -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=LINE_LIMIT)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer)
    transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, sys.stdout.buffer)
    output = asyncio.StreamWriter(transport, protocol, None, loop)
    setup = decode_to_host(await reader.readline())
    assert isinstance(setup, Setup), setup
    host = HostProcess(setup, output)
    host.begin()
    loop.add_signal_handler(signal.SIGTERM, host.announce_end)  # Slurm signals all processes of an allocation
    syncing = asyncio.ensure_future(host.sync())
    while line := await reader.readline():
        message = decode_to_host(line)
        assert not isinstance(message, Setup), message
        await host.handle(message)
    syncing.cancel()


if __name__ == "__main__":
    asyncio.run(_run())
