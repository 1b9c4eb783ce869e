"""Owns the agent's connection to its controller: it connects out, again and again, and loses no word.

Everything said goes into an outbox and stays there until the controller has acknowledged it as safe; after a
reconnection what is left in it is said again. The controller recognises repeats by source and sequence number.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException

from holdfast.events import AgentEvent, AgentJoined
from holdfast.events.agent import LOG_WANTED
from holdfast.events.bounds import implausible
from holdfast.events.clipping import clipped
from holdfast.events.orders import Acknowledge, AnyOrder, Progress, encode, order_decoder
from holdfast.guard.tls import NAME, agents_end
from holdfast.job.silence import Silence

log = logging.getLogger("holdfast.agent")

RETRY_S = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Seconds between attempts to connect; the last is repeated."""

OPEN_S = (10.0, 20.0, 30.0)
"""Longest that attempts to connect may take, in seconds; the last is repeated, and is what a controller allows.

Thousands that all come at once, with TLS, keep one busy for longer than the first: whoever then gave up each time would
add to the work and never get in."""

DIAL_S = 3.0
"""Longest that a controller's machine may take to accept a connection at all: its kernel does that, however busy the
controller is. Where a pod was, nobody says no; it is looked up again where the controller is."""

STEADY_S = 2.0
"""A connection that held this long, in seconds, was a good one: the next attempt comes at once."""

FRAME_BYTES = 64 * 1024
"""What waits goes out together, up to this size: a node's ranks end within a millisecond of one another."""

MESSAGE_BYTES = 1 << 20
"""Text in a longer message is cut; the controller refuses one of 4 MiB."""

OUTBOX_BYTES = 256 * 1024 * 1024
"""Once so much waits for a controller, only the last of the steps that a node reports together is kept."""

ORDER_LIMIT_BYTES = 64 * 1024 * 1024


async def dialled(url: str) -> socket.socket:
    """A connection to where a URL leads now; raises OSError and TimeoutError."""
    parts = urlsplit(url)
    connection = await asyncio.to_thread(socket.create_connection, (parts.hostname, parts.port), DIAL_S)
    connection.setblocking(False)
    return connection


class Refused(Exception):
    """The controller does not accept this agent's token."""


class Link:
    """Speaks to the controller; `greet` makes the hello, `obey` takes each order.

    `hand_back` gives a controller that has lost the run's log what is kept of it here.
    """

    def __init__(
        self,
        url: Callable[[], str],
        token: str,
        source: str,
        *,
        greet: Callable[[], AgentJoined],
        obey: Callable[[AnyOrder], None],
        silence: Silence,
        ca: Path | None = None,
        hand_back: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._url = url
        self._token = token
        self._source = source
        self._greet = greet
        self._obey = obey
        self._tls: dict[str, Any] = {} if ca is None else {"ssl": agents_end(ca), "server_hostname": NAME}
        self._silence = silence
        self._hand_back = hand_back
        self._seq = 0
        self._outbox: OrderedDict[int, bytes] = OrderedDict()
        self._waiting_bytes = 0
        """Of the outbox."""
        self._sent = 0
        self._wake = asyncio.Event()
        self._safe = asyncio.Event()
        self.connected = asyncio.Event()
        self.lost = asyncio.Event()
        self.lost.set()

    def say(self, message: AgentEvent | Progress) -> int:
        """Put a message in the outbox; its sequence number.

        Text that came from a program is cut: what the controller refuses would be sent again and refused for ever.
        """
        if implausible(message):
            message = clipped(message)
            if problem := implausible(message):
                log.error("a message to the controller is dropped, for it would be refused: %s", problem)
                return self._seq
        if isinstance(message, Progress) and self._waiting_bytes > OUTBOX_BYTES:
            message = msgspec.structs.replace(message, steps=message.steps[-1:])
        self._seq += 1
        text = encode(msgspec.structs.replace(message, source=self._source, seq=self._seq))
        if len(text) > MESSAGE_BYTES:
            text = encode(clipped(msgspec.structs.replace(message, source=self._source, seq=self._seq)))
        self._outbox[self._seq] = text
        self._waiting_bytes += len(text)
        self._wake.set()
        return self._seq

    async def settled(self, within_s: float) -> None:
        """Wait until the controller has acknowledged all that was said, or the time is up."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self.safe(self._seq)

    async def safe(self, seq: int) -> None:
        """Wait until the controller has acknowledged a message."""
        while next(iter(self._outbox), seq + 1) <= seq:
            self._safe.clear()
            await self._safe.wait()

    async def run(self) -> None:
        """Stay connected for ever; raises `Refused` when the token is not accepted."""
        tries = 0
        while True:
            try:
                headers = {"Authorization": f"Bearer {self._token}"}
                url = self._url()
                async with connect(
                    url,
                    sock=await dialled(url),
                    additional_headers=headers,
                    max_size=ORDER_LIMIT_BYTES,
                    compression=None,
                    proxy=None,
                    ping_interval=self._silence.ping_s,
                    ping_timeout=self._silence.pong_s,
                    close_timeout=self._silence.close_s,
                    open_timeout=OPEN_S[min(tries, len(OPEN_S) - 1)],
                    **self._tls,
                ) as connection:
                    began = time.monotonic()
                    try:
                        await self._converse(connection)
                    finally:
                        # One that is cut off at once, again and again, must not ask fifty times a second.
                        tries = 0 if time.monotonic() - began > STEADY_S else tries
            except InvalidStatus as error:
                if error.response.status_code in (401, 403):
                    raise Refused from error
                log.warning("the controller answered %s", error.response.status_code)
                if error.response.status_code == LOG_WANTED and self._hand_back is not None:
                    await self._hand_back()
            except ssl.SSLCertVerificationError as error:
                # Nothing was said to it, not even the token. What stands in the way may go away, so this goes on.
                if tries == 0:
                    log.error("%s is not this run's controller: %s", self._url(), error.verify_message)
            except (OSError, WebSocketException, TimeoutError) as error:
                if tries == 0:
                    log.warning("the controller is out of reach: %s", error)
            finally:
                self.connected.clear()
                self.lost.set()
            await asyncio.sleep(RETRY_S[min(tries, len(RETRY_S) - 1)])
            tries += 1

    async def _converse(self, connection: ClientConnection) -> None:
        await connection.send(encode(self._greet()))
        self._sent = 0
        self.lost.clear()
        self.connected.set()
        sender = asyncio.ensure_future(self._send(connection))
        try:
            async for text in connection:
                try:
                    order = order_decoder.decode(text)
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    log.warning("the controller said something this agent does not know: %s", error)
                    continue
                if isinstance(order, Acknowledge):
                    self._forget(order.seq)
                else:
                    self._obey(order)
        finally:
            sender.cancel()

    async def _send(self, connection: ClientConnection) -> None:
        with contextlib.suppress(ConnectionClosed):
            while True:
                self._wake.clear()
                while unsent := self._unsent():
                    self._sent = max(unsent)
                    await connection.send(b"\n".join(unsent.values()))
                await self._wake.wait()

    def _unsent(self) -> dict[int, bytes]:
        """The next messages by number, as many as go into a frame; one at least, where there is one."""
        unsent: dict[int, bytes] = {}
        size_bytes = 0
        for seq, message in self._outbox.items():
            if seq <= self._sent:
                continue
            size_bytes += len(message) + 1
            if unsent and size_bytes > FRAME_BYTES:
                break
            unsent[seq] = message
        return unsent

    def _forget(self, seq: int) -> None:
        while self._outbox and next(iter(self._outbox)) <= seq:
            self._waiting_bytes -= len(self._outbox.popitem(last=False)[1])
        self._safe.set()
