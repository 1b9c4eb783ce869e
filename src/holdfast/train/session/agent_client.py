"""Owns the rank's end of its agent's Unix socket: what is sent never waits, what was asked is picked up when polled.

Refuses to own what the messages mean (protocol/rank_messages.py says what they are, rank_coordinator.py what is done about them), and to
let an agent that is slow, gone or confused stop training: it is told once on stderr, and the session goes on alone.
"""

from __future__ import annotations

import contextlib
import select
import socket
import sys
import time
from pathlib import Path

import msgspec

from holdfast.findings import OWNER_TEXT, Finding, Owner
from holdfast.protocol.clipping import clip_finding
from holdfast.protocol.rank_messages import AgentToRank, FindingReported, RankMessage, encode, rank_request_decoder

CONNECT_TIMEOUT_S = 5.0
"""An agent listens before it starts its ranks, so that even this is generous."""
BACKLOG_BYTES = 1 << 20
"""About 7,000 steps may wait for an agent that is stopped or busy; what comes after is dropped, newest first."""
READ_BYTES = 1 << 16
FLUSH_TIMEOUT_S = 2.0
"""An agent that reads at all has a whole backlog in a fraction of this; one that is stopped keeps no process longer."""


class AgentClient:
    """A line to the agent, or to nobody; nothing waits but `finish`, and nothing raises because of the agent."""

    def __init__(self, link: socket.socket | None) -> None:
        self._link = link
        self._readable = select.poll()
        if link is not None:
            self._readable.register(link, select.POLLIN)
        self._outgoing = bytearray()
        self._incoming = bytearray()
        self._overflowed = False

    @classmethod
    def connect(cls, path: Path | None, *, rank: int) -> AgentClient:
        """Connect to the agent at `path`; without one rank 0 says for all ranks that the session runs alone."""
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
        """Readable where the agent may have said something; None without one."""
        return self._link.fileno() if self._link is not None else None

    def send(self, message: RankMessage) -> None:
        """Hand a message to the kernel, or keep it for the next call when the agent is slow to read."""
        if self._link is None:
            return
        line = encode(message) + b"\n"
        if len(self._outgoing) + len(line) <= BACKLOG_BYTES:
            self._outgoing += line
        elif not self._overflowed:
            self._overflowed = True
            log_line("the agent does not read: reports are dropped until it does")
        self._send_pending()

    def flush(self) -> None:
        """Wait, for two seconds at most, until the kernel has all that was sent: the process is about to end."""
        if self._link is None:
            return
        writable, until = select.poll(), time.monotonic() + FLUSH_TIMEOUT_S
        writable.register(self._link, select.POLLOUT)
        while self._outgoing and self._send_pending() and (left_s := until - time.monotonic()) > 0:
            writable.poll(left_s * 1000)

    def report_finding(self, finding: Finding, *, fatal: bool = False) -> None:
        """Tell the agent, and whoever reads the rank's log, what the session noticed.

        What `ends` the program is its last words (excepthook.py), and is said there.
        """
        finding = clip_finding(finding)
        if not fatal:
            log_line(_one_line(finding))
        self.send(FindingReported(finding=finding))

    def requests(self) -> list[AgentToRank]:
        """What the agent asked since the last call, oldest first; kinds this version does not know are passed over."""
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

    def _send_pending(self) -> bool:
        """Give the kernel what it takes now; whether anything is left for an agent that is still there."""
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
        # To ask first takes a third of the time that recv takes to say, by raising, that nothing has come.
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
    """One line for whoever reads the rank's stderr."""
    sys.stderr.write(f"holdfast: {text}\n")
    sys.stderr.flush()
