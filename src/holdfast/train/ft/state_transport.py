"""Transfers a rank's state over HTTP to the rank of a replica that is behind; TorchFT's manager calls it.

TorchFT's own transport cannot tell an error of the state from a lost peer, and its receivers try again forever.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from datetime import timedelta
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPResponse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import SHUT_RDWR, socket
from socketserver import TCPServer
from threading import Condition, Thread
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from torchft.checkpointing.transport import CheckpointTransport

from holdfast.train import torch_private
from holdfast.train.abortable_call import AbortableCall
from holdfast.train.ft.abortable_pg import address_family
from holdfast.train.session.agent_client import log_line

STATE_TIMEOUT_S = 5.0
"""Seconds that a state transfer may still take after a loss in the quorum, or after the donor's step: its other end may
be lost, and a rank that still receives takes no part in that step."""


class StateTransferError(Exception):
    """A donor cannot serialize its state, or this rank cannot load it: the next try would end alike."""

    def __init__(self, donor: str, cause: str, *, sent: bool) -> None:
        super().__init__(cause)
        self.donor = donor
        """Address of the rank that has the state."""
        self.sent = sent
        """Whether the donor has sent its state."""


class _NotServedError(Exception):
    """The requested state is not to be had here, or not any more."""


class _Offer(NamedTuple):
    """The state that a rank serves."""

    quorum: int
    step: int
    state: Any
    problem: str = ""
    """Why there is no state."""


class StateTransport(CheckpointTransport[Any]):
    """Serves a rank's state to a lagging rank, at an address of this machine that the other can reach."""

    def __init__(self, address: str, timeout: timedelta, quorum_id: Callable[[], int]) -> None:
        """`quorum_id` returns the id of the last quorum that this rank has joined."""
        self.receiving = AbortableCall()
        self.error: StateTransferError | None = None
        """Why this rank can receive no state, now or later."""
        self.timeout_s = timeout.total_seconds()
        self._changed = Condition()
        self._quorum_id = quorum_id
        self._offer: _Offer | None = None
        self._left = -1
        """The last quorum that this rank has left because a step failed: it will offer no state there."""
        self._transfers = set[socket]()
        """Connections by which the offered state is being sent."""
        self._server = _StateServer(address, self)
        Thread(target=self._server.serve_forever, name="state server", daemon=True).start()

    def metadata(self) -> str:
        """This rank's address: the same for every quorum, since a rank may already be asked for its next one's."""
        # An IP address: other Kubernetes pods cannot resolve the machine's name.
        host, port = self._server.server_address[:2]
        return f"http://{f'[{host}]' if ':' in str(host) else host}:{port}"

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: Any, timeout: timedelta) -> None:
        """Offer a state; a rank whose state cannot be copied to the CPU continues, and those behind fail."""
        try:
            offer = _Offer(self._quorum_id(), step, torch_private.on_cpu(state_dict))
        except Exception as error:
            offer = _Offer(self._quorum_id(), step, None, _described(error))
        with self._changed:
            self._offer = offer
            self._changed.notify_all()

    def disallow_checkpoint(self) -> None:
        """Withdraw the state, which will change; its transfers in progress are cut unless they end within 5 s."""
        with self._changed:
            self._offer = None
            self._changed.wait_for(lambda: not self._transfers, STATE_TIMEOUT_S)
            while self._transfers:
                _cut(self._transfers.pop())

    def leave(self) -> None:
        """Refuse, from now on, those that wait for a state of the last quorum: this rank has left it."""
        with self._changed:
            self._left, self._offer = self._quorum_id(), None
            self._changed.notify_all()

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:
        """Receive a state; raises OSError or HTTPException if the donor is lost or has left the quorum."""
        connection = _DonorConnection(metadata, timeout.total_seconds())
        try:
            return self.receiving.run(lambda: self._receive(connection, metadata, step))
        finally:
            connection.cut()  # otherwise a thread that was abandoned would continue to receive

    def shutdown(self, wait: bool = True) -> None:
        """Stop serving, and refuse those that wait for a state."""
        self.leave()
        if wait:
            self._server.shutdown()

    def _receive(self, connection: _DonorConnection, donor: str, step: int) -> Any:
        try:
            connection.request("GET", f"/{self._quorum_id()}/{step}")
            response = connection.getresponse()
            if response.status != HTTPStatus.OK:
                answer = response.read().decode(errors="replace")
                if response.status == HTTPStatus.INTERNAL_SERVER_ERROR:
                    raise StateTransferError(donor, answer, sent=False)
                raise ConnectionError(answer)
            return _load(_Incoming(response), donor)
        except StateTransferError as error:
            self.error = error
            raise
        finally:
            connection.close()

    @contextmanager
    def serving(self, quorum: int, step: int, connection: socket) -> Generator[_Offer]:
        """The offered state, which does not change until `connection` is cut; raises _NotServedError."""
        with self._changed:
            # The donor may not have met this quorum yet.
            self._changed.wait_for(lambda: self._left >= quorum or self._offered_in(quorum), self.timeout_s)
            if self._left >= quorum:
                raise _NotServedError("the donor has left this quorum")
            if (offer := self._offer) is None or (offer.quorum, offer.step) != (quorum, step):
                raise _NotServedError(f"the donor has no state of step {step}")
            self._transfers.add(connection)
        try:
            yield offer
        finally:
            with self._changed:
                self._transfers.discard(connection)
                self._changed.notify_all()

    def _offered_in(self, quorum: int) -> bool:
        return self._offer is not None and self._offer.quorum >= quorum


