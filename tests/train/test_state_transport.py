"""A rank receives a state, or learns whether another try can bring it."""

from __future__ import annotations

import io
import socket
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from http.client import HTTPException
from threading import Event
from urllib.parse import urlsplit

import pytest
import torch

from holdfast.train import torch_private
from holdfast.train.ft import state_transport
from holdfast.train.ft.state_transport import StateTransferError, StateTransport

DEADLINE_S = 30.0
TIMEOUT = timedelta(minutes=10)
QUORUM, STEP = 3, 5


class Pickled:
    """Does something when it is pickled."""

    def __init__(self, do: Callable[[], object]) -> None:
        self.do = do

    def __reduce__(self) -> tuple[type[object], tuple[()]]:
        self.do()
        return object, ()


class Unreadable:
    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return int, ("no number",)


@pytest.fixture
def pool() -> Generator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


def transport(quorum: int = QUORUM, timeout: timedelta = TIMEOUT) -> StateTransport:
    return StateTransport("127.0.0.1", timeout, lambda: quorum)


def sent(state: object) -> tuple[object, StateTransport]:
    """What is received of a state, or the error with which that fails."""
    donor, receiver = transport(), transport()
    address = donor.metadata()
    donor.send_checkpoint([1], STEP, state, TIMEOUT)
    try:
        return receiver.recv_checkpoint(0, address, STEP, TIMEOUT), receiver
    except StateTransferError as error:
        return error, receiver


def test_state_arrives_with_shards_of_no_rows() -> None:
    state = {"full": torch.arange(6.0).view(2, 3), "empty": torch.empty(0, 3), "progress": (3, None)}
    received, _ = sent(state)
    assert isinstance(received, dict)
    assert received["progress"] == (3, None)
    assert received["empty"].shape == (0, 3)
    assert torch.equal(received["full"], state["full"])
    received["full"].add_(1)  # its memory may be written


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ({"hook": lambda: None}, "<lambda>"),
        ({"weight": torch.empty(1, device="meta")}, "meta tensor"),
    ],
)
def test_state_that_cannot_be_sent_fails_its_receiver(state: object, reason: str) -> None:
    error, receiver = sent(state)
    assert isinstance(error, StateTransferError)
    assert receiver.error is error
    assert not error.sent
    assert reason in str(error)


def test_state_that_cannot_be_loaded_fails_its_receiver() -> None:
    error, receiver = sent({"a": Unreadable()})
    assert isinstance(error, StateTransferError)
    assert receiver.error is error
    assert error.sent
    assert "ValueError" in str(error)


@pytest.mark.parametrize("part", [0.0, 0.001, 0.5, 0.999])
def test_donor_lost_while_it_sends_is_no_error_of_its_state(pool: ThreadPoolExecutor, part: float) -> None:
    stream = io.BytesIO()
    torch_private.save_to_stream({"weight": torch.ones(1000)}, stream)
    whole = stream.getvalue()

    def die_while_sending() -> None:
        with listening.accept()[0] as connection:
            connection.recv(1000)
            connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n" + whole[: int(part * len(whole))])

    receiver = transport()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        dying = pool.submit(die_while_sending)
        with pytest.raises((OSError, HTTPException)):
            receiver.recv_checkpoint(0, f"http://127.0.0.1:{listening.getsockname()[1]}/1", STEP, TIMEOUT)
        dying.result(DEADLINE_S)
    assert receiver.error is None


@pytest.mark.parametrize("leave", [StateTransport.leave, StateTransport.shutdown])
def test_donor_that_leaves_the_quorum_releases_a_receiver_that_waits(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, leave: Callable[[StateTransport], object]
) -> None:
    donor, receiver = transport(), transport()
    waits, wait_for = Event(), donor._changed.wait_for
    monkeypatch.setattr(donor._changed, "wait_for", lambda *given: waits.set() or wait_for(*given))
    receiving = pool.submit(receiver.recv_checkpoint, 0, donor.metadata(), STEP, TIMEOUT)
    assert waits.wait(DEADLINE_S)
    leave(donor)
    with pytest.raises(ConnectionError, match="left this quorum"):
        receiving.result(DEADLINE_S)
    assert receiver.error is None


def test_donor_refuses_a_receiver_that_comes_after_it_has_left_the_quorum() -> None:
    donor, receiver = transport(), transport()
    donor.disallow_checkpoint()
    donor.leave()
    with pytest.raises(ConnectionError, match="left this quorum"):
        receiver.recv_checkpoint(0, donor.metadata(), STEP, TIMEOUT)


