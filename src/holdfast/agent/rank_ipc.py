"""The agent's side of the ranks' sockets: one Unix socket per started process, newline-delimited JSON.

A launcher's ranks share its socket; each names itself in its hello. Invalid messages are dropped and counted, and no
connection is read faster than rate_limits.py allows.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, cast

from holdfast.agent.rate_limits import (
    DROPPED_MESSAGE_BYTES,
    MESSAGE_OVERHEAD_BYTES,
    READ_LIMIT,
    DropReason,
    RateLimiter,
)
from holdfast.events.encoding import encode
from holdfast.protocol.rank_messages import (
    AgentToRank,
    CheckpointAndExitNow,
    Hello,
    ProgramEnded,
    RankToAgent,
    StepClockFailed,
    UnknownKindError,
    decode_rank_message,
)

log = logging.getLogger("holdfast.agent")

MAX_LINE_BYTES = 1024 * 1024
MAX_CONNECTIONS = 1024
"""Limit per socket, also on the number of its ranks: a launcher's ranks of one node share it."""
SAMPLE_BYTES = 100
"""Bytes of a dropped line that are shown."""


class RankMessageHandler(Protocol):
    """Handles the messages of a server's ranks."""

    def on_message(self, rank: int, message: RankToAgent, dropped: Mapping[str, str]) -> None:
        """A message; `dropped` maps the name of each missing metric to the reason."""
        ...

    def on_close(self, rank: int) -> None:
        """A rank has closed its connection."""
        ...

    def on_drop(self, rank: int, reason: DropReason, sample: str) -> None:
        """A message was dropped; before the sender's hello, `rank` is the first rank of the socket."""
        ...


class RankServer:
    """Listens on one socket, for `rank` and the ranks that its process starts, all below `world_size`."""

    def __init__(self, handler: RankMessageHandler, *, rank: int = 0, world_size: int = 2**31) -> None:
        self.path: Path | None = None
        """Path of the open socket."""
        self.handler = handler
        self.rank = rank
        self.world_size = world_size
        self.known_ranks: set[int] = set()
        """Ranks that have sent a hello at any time."""
        self.connections: dict[int, asyncio.WriteTransport] = {}
        """Ranks whose Session has sent a hello and is still connected."""
        self.step_clocks: dict[int, asyncio.WriteTransport] = {}
        """Ranks whose step clock is connected; it takes no requests."""
        self.open_connections = 0
        """Open connections, including those without a hello."""
        self.idle = asyncio.Event()
        self._stop_request = b""
        """The latest request to exit, for ranks whose hello is still to come."""
        self._server: asyncio.Server | None = None
        self._inode: tuple[int, int] | None = None

    async def open(self, path: Path) -> None:
        """Listen at `path`; raise OSError."""
        self._server = await asyncio.get_running_loop().create_unix_server(lambda: _RankConnection(self), path)
        self.path, self._inode = path, _inode(path)

    @property
    def reachable(self) -> bool:
        """Whether a rank that connects now reaches this agent."""
        return self.path is not None and _inode(self.path) == self._inode

    def send(self, request: AgentToRank) -> None:
        """Send a request to every rank on this socket; a request to exit is also kept for ranks that connect later."""
        line = encode(request) + b"\n"
        if isinstance(request, CheckpointAndExitNow):
            self._stop_request = line
        for transport in self.connections.values():
            transport.write(line)

    def register(self, rank: int, transport: asyncio.WriteTransport) -> None:
        """A rank has sent its hello."""
        self.known_ranks.add(rank)
        self.connections[rank] = transport
        if self._stop_request:
            transport.write(self._stop_request)

    def register_step_clock(self, rank: int, transport: asyncio.WriteTransport) -> bool:
        """A rank's step clock has sent its hello; whether it is the first, and the rank has no Session."""
        if rank in self.connections or rank in self.step_clocks:
            return False
        self.known_ranks.add(rank)
        self.step_clocks[rank] = transport
        return True

    def accepts(self, rank: int) -> bool:
        """Whether it can be a rank of this attempt."""
        return rank < self.world_size and (rank in self.known_ranks or len(self.known_ranks) < MAX_CONNECTIONS)

    async def drain(self, within_s: float) -> None:
        """Read the last messages of a process that has ended, which may still be in the socket's buffer.

        A child that keeps the socket open delays this by at most `within_s`. Messages that are already sent are read in
        any case, however long this process waits for a CPU.
        """
        if self.path is None:
            return
        with contextlib.suppress(OSError):
            # The server accepts connections in order: once it has served this one, it has read all data of those before
            # it.
            reader, writer = await asyncio.open_unix_connection(self.path)
            writer.write_eof()
            await reader.read()
            writer.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while self.open_connections:
                    self.idle.clear()
                    await self.idle.wait()

    def close(self) -> None:
        for transport in (*self.connections.values(), *self.step_clocks.values()):
            transport.close()
        if self._server is not None:
            self._server.close()
        if self.path is not None:
            with contextlib.suppress(OSError):
                self.path.unlink()


