"""Owns the agent's end of the ranks' sockets: one Unix socket per started process, newline JSON.

A process that starts its own ranks shares its socket among them; each says who it is in its hello.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import cast

import msgspec

from holdfast.events.rank import AgentToRank, Hello, ProgramOver, RankToAgent, StopNow, encode, from_rank

log = logging.getLogger("holdfast.agent")

LINE_LIMIT_BYTES = 1024 * 1024


class RankChannel:
    """Listens on one socket; `hear` is called with each message and the rank that sent it, `part` when it hangs up."""

    def __init__(self, path: Path, hear: Callable[[int, RankToAgent], None], part: Callable[[int], None]) -> None:
        self.path = path
        self.hear = hear
        self.part = part
        self.ranks: dict[int, asyncio.WriteTransport] = {}
        """Who has said hello and not hung up."""
        self.serving = 0
        """Open connections, those included that have yet to say who they are."""
        self.idle = asyncio.Event()
        self._farewell = b""
        """The request to leave, for ranks that have yet to say hello."""
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        self._server = await asyncio.get_running_loop().create_unix_server(lambda: _Conversation(self), self.path)

    def ask(self, request: AgentToRank) -> None:
        """Ask something of every rank on this socket; to leave, also of those that are still on their way."""
        line = encode(request) + b"\n"
        if isinstance(request, StopNow):
            self._farewell = line
        for transport in self.ranks.values():
            transport.write(line)

    def greet(self, rank: int, transport: asyncio.WriteTransport) -> None:
        """A rank has said hello."""
        self.ranks[rank] = transport
        if self._farewell:
            transport.write(self._farewell)

    async def hear_out(self, within_s: float) -> None:
        """Take in what a process that has ended said last: it may still be on its way through the socket.

        Whoever keeps it open gets so long; what has been said is heard however long this process has to wait for a CPU.
        """
        with contextlib.suppress(OSError):
            # Connections are accepted in order: when this one has been served, what came by those before it is heard.
            reader, writer = await asyncio.open_unix_connection(self.path)
            writer.write_eof()
            await reader.read()
            writer.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while self.serving:
                    self.idle.clear()
                    await self.idle.wait()

    def close(self) -> None:
        for transport in self.ranks.values():
            transport.close()
        if self._server is not None:
            self._server.close()
        self.path.unlink(missing_ok=True)


class _Conversation(asyncio.Protocol):
    """One rank's connection. A protocol rather than a stream: it is on the path of every step of every rank, beside
    the training itself, and needs no task to be woken.
    """

    def __init__(self, channel: RankChannel) -> None:
        self._channel = channel
        self._rank: int | None = None
        self._transport: asyncio.Transport | None = None
        self._torn = b""
        """The beginning of a line whose end has not come."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._channel.serving += 1

    def data_received(self, data: bytes) -> None:
        *lines, self._torn = (self._torn + data).split(b"\n")
        for line in lines:
            self._take(line)
        if len(self._torn) > LINE_LIMIT_BYTES and self._transport is not None:
            log.warning(
                "rank %s said a line of more than %s bytes; its channel is closed", self._rank, LINE_LIMIT_BYTES
            )
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None:
            log.warning("rank %s's channel broke: %s", self._rank, exc)
        channel = self._channel
        if self._rank is not None and channel.ranks.get(self._rank) is self._transport:
            del channel.ranks[self._rank]
            channel.part(self._rank)
        channel.serving -= 1
        channel.idle.set()

    def _take(self, line: bytes) -> None:
        try:
            message = from_rank.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            log.warning("rank %s said something this agent does not know: %s", self._rank, error)
            return
        if isinstance(message, Hello) and self._transport is not None:
            self._rank = message.rank
            self._channel.greet(message.rank, self._transport)
        if isinstance(message, ProgramOver):
            self._channel.hear(message.rank, message)
        elif self._rank is not None:
            self._channel.hear(self._rank, message)