def test_receiver_waits_for_a_donor_that_has_not_met_its_quorum_yet(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    donor_quorum = QUORUM
    donor, receiver = StateTransport("127.0.0.1", TIMEOUT, lambda: donor_quorum), transport(QUORUM + 1)
    donor.leave()
    waits, wait_for = Event(), donor._changed.wait_for
    monkeypatch.setattr(donor._changed, "wait_for", lambda *given: waits.set() or wait_for(*given))
    receiving = pool.submit(receiver.recv_checkpoint, 0, donor.metadata(), STEP, TIMEOUT)
    assert waits.wait(DEADLINE_S)
    donor_quorum += 1
    donor.send_checkpoint([1], STEP, {"weight": 1}, TIMEOUT)
    assert receiving.result(DEADLINE_S) == {"weight": 1}


def test_receiver_of_an_earlier_quorum_is_refused() -> None:
    donor, receiver = transport(QUORUM + 1), transport()
    donor.send_checkpoint([1], STEP, {}, TIMEOUT)
    with pytest.raises(ConnectionError, match="no state of step 5"):
        receiver.recv_checkpoint(0, donor.metadata(), STEP, TIMEOUT)


def test_receiver_at_another_step_is_refused() -> None:
    donor, receiver = transport(), transport()
    address = donor.metadata()
    donor.send_checkpoint([1], STEP + 1, {}, TIMEOUT)
    with pytest.raises(ConnectionError, match="no state of step 5"):
        receiver.recv_checkpoint(0, address, STEP, TIMEOUT)


def test_state_is_not_withdrawn_while_it_is_read(pool: ThreadPoolExecutor) -> None:
    read, release = Event(), Event()

    def hold() -> None:
        read.set()
        assert release.wait(DEADLINE_S)

    donor, receiver = transport(), transport()
    address = donor.metadata()
    donor.send_checkpoint([1], STEP, {"held": Pickled(hold)}, TIMEOUT)
    receiving = pool.submit(receiver.recv_checkpoint, 0, address, STEP, TIMEOUT)
    assert read.wait(DEADLINE_S)
    withdrawing = pool.submit(donor.disallow_checkpoint)
    with pytest.raises(TimeoutError):
        withdrawing.result(0.1)
    release.set()
    withdrawing.result(DEADLINE_S)
    assert "held" in receiving.result(DEADLINE_S)


def test_transfer_to_a_receiver_that_hangs_is_cut_and_the_donor_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one whose machine has lost power, which does not close its connections."""
    monkeypatch.setattr(state_transport, "STATE_TIMEOUT_S", 0.1)
    state = {"weight": torch.empty(1 << 26, dtype=torch.uint8)}  # more than the kernel's buffers take
    donor = transport(timeout=timedelta(seconds=DEADLINE_S))
    donor.send_checkpoint([1], STEP, state, TIMEOUT)
    address = urlsplit(donor.metadata())
    with socket.create_connection((address.hostname, address.port), DEADLINE_S) as hanging:
        hanging.sendall(f"GET /{QUORUM}/{STEP} HTTP/1.0\r\n\r\n".encode())
        received = len(hanging.recv(100))
        began = time.monotonic()
        donor.disallow_checkpoint()
        assert time.monotonic() - began < DEADLINE_S / 2
        state["weight"].fill_(1)  # what the step changes does not arrive
        while data := hanging.recv(1 << 20):
            received += len(data)
    assert received < state["weight"].nbytes


@pytest.mark.parametrize("begun", [True, False])
def test_receiver_that_gives_up_ends_its_connection(pool: ThreadPoolExecutor, begun: bool) -> None:
    receiver, stream = transport(), io.BytesIO()
    torch_private.save_to_stream({"weight": torch.ones(1000)}, stream)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        donor = f"http://127.0.0.1:{listening.getsockname()[1]}"
        receiving = pool.submit(receiver.recv_checkpoint, 0, donor, STEP, TIMEOUT)
        with listening.accept()[0] as connection:
            connection.settimeout(DEADLINE_S)
            connection.recv(1000)
            if begun:
                connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n" + stream.getvalue()[:20])
            receiver.receiving.abort(ConnectionError("lost: replica 7"))
            with pytest.raises(ConnectionError, match="lost: replica 7"):
                receiving.result(DEADLINE_S)
            assert connection.recv(1) == b""
    assert receiver.error is None


def test_receiver_that_gives_up_while_it_connects_requests_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        connection = state_transport._DonorConnection(f"http://127.0.0.1:{listening.getsockname()[1]}", DEADLINE_S)
        connection.cut()
        with pytest.raises(OSError, match="Broken pipe"):
            connection.request("GET", f"/{QUORUM}/{STEP}")