class _RankConnection(asyncio.Protocol):
    """One rank's connection.

    It is an asyncio protocol rather than a stream, which would need a task switch. It runs on every step of every rank,
    on the same machine as the training.
    """

    def __init__(self, server: RankServer) -> None:
        self._server = server
        self._rank: int | None = None
        self._transport: asyncio.Transport | None = None
        self._read_limiter = RateLimiter(READ_LIMIT)
        self._partial_line = b""
        """The start of an incomplete line."""
        self._skipping = False
        """Whether that line is too long, so that the rest of it is skipped."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._server.open_connections += 1
        if self._server.open_connections > MAX_CONNECTIONS:
            self._drop(DropReason.CONNECTIONS)
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        *lines, partial_line = data.split(b"\n")
        if lines:
            first = b"" if self._skipping else self._partial_line + lines[0]
            skipped, self._skipping, self._partial_line = self._skipping, False, b""
            for line in lines[1:] if skipped else (first, *lines[1:]):
                self._on_line(line)
        if not self._skipping:
            self._partial_line += partial_line
        if len(self._partial_line) > MAX_LINE_BYTES:
            self._drop(DropReason.TOO_LONG, self._partial_line)
            self._partial_line, self._skipping = b"", True
        self._throttle(len(data) + MESSAGE_OVERHEAD_BYTES * len(lines))

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None:
            log.warning("the connection of rank %s broke: %s", self._rank, exc)
        server = self._server
        if self._rank is not None and server.connections.get(self._rank) is self._transport:
            del server.connections[self._rank]
            server.handler.on_close(self._rank)
        elif self._rank is not None and server.step_clocks.get(self._rank) is self._transport:
            del server.step_clocks[self._rank]
            if self._rank not in server.connections:
                server.handler.on_close(self._rank)
        server.open_connections -= 1
        server.idle.set()

    def _on_line(self, line: bytes) -> None:
        try:
            message, dropped = decode_rank_message(line)
        except UnknownKindError:
            self._read_limiter.charge(DROPPED_MESSAGE_BYTES, time.monotonic())
            return
        except ValueError as error:
            self._drop(DropReason.MALFORMED, line, str(error))
            return
        if isinstance(message, Hello) and self._transport is not None:
            if self._rank not in (None, message.rank) or not self._server.accepts(message.rank):
                self._drop(DropReason.ANOTHER_RANK, line)
                return
            if not message.step_clock:
                self._server.register(message.rank, self._transport)
            elif not self._server.register_step_clock(message.rank, self._transport):
                return
            self._rank = message.rank
        if isinstance(message, ProgramEnded | StepClockFailed):
            if not self._server.accepts(message.rank):
                self._drop(DropReason.ANOTHER_RANK, line)
                return
            self._server.handler.on_message(message.rank, message, dropped)
        elif self._rank is not None:
            self._server.handler.on_message(self._rank, message, dropped)

    def _drop(self, reason: DropReason, line: bytes = b"", error: str = "") -> None:
        rank = self._server.rank if self._rank is None else self._rank
        shown = ascii(line[:SAMPLE_BYTES])[1:] + ("..." if len(line) > SAMPLE_BYTES else "") if line else ""
        self._read_limiter.charge(DROPPED_MESSAGE_BYTES, time.monotonic())
        self._server.handler.on_drop(rank, reason, ": ".join(filter(None, (error, shown))))

    def _throttle(self, size_bytes: int) -> None:
        """Pause reading when this connection sends more than the agent can process from each of its ranks."""
        wait_s = self._read_limiter.charge(size_bytes, time.monotonic())
        transport = self._transport
        if wait_s > 0 and transport is not None and not transport.is_closing():
            transport.pause_reading()
            asyncio.get_running_loop().call_later(wait_s, self._resume_reading)

    def _resume_reading(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()


def _inode(path: Path) -> tuple[int, int] | None:
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino
