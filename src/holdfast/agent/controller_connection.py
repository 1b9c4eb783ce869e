"""The agent's connection to its controller: it reconnects and loses no message.

A message stays in the outbox until the controller has acknowledged it; after a reconnect the agent resends the outbox.
The controller drops duplicates by source and sequence number.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import sys
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException

from holdfast.events import AgentConnected
from holdfast.events.agent_events import LOG_REPLICA_REQUIRED
from holdfast.job.heartbeat_timeouts import HeartbeatTimeouts
from holdfast.protocol.clipping import clip
from holdfast.protocol.orders import Acknowledge, AgentMessage, AnyOrder, Progress, encode, order_decoder
from holdfast.protocol.validation import out_of_range
from holdfast.security.tls import CONTROLLER_NAME, client_context

log = logging.getLogger("holdfast.agent")

RETRY_DELAYS_S = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Seconds between connection attempts; the last value repeats."""

OPEN_TIMEOUTS_S = (10.0, 20.0, 30.0)
"""Timeouts of successive connection attempts, in seconds; the last value repeats and equals the controller's limit.

Thousands of simultaneous TLS handshakes keep a controller busy for longer than the first timeout. Agents that gave up
each time would add load and never connect.
"""

CONNECT_TIMEOUT_S = 3.0
"""Longest that the controller's machine may take to accept a TCP connection, or to confirm what was sent, in seconds.

Its kernel does both, however busy the controller is. The address of a deleted pod neither refuses connections nor ends
them, so the agent then looks up the controller's address again.
"""

STABLE_AFTER_S = 2.0
"""After a connection that lasted this long, in seconds, the agent reconnects immediately."""

MAX_FRAME_BYTES = 64 * 1024
"""Largest batch of waiting messages: a node's ranks exit within a millisecond of one another."""

MAX_MESSAGE_BYTES = 1 << 20
"""Text in a longer message is truncated; the controller rejects messages of 4 MiB."""

MAX_OUTBOX_BYTES = 256 * 1024 * 1024
"""Above this outbox size only the latest of the steps that a node reports together is kept."""

MAX_ORDER_BYTES = 64 * 1024 * 1024


async def open_socket(url: str) -> socket.socket:
    """Connect to the host that a URL resolves to now; raise OSError or TimeoutError."""
    parts = urlsplit(url)
    connection = await asyncio.to_thread(socket.create_connection, (parts.hostname, parts.port), CONNECT_TIMEOUT_S)
    if sys.platform == "linux":
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(CONNECT_TIMEOUT_S * 1000))
    connection.setblocking(False)
    return connection


def tls_options(ca: Path | None) -> dict[str, Any]:
    """Options of a WebSocket to the controller, which presents the certificate `ca`; without one there is no TLS."""
    return {} if ca is None else {"ssl": client_context(ca), "server_hostname": CONTROLLER_NAME}


class TokenRejected(Exception):
    """The controller rejects this agent's token."""


