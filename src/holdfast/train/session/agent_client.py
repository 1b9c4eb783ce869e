"""Non-blocking Unix-socket client that connects a rank to its agent.

An agent that is slow, gone or incompatible never stops training: the client logs it once on stderr and the session
runs alone. Any thread may send and receive. Messages: protocol/rank_messages.py; reactions: rank_coordinator.py.
"""

from __future__ import annotations

import contextlib
import select
import socket
import sys
import time
from pathlib import Path
from threading import RLock

import msgspec

from holdfast.findings import OWNER_TEXT, Finding, Owner
from holdfast.protocol.clipping import clip_finding
from holdfast.protocol.rank_messages import AgentToRank, FindingReported, RankMessage, encode, rank_request_decoder

CONNECT_TIMEOUT_S = 5.0
"""Generous: the agent listens before it starts its ranks."""
BACKLOG_BYTES = 1 << 20
"""Holds about 7,000 steps for a stopped or busy agent; later messages are dropped."""
READ_BYTES = 1 << 16
FLUSH_TIMEOUT_S = 2.0
"""A running agent reads the whole backlog in a fraction of this; a stopped agent delays exit by no more."""


class AgentClient:
    """Connection to the agent, or a no-op without one; only `flush` blocks, and agent errors never raise."""

    def __init__(self, link: socket.socket | None) -> None:
        self._link = link
        self._lock = RLock()
        self._readable = select.poll()
        if link is not None:
            self._readable.register(link, select.POLLIN)
        self._outgoing = bytearray()
        self._incoming = bytearray()
        self._overflowed = False

    @classmethod
    def connect(cls, path: Path | None, *, rank: int) -> AgentClient:
        """Connect to the agent at `path`; without a path, rank 0 logs that the session runs alone."""
        if path is None:
            if rank == 0:
                log_line("no HOLDFAST_RANK_SOCKET: the session runs alone")
            return cls(None)
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        link.settimeout(CONNECT_TIMEOUT_S)
        try:
            link.connect(str(path))
        except OSError as error:
            link.close()
            log_line(f"rank {rank}: cannot reach the agent at {path} ({error}): the session runs alone")
            return cls(None)
        link.setblocking(False)
        return cls(link)

    def fileno(self) -> int | None:
        """File descriptor that becomes readable when the agent sends; None without an agent."""
        with self._lock:
            return self._link.fileno() if self._link is not None else None

    def send(self, message: RankMessage) -> None:
        """Write a message to the socket, or buffer it until the next call if the agent is slow to read."""
        if self._link is None:
            return
        line = encode(message) + b"\n"
        with self._lock:
            if len(self._outgoing) + len(line) <= BACKLOG_BYTES:
                self._outgoing += line
            elif not self._overflowed:
                self._overflowed = True
                log_line("the agent does not read: reports are dropped until it does")
            self._send_pending()

    def flush(self) -> None:
        """Wait up to 2 s until the kernel has accepted every message; called before the process exits."""
        writable, until = select.poll(), time.monotonic() + FLUSH_TIMEOUT_S
        with self._lock:
            if self._link is None:
                return
            writable.register(self._link, select.POLLOUT)
        while self._send_rest() and (left_s := until - time.monotonic()) > 0:
            writable.poll(left_s * 1000)  # without the lock

    def report_finding(self, finding: Finding, *, fatal: bool = False) -> None:
        """Send a finding to the agent and print it in the rank's log.

        The excepthook prints a `fatal` finding (excepthook.py), so this method does not.
        """
        finding = clip_finding(finding)
        if not fatal:
            log_line(_one_line(finding))
        self.send(FindingReported(finding=finding))

    def requests(self) -> list[AgentToRank]:
        """Requests received since the last call, oldest first; unknown kinds are skipped."""
        with self._lock:
            self._receive()
            if not self._incoming:
                return []
            *lines, rest = bytes(self._incoming).split(b"\n")
            self._incoming[:] = rest
        requests: list[AgentToRank] = []
        for line in lines:
            with contextlib.suppress(msgspec.DecodeError):
                requests.append(rank_request_decoder.decode(line))
        return requests

    def _send_rest(self) -> bool:
        with self._lock:
            return bool(self._outgoing) and self._send_pending()

    def _send_pending(self) -> bool:
        """Write what the kernel accepts now; returns whether data remains for a connected agent."""
        if self._link is None:
            return False
        try:
            sent = self._link.send(self._outgoing)
            del self._outgoing[:sent]
        except BlockingIOError:
            pass
        except OSError as error:
            self._disconnect(str(error))
            return False
        return bool(self._outgoing)

    def _receive(self) -> None:
        # Polling first takes a third of the time of a recv that raises because no data has come.
        while self._link is not None and self._readable.poll(0):
            try:
                received = self._link.recv(READ_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                self._disconnect(str(error))
                return
            if not received:
                self._disconnect("it closed the connection")
            self._incoming += received

    def _disconnect(self, why: str) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None
            log_line(f"lost the agent ({why}): the session runs alone")


def _one_line(finding: Finding) -> str:
    where = finding.where and f"where: {finding.where}"
    remedy = finding.remedy and f"what to do: {finding.remedy.removesuffix('.')}"
    fault = "" if finding.owner is Owner.USER else f"fixable by: {OWNER_TEXT[finding.owner]}"
    words = filter(None, (finding.what, where, *finding.evidence, remedy, fault))
    return f"{finding.severity} [{finding.code}]: {'; '.join(words)}"


def log_line(text: str) -> None:
    """Print one line on the rank's stderr."""
    sys.stderr.write(f"holdfast: {text}\n")
    sys.stderr.flush()