def _load(incoming: _Incoming, donor: str) -> Any:
    try:
        return torch_private.load_from_stream(incoming)
    except Exception as error:
        if incoming.lost is not None:
            raise incoming.lost from None
        raise StateTransferError(donor, _described(error), sent=True) from error


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _cut(connection: socket) -> None:
    """End a connection that another thread may use; `close` would leave that thread in its call."""
    with suppress(OSError):  # it is closed already
        connection.shutdown(SHUT_RDWR)


class _DonorConnection(HTTPConnection):
    """A connection to a donor, which another thread can cut, also before it is made."""

    def __init__(self, donor: str, timeout_s: float) -> None:
        address = urlsplit(donor)
        super().__init__(address.hostname or "", address.port, timeout=timeout_s)
        self._made: socket | None = None
        """The socket, which a response takes from `sock`."""
        self._is_cut = False

    def connect(self) -> None:
        super().connect()
        self._made = self.sock
        if self._is_cut:
            _cut(self.sock)

    def cut(self) -> None:
        self._is_cut = True
        if self._made is not None:
            _cut(self._made)


class _Incoming:
    """A state on its way: data that ends early is a lost donor, and no state that cannot be loaded."""

    def __init__(self, response: HTTPResponse) -> None:
        self._response = response
        self.lost: Exception | None = None
        """The error with which the donor was lost."""

    def read(self, size: int) -> bytearray:
        data = bytearray(size)  # torch makes tensors of it without a copy; bytes would be read-only
        view, filled = memoryview(data), 0
        try:
            while filled < size:
                if not (count := self._response.readinto(view[filled:])):
                    raise ConnectionError("the donor was lost while it sent its state")
                filled += count
        except (OSError, HTTPException) as error:
            self.lost = error
            raise
        return data

    def readline(self) -> bytes:
        line = bytearray()
        while not line.endswith(b"\n"):
            line += self.read(1)
        return bytes(line)


class _Outgoing:
    """A response that begins with the first bytes of the state: until then it can still be an error."""

    def __init__(self, handler: BaseHTTPRequestHandler) -> None:
        self._handler = handler
        self.begun = False

    def write(self, data: bytes) -> int:
        if not self.begun:
            self.begun = True
            self._handler.send_response(HTTPStatus.OK)
            self._handler.end_headers()
        return self._handler.wfile.write(data)


class _StateServer(ThreadingHTTPServer):
    """Serves at one address, IPv4 or IPv6."""

    request_queue_size = 1024

    def __init__(self, address: str, transport: StateTransport) -> None:
        self.address_family = address_family(address)
        self.transport = transport
        super().__init__((address, 0), _Handler)

    def server_bind(self) -> None:
        """Binds as TCPServer does: HTTPServer looks up this machine's name in DNS, and may block."""
        TCPServer.server_bind(self)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores a receiver that is lost; any other error is a line of the rank's log."""
        error = sys.exception()
        if not isinstance(error, OSError):
            log_line(f"this rank's state was not sent to a replica that is behind: {error!r}")


class _Handler(BaseHTTPRequestHandler):
    """Answers `GET /QUORUM/STEP`."""

    server: _StateServer  # pyright: ignore[reportIncompatibleVariableOverride] - only this server makes one

    def setup(self) -> None:
        self.request.settimeout(self.server.transport.timeout_s)
        super().setup()

    def do_GET(self) -> None:
        _, quorum, step = self.path.split("/")
        try:
            with self.server.transport.serving(int(quorum), int(step), self.connection) as offer:
                self._send(offer)
        except _NotServedError as error:
            self._refuse(HTTPStatus.CONFLICT, str(error))

    def _send(self, offer: _Offer) -> None:
        outgoing, problem = _Outgoing(self), offer.problem
        if not problem:
            try:
                torch_private.save_to_stream(offer.state, outgoing)
            except Exception as error:
                if outgoing.begun:
                    raise
                problem = _described(error)
        if problem:
            log_line(f"this rank's state cannot be sent to a replica that is behind: {problem}")
            self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, problem)

    def _refuse(self, status: HTTPStatus, why: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(why.encode())

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: a line per transfer in the rank's log would not help."""