class ControllerConnection:
    """Connection to the controller; `hello` makes the first message, `handle_order` receives each order.

    `upload_log_replica` sends this node's replica to a controller that has lost the run's event log.
    """

    def __init__(
        self,
        url: Callable[[], str],
        token: str,
        source: str,
        *,
        hello: Callable[[], AgentConnected],
        handle_order: Callable[[AnyOrder], None],
        heartbeat_timeouts: HeartbeatTimeouts,
        ca: Path | None = None,
        upload_log_replica: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._url = url
        self._token = token
        self._source = source
        self._hello = hello
        self._handle_order = handle_order
        self._tls = tls_options(ca)
        self._heartbeat_timeouts = heartbeat_timeouts
        self._upload_log_replica = upload_log_replica
        self._seq = 0
        self._outbox: OrderedDict[int, bytes] = OrderedDict()
        self._outbox_bytes = 0
        """Total size of the messages in `_outbox`."""
        self._last_sent_seq = 0
        self._outbox_changed = asyncio.Event()
        self._acked = asyncio.Event()
        self.connected = asyncio.Event()
        self.disconnected = asyncio.Event()
        self.disconnected.set()

    def send(self, message: AgentMessage) -> int:
        """Append a message to the outbox; return its sequence number.

        Long text from a program is truncated: the controller would reject the message on every resend.
        """
        if out_of_range(message):
            message = clip(message)
            if problem := out_of_range(message):
                log.error("a message to the controller is dropped, for it would be refused: %s", problem)
                return self._seq
        if isinstance(message, Progress) and self._outbox_bytes > MAX_OUTBOX_BYTES:
            message = msgspec.structs.replace(message, steps=message.steps[-1:])
        self._seq += 1
        text = encode(msgspec.structs.replace(message, source=self._source, seq=self._seq))
        if len(text) > MAX_MESSAGE_BYTES:
            text = encode(clip(msgspec.structs.replace(message, source=self._source, seq=self._seq)))
        self._outbox[self._seq] = text
        self._outbox_bytes += len(text)
        self._outbox_changed.set()
        return self._seq

    async def flush(self, within_s: float) -> None:
        """Wait until the controller has acknowledged the whole outbox, or until the timeout."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self.wait_acked(self._seq)

    async def wait_acked(self, seq: int) -> None:
        """Wait until the controller has acknowledged a message."""
        while next(iter(self._outbox), seq + 1) <= seq:
            self._acked.clear()
            await self._acked.wait()

    async def run(self) -> None:
        """Stay connected forever; raise `TokenRejected` when the controller rejects the token."""
        tries = 0
        while True:
            try:
                headers = {"Authorization": f"Bearer {self._token}"}
                url = self._url()
                async with connect(
                    url,
                    sock=await open_socket(url),
                    additional_headers=headers,
                    max_size=MAX_ORDER_BYTES,
                    compression=None,
                    proxy=None,
                    ping_interval=self._heartbeat_timeouts.ping_interval_s,
                    ping_timeout=self._heartbeat_timeouts.pong_timeout_s,
                    close_timeout=self._heartbeat_timeouts.close_timeout_s,
                    open_timeout=OPEN_TIMEOUTS_S[min(tries, len(OPEN_TIMEOUTS_S) - 1)],
                    **self._tls,
                ) as connection:
                    began = time.monotonic()
                    try:
                        await self._exchange(connection)
                    finally:
                        # A connection that breaks right away counts as a failure; else the agent would retry fifty
                        # times a second.
                        tries = 0 if time.monotonic() - began > STABLE_AFTER_S else tries
            except InvalidStatus as error:
                if error.response.status_code in (401, 403):
                    raise TokenRejected from error
                log.warning("the controller answered %s", error.response.status_code)
                if error.response.status_code == LOG_REPLICA_REQUIRED and self._upload_log_replica is not None:
                    await self._upload_log_replica()
            except ssl.SSLCertVerificationError as error:
                # The agent has sent nothing to it, not even the token. The wrong server may go away, so keep retrying.
                if tries == 0:
                    log.error("%s is not this run's controller: %s", self._url(), error.verify_message)
            except (OSError, WebSocketException, TimeoutError) as error:
                if tries == 0:
                    log.warning("the controller is out of reach: %s", error)
            finally:
                self.connected.clear()
                self.disconnected.set()
            await asyncio.sleep(RETRY_DELAYS_S[min(tries, len(RETRY_DELAYS_S) - 1)])
            tries += 1

    async def _exchange(self, connection: ClientConnection) -> None:
        hello = msgspec.structs.replace(self._hello(), unacked_seq=next(reversed(self._outbox), 0))
        await connection.send(encode(hello))
        self._last_sent_seq = 0
        self.disconnected.clear()
        self.connected.set()
        sender = asyncio.ensure_future(self._send_outbox(connection))
        try:
            async for text in connection:
                try:
                    order = order_decoder.decode(text)
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    log.warning("the controller sent a message this agent does not know: %s", error)
                    continue
                if isinstance(order, Acknowledge):
                    self._on_ack(order.seq)
                else:
                    self._handle_order(order)
        finally:
            sender.cancel()

    async def _send_outbox(self, connection: ClientConnection) -> None:
        with contextlib.suppress(ConnectionClosed):
            while True:
                self._outbox_changed.clear()
                while unsent := self._next_frame():
                    self._last_sent_seq = max(unsent)
                    await connection.send(b"\n".join(unsent.values()))
                await self._outbox_changed.wait()

    def _next_frame(self) -> dict[int, bytes]:
        """The next messages by number that fit into one frame; at least one, if any waits."""
        unsent: dict[int, bytes] = {}
        size_bytes = 0
        for seq, message in self._outbox.items():
            if seq <= self._last_sent_seq:
                continue
            size_bytes += len(message) + 1
            if unsent and size_bytes > MAX_FRAME_BYTES:
                break
            unsent[seq] = message
        return unsent

    def _on_ack(self, seq: int) -> None:
        while self._outbox and next(iter(self._outbox)) <= seq:
            self._outbox_bytes -= len(self._outbox.popitem(last=False)[1])
        self._acked.set()
