"""The kernel's answers about TCP sockets are read: recorded ones, and those about a real pair of sockets."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import sys
from ipaddress import ip_address
from pathlib import Path

import pytest

from holdfast.host.tcp_sockets import Endpoint, TcpSocket, parse_answer, tcp_sockets

DATA = Path(__file__).parent / "data"
"""Answers of Linux 6.18 to `dump_request` on node 0 of two that run Gloo's all-reduce; the link has become slow."""
HEADER_BYTES = 16 + 72
"""`struct nlmsghdr` and `struct inet_diag_msg`; attributes follow."""
INET_DIAG_INFO = 2


def datagrams(name: str) -> list[bytes]:
    return [bytes.fromhex(line) for line in (DATA / name).read_text().split()]


def recorded(name: str) -> list[TcpSocket]:
    answers = [parse_answer(data) for data in datagrams(name)]
    assert [done for _, done in answers] == [False] * (len(answers) - 1) + [True]
    return [found for sockets, _ in answers for found in sockets]


def end(host: str, port: int) -> Endpoint:
    return Endpoint(ip_address(host).packed, port)


def test_recorded_connection_of_gloo() -> None:
    listener, connection = recorded("sock_diag-ipv4.hex")
    assert (listener.listening, str(listener.local), listener.inode) == (True, "198.18.248.2:34813", 7236883)
    assert (connection.listening, connection.inode) == (False, 7235809)
    assert (str(connection.local), str(connection.remote)) == ("198.18.248.2:34813", "198.18.248.3:39584")
    # What `ss -tnie` shows of the same socket.
    counters = connection.counters
    assert counters.acked_bytes > 300_000_000 < counters.received_bytes
    assert (counters.retransmits, counters.segments // 1000) == (414, 245)
    assert 2_900_000 < counters.busy_us < 3_100_000
    assert 2_300_000 < counters.delivery_bytes_s < 2_500_000, "20 Mbit/s"
    assert not counters.app_limited


def test_recorded_sockets_of_the_store_have_ipv4_addresses() -> None:
    listener, *connections = recorded("sock_diag-ipv6.hex")
    assert (listener.listening, str(listener.local)) == (True, "[::]:29511")
    assert {str(each.local) for each in connections} == {"198.18.247.2:29511", "198.18.247.2:56806"}
    assert all(each.counters.app_limited for each in connections)


def with_info_of(message: bytes, size: int) -> bytes:
    """A socket's message with only the beginning of its `tcp_info`."""
    at = HEADER_BYTES
    while int.from_bytes(message[at + 2 : at + 4], sys.byteorder) != INET_DIAG_INFO:
        at += (int.from_bytes(message[at : at + 2], sys.byteorder) + 3) & ~3
    body = message[4:HEADER_BYTES] + struct.pack("=HH", 4 + size, INET_DIAG_INFO) + message[at + 4 : at + 4 + size]
    return struct.pack("=I", 4 + len(body)) + body


def test_shorter_tcp_info_of_an_older_kernel_reads_as_zeros() -> None:
    data = b"".join(datagrams("sock_diag-ipv4.hex"))
    connection = data[int.from_bytes(data[:4], sys.byteorder) :]
    ((whole,), _), ((older,), _) = (parse_answer(with_info_of(connection, size)) for size in (200, 104))
    assert (whole.counters.retransmits, whole.counters.busy_us > 0) == (414, True)
    assert (older.counters.retransmits, older.counters.busy_us) == (414, 0)


def test_error_of_the_kernel_is_raised() -> None:
    body = struct.pack("=i", -errno.ENOENT)
    with pytest.raises(FileNotFoundError):
        parse_answer(struct.pack("=IHHII", 16 + len(body), 2, 0, 1, 0) + body)


@pytest.mark.parametrize("name", ["sock_diag-ipv4.hex", "sock_diag-ipv6.hex"])
def test_cut_answer_is_no_other_error(name: str) -> None:
    data = datagrams(name)[0]
    for length in range(len(data)):
        with contextlib.suppress(OSError):
            assert len(parse_answer(data[:length])[0]) <= 3


@pytest.mark.parametrize(("listen_at", "host"), [("127.0.0.1", "127.0.0.1"), ("::1", "::1"), ("::", "127.0.0.1")])
def test_real_pair_of_sockets(listen_at: str, host: str) -> None:
    family = socket.AF_INET6 if ":" in listen_at else socket.AF_INET
    with (
        socket.create_server((listen_at, 0), family=family, dualstack_ipv6=listen_at == "::") as server,
        socket.create_connection((host, server.getsockname()[1])) as client,
    ):
        accepted, _ = server.accept()
        with accepted:
            client.sendall(bytes(100_000))
            read = 0
            while read < 100_000:
                read += len(accepted.recv(1 << 20))
            found = {each.inode: each for each in tcp_sockets()}
            near, far = (found[os.fstat(each.fileno()).st_ino] for each in (client, accepted))
            assert found[os.fstat(server.fileno()).st_ino].listening
    assert near.local == far.remote == end(host, near.local.port)
    assert near.remote == far.local == end(host, far.local.port)
    assert far.counters.received_bytes == 100_000
    assert near.counters.acked_bytes in range(1, 100_002)  # the last acknowledgement may be on its way
    assert near.counters.segments > 0 == near.counters.retransmits
