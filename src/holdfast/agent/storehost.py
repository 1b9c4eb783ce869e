"""Runs the process that hosts a replica's TCPStore on its first node (train/warm/storehost.py).

TorchFT's Manager is only ever a client of the store at MASTER_ADDR:MASTER_PORT: it relies on its launcher, as
torchelastic's agent, to host one. The agent itself listens at the port. The first connection starts the process,
which needs half a gigabyte: ranks that never connect cost nothing. The process imports torch once and serves one
attempt after another, each at a port of its own, so that no attempt meets what an earlier one has written.
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
from holdfast.agent.held import Wanted
from holdfast.agent.program import program
from holdfast.findings import Finding, Severity
from holdfast.host.processes import die_with_parent

log = logging.getLogger("holdfast.agent")

SCRIPT = Path(holdfast.__file__).parent / "train" / "warm" / "storehost.py"

USE_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""With `True` torch's ranks are clients of the store at MASTER_ADDR:MASTER_PORT, whatever their number."""

BACKLOG = 2048
"""Connections that wait while the process starts; torch's own is as long."""

SERVE_S = 120.0
"""Longest that it takes to import torch from a file system that is far away, and to listen."""


def hosts(env: Mapping[str, str], ranks: range) -> bool:
    """Whether a node with these ranks of a replica is to host its store."""
    return env.get(USE_AGENT_STORE) == "True" and 0 in ranks


class StoreHost:
    """The process that hosts the stores of this node, from the first connection to one of them."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._link: socket.socket | None = None
        """Its standard input, which takes listening sockets as well."""
        self._turn = asyncio.Lock()

    @property
    def started(self) -> bool:
        """Whether its process runs."""
        return self._process is not None and self._process.returncode is None

    async def serve(self, replica: int, port: int, rank: Wanted, output: Path) -> Finding | None:
        """Listen at a port, and host a replica's store there once somebody connects; a finding where that fails.

        It is hosted with the Python of a rank; what torch writes goes to `output`.
        """
        try:
            with _listening(port) as listener:
                await _connection(listener)
                async with self._turn:
                    said = await self._ask(f"{replica} {port}", listener, rank, output)
        except OSError as error:
            said = str(error)
        if said == f"serving {port}":
            return None
        log.error("no store at port %s: %s", port, said)
        return Finding(
            code="store-not-hosted",
            severity=Severity.WARNING,
            what=f"the store that the ranks of replica {replica} are to meet at could not be hosted at port {port}",
            where=f"port {port}",
            evidence=(said, f"its output: {output}"),
            remedy="Have torch in the Python of the command; "
            f"`env: {{{USE_AGENT_STORE}: 'False'}}` has rank 0 host the store.",
        )

    def close(self, replica: int) -> None:
        """The attempt is over: nobody meets there any more."""
        if self._link is not None:
            with contextlib.suppress(OSError):
                self._link.send(f"{replica} 0".encode())

    async def end(self) -> None:
        """End the process."""
        process = self._process
        self._drop()
        if process is not None:
            await process.wait()

    async def _ask(self, message: str, listener: socket.socket, rank: Wanted, output: Path) -> str:
        if self._process is None or self._process.returncode is not None:
            self._process = await self._start(rank, output)
        process = self._process
        assert self._link is not None
        assert process.stdout is not None
        wanted = f"serving {message.partition(' ')[2]}"
        try:
            async with asyncio.timeout(SERVE_S):
                socket.send_fds(self._link, [message.encode()], [listener.fileno()])
                while answer := (await process.stdout.readline()).decode(errors="replace").strip():
                    # Of an attempt that was over before the answer came.
                    stale = answer == "closed" or answer.startswith("serving ")
                    if answer == wanted or not stale:
                        return answer
            said = "its process ended"
        except TimeoutError:
            said = f"no answer within {SERVE_S:g} s"
        except OSError as error:
            said = str(error)
        self._drop()
        return said

    async def _start(self, rank: Wanted, output: Path) -> asyncio.subprocess.Process:
        found = program(rank.argv)
        python = rank.argv[:1] if isinstance(found, str) else found.python
        # It is the agent's, not of the rank's attempt.
        ours = {name: value for name, value in os.environ.items() if name.startswith("HOLDFAST_")}
        self._drop()
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._link.setblocking(False)
        errors = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            return await asyncio.create_subprocess_exec(
                *python,
                str(SCRIPT),
                stdin=theirs.fileno(),
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                env=rank.settled | ours,
                cwd=rank.cwd,
                preexec_fn=die_with_parent,
            )
        finally:
            os.close(errors)
            theirs.close()

    def _drop(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            self._process = None
        if self._link is not None:
            self._link.close()
            self._link = None


def _listening(port: int) -> socket.socket:
    """A socket that listens at a port of every address, as torch's store does."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=BACKLOG)
    return socket.create_server(("", port), backlog=BACKLOG)


async def _connection(listener: socket.socket) -> None:
    """Wait until somebody connects; they wait in the backlog until torch accepts them."""
    loop, arrived = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(listener, arrived.set)
    try:
        await arrived.wait()
    finally:
        loop.remove_reader(listener)
