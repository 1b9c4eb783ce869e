"""Runs the process that hosts a replica's TCPStore on its first node (train/zygote/store_server.py).

TorchFT's Manager is only ever a client of the store at MASTER_ADDR:MASTER_PORT: it relies on its launcher, as
torchelastic's agent, to host one. The agent itself listens at the port. The first connection starts the process,
which needs half a gigabyte: ranks that never connect cost nothing. The process imports torch once and serves one
attempt after another, each at its own port, so that no attempt reads what an earlier one wrote.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Mapping
from pathlib import Path

import holdfast
from holdfast.agent.python_command import parse_python_command
from holdfast.agent.zygote import RankCommand
from holdfast.findings import Finding, Severity
from holdfast.host.processes import die_with_parent

log = logging.getLogger("holdfast.agent")

SCRIPT = Path(holdfast.__file__).parent / "train" / "zygote" / "store_server.py"

USE_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""With `True` torch's ranks are clients of the store at MASTER_ADDR:MASTER_PORT, whatever their number."""

BACKLOG = 2048
"""Connections that wait while the process starts; torch's own is as long."""

START_TIMEOUT_S = 120.0
"""Longest that it takes to import torch from a file system that is far away, and to listen."""


def hosts_store(env: Mapping[str, str], ranks: range) -> bool:
    """Whether a node with these ranks of a replica is to host its store."""
    return env.get(USE_AGENT_STORE) == "True" and 0 in ranks


class TcpStoreHost:
    """The process that hosts the stores of this node, from the first connection to one of them."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._control: socket.socket | None = None
        """Its standard input, which takes listening sockets as well."""
        self._lock = asyncio.Lock()

    @property
    def started(self) -> bool:
        """Whether its process runs."""
        return self._process is not None and self._process.returncode is None

    async def serve(self, replica: int, port: int, command: RankCommand, output: Path) -> Finding | None:
        """Listen at a port, and host a replica's store there once a rank connects; return a finding where that fails.

        The process runs the rank's Python; torch's output goes to `output`.
        """
        try:
            with _listening(port) as listener:
                await _wait_for_connection(listener)
                async with self._lock:
                    answer = await self._request(f"{replica} {port}", listener, command, output)
        except OSError as error:
            answer = str(error)
        if answer == f"serving {port}":
            return None
        log.error("no store at port %s: %s", port, answer)
        return Finding(
            code="tcp-store-not-hosted",
            severity=Severity.WARNING,
            what=f"the store that the ranks of replica {replica} are to meet at could not be hosted at port {port}",
            where=f"port {port}",
            evidence=(answer, f"its output: {output}"),
            remedy="Have torch in the Python of the command; "
            f"`env: {{{USE_AGENT_STORE}: 'False'}}` has rank 0 host the store.",
        )

    def close(self, replica: int) -> None:
        """Close the store of an attempt that has ended."""
        if self._control is not None:
            with contextlib.suppress(OSError):
                self._control.send(f"{replica} 0".encode())

    async def stop(self) -> None:
        """Stop the process."""
        process = self._process
        self._kill()
        if process is not None:
            await process.wait()

    async def _request(self, message: str, listener: socket.socket, command: RankCommand, output: Path) -> str:
        if self._process is None or self._process.returncode is not None:
            self._process = await self._start(command, output)
        process = self._process
        assert self._control is not None
        assert process.stdout is not None
        expected = f"serving {message.partition(' ')[2]}"
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                socket.send_fds(self._control, [message.encode()], [listener.fileno()])
                while answer := (await process.stdout.readline()).decode(errors="replace").strip():
                    # Of an attempt that was over before the answer came.
                    stale = answer == "closed" or answer.startswith("serving ")
                    if answer == expected or not stale:
                        return answer
            answer = "its process ended"
        except TimeoutError:
            answer = f"no answer within {START_TIMEOUT_S:g} s"
        except OSError as error:
            answer = str(error)
        self._kill()
        return answer

    async def _start(self, command: RankCommand, output: Path) -> asyncio.subprocess.Process:
        found = parse_python_command(command.argv)
        python = command.argv[:1] if isinstance(found, str) else found.python
        # It is the agent's, not of the rank's attempt.
        ours = {name: value for name, value in os.environ.items() if name.startswith("HOLDFAST_")}
        self._kill()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        errors = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            return await asyncio.create_subprocess_exec(
                *python,
                str(SCRIPT),
                stdin=theirs.fileno(),
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                env=command.stable_environ | ours,
                cwd=command.cwd,
                preexec_fn=die_with_parent,
            )
        finally:
            os.close(errors)
            theirs.close()

    def _kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            self._process = None
        if self._control is not None:
            self._control.close()
            self._control = None


def _listening(port: int) -> socket.socket:
    """A socket that listens at a port of every address, as torch's store does."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=BACKLOG)
    return socket.create_server(("", port), backlog=BACKLOG)


async def _wait_for_connection(listener: socket.socket) -> None:
    """Wait until somebody connects; they wait in the backlog until torch accepts them."""
    loop, arrived = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(listener, arrived.set)
    try:
        await arrived.wait()
    finally:
        loop.remove_reader(listener)
