"""The controller's connection to the run's Monarch client: finds or starts it, and starts another when it ends."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
from collections.abc import Callable

import msgspec

from holdfast.errors import ExitCode, HoldfastError, failure
from holdfast.findings import Finding, Owner, Severity
from holdfast.job.backend import NodeId
from holdfast.launch.local import socket_dir
from holdfast.launch.monarch.client_process import (
    LOG_NAME,
    SOCKET_NAME,
    client_folder,
    kill_client,
    last_lines,
    start_client,
)
from holdfast.launch.monarch.monarch_messages import (
    HEARTBEAT_S,
    PLACE_TIMEOUT_S,
    START_TIMEOUT_S,
    STOP_TIMEOUT_S,
    AgentNotPlaced,
    AgentPlaced,
    AgentPlacement,
    ClientAlive,
    ForgetAgent,
    FromClient,
    PlaceAgent,
    ToClient,
    decode_from_client,
    encode,
)
from holdfast.run_dir import RunDir

log = logging.getLogger("holdfast.controller")

SILENT_S = 30.0
"""A client that has sent nothing for so long is killed; it sends something every HEARTBEAT_S. Importing Monarch takes
0.2 s, and much longer on a busy machine."""
FIRST_DELAY_S, MAX_DELAY_S = 0.2, 10.0
"""Between two clients."""
RUN_ENDS = "the run ends"

assert SILENT_S > 3 * HEARTBEAT_S
assert PLACE_TIMEOUT_S > SILENT_S + START_TIMEOUT_S + STOP_TIMEOUT_S


class MonarchLink:
    """Keeps a Monarch client connected; calls back with its messages, and when it was lost."""

    def __init__(
        self,
        folder: RunDir,
        *,
        on_message: Callable[[FromClient], None],
        on_lost: Callable[[Finding], None],
        address: str = "",
    ) -> None:
        self._folder, self._on_message, self._on_lost = folder, on_message, on_lost
        self._address = address
        """Where a client listens for Monarch on other machines; empty for none."""
        self._output: asyncio.StreamWriter | None = None
        self._connected = asyncio.Event()
        self._placing: dict[NodeId, asyncio.Future[None]] = {}
        """Agents that were requested, until the client answers."""
        self._process: subprocess.Popen[bytes] | None = None
        """The client, if this controller started it: kept until its exit status is read."""
        self._running: asyncio.Task[None] | None = None
        self._closed = False

    def start(self) -> None:
        """Begin to connect, unless that has begun or the link is closed."""
        if self._running is None and not self._closed:
            self._running = asyncio.ensure_future(self._run())

    async def place(self, node_id: NodeId, where: AgentPlacement) -> None:
        """Have an agent started, here or on another machine.

        Raises HoldfastError if Monarch does not, or if the link is closed.
        """
        if self._closed:
            raise _not_placed(node_id, RUN_ENDS)
        self.start()
        answer = self._placing[node_id] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(PLACE_TIMEOUT_S):
                await self._connected_or(answer)
                if not answer.done():  # else a client was lost meanwhile, or the run ends
                    self._send(PlaceAgent(node=node_id.node, generation=node_id.generation, where=where))
                await answer
        except TimeoutError as error:
            raise _not_placed(node_id, f"no answer within {PLACE_TIMEOUT_S:g} s") from error
        finally:
            self._placing.pop(node_id, None)

    def forget(self, node_id: NodeId) -> None:
        """Hear nothing more of a node on another machine: its processes are killed there."""
        self._send(ForgetAgent(node=node_id.node, generation=node_id.generation))

    async def close(self) -> None:
        """End the client and all of Monarch's processes; nothing is placed after that."""
        self._closed = True
        if self._running is not None:
            self._running.cancel()
        self._fail_placements(RUN_ENDS)
        await asyncio.to_thread(self._kill)
        socket_dir.remove(client_folder(self._folder))

    async def _connected_or(self, answer: asyncio.Future[None]) -> None:
        """Wait for a client, or for the answer that there will be none."""
        connected = asyncio.ensure_future(self._connected.wait())
        try:
            await asyncio.wait((connected, answer), return_when=asyncio.FIRST_COMPLETED)
        finally:
            connected.cancel()

    def _send(self, message: ToClient) -> None:
        if self._output is not None:
            self._output.write(encode(message))

    async def _run(self) -> None:
        delay_s = FIRST_DELAY_S
        while True:
            try:
                received, why = await self._serve()
            except OSError as error:
                received, why = False, str(error)
            finally:
                self._output = None
                self._connected.clear()
            await asyncio.to_thread(self._kill)
            lost = Finding(
                code="orchestrator-lost",
                severity=Severity.WARNING,
                what=f"Monarch's client has ended, and with it the processes of all nodes: {why}",
                where=str(client_folder(self._folder) / LOG_NAME),
                evidence=last_lines(self._folder),
                remedy="Nothing if it happens once: another is started, and the nodes with it. Else see its log.",
                owner=Owner.CLUSTER,
            )
            log.warning("Monarch's client: %s", why)
            self._fail_placements("its client has ended")
            self._on_lost(lost)
            delay_s = FIRST_DELAY_S if received else min(MAX_DELAY_S, delay_s * 2)
            await asyncio.sleep(delay_s)

    async def _serve(self) -> tuple[bool, str]:
        """Read a client's messages until it is lost; returns whether there were any, and why it was lost."""
        reader, self._output = await self._connect()
        received = False
        self._connected.set()
        try:
            while True:
                async with asyncio.timeout(SILENT_S):
                    line = await reader.readline()
                if not line:
                    return received, "its connection has ended"
                received = True
                self._take(decode_from_client(line))
        except TimeoutError:
            return received, f"it sent nothing for {SILENT_S:g} s, and was killed"
        except (OSError, ValueError, msgspec.DecodeError) as error:
            return received, f"its connection failed: {error}"
        finally:
            self._output.close()

    def _take(self, message: FromClient) -> None:
        match message:
            case ClientAlive():
                pass
            case AgentPlaced() if (answer := self._placing.get(message.node_id)) and not answer.done():
                answer.set_result(None)
            case AgentNotPlaced() if (answer := self._placing.get(message.node_id)) and not answer.done():
                answer.set_exception(_not_placed(message.node_id, message.reason))
            case _:
                self._on_message(message)

    def _fail_placements(self, why: str) -> None:
        for node_id, answer in self._placing.items():
            if not answer.done():
                answer.set_exception(_not_placed(node_id, why))

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to the client that an earlier controller left, or to a new one."""
        try:
            return await self._open()
        except OSError:
            await asyncio.to_thread(self._kill)
            self._process = start_client(self._folder, self._address)
            return await self._open()

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        directory = os.open(client_folder(self._folder), os.O_PATH | os.O_DIRECTORY)
        try:
            return await asyncio.open_unix_connection(f"/proc/self/fd/{directory}/{SOCKET_NAME}")
        finally:
            os.close(directory)

    def _kill(self) -> None:
        kill_client(self._folder)
        if self._process is not None:
            self._process.poll()
            self._process = None


def _not_placed(node_id: NodeId, why: str) -> HoldfastError:
    return failure(
        "agent-not-placed",
        f"Monarch did not start the agent of node{node_id.node}: {why}",
        exit_code=ExitCode.UNAVAILABLE,
        where=f"node{node_id.node}",
        remedy="It is tried again by itself. If it does not succeed, set `orchestrator: holdfast`.",
        owner=Owner.CLUSTER,
    )
