"""Sockets of ranks for data to other nodes are told apart from those of stores, servers and the node itself."""

from __future__ import annotations

from ipaddress import ip_address

import pytest

from holdfast.agent.data_sockets import (
    MAX_CONNECTIONS,
    NodeAddresses,
    RankSocket,
    ends_of,
    public_ports,
    report_limit,
    sample,
    to_other_nodes,
)
from holdfast.host.tcp_sockets import Endpoint, TcpSocket
from holdfast.preflight.interfaces import Interface

STORE = 29500
GLOO, HTTP = 41000, 42000
"""Ports at which this node listens: at one address, and at all."""


def interface(name: str, *addresses: str) -> Interface:
    return Interface(name=name, addresses=tuple(map(ip_address, addresses)))


INTERFACES = (
    interface("lo", "127.0.0.1", "::1"),
    interface("eth0", "10.0.0.2", "fe80::2"),
    interface("net1", "10.1.0.2", "fd00::2"),
    interface("docker0", "172.17.0.1"),
)


def end(text: str) -> Endpoint:
    host, _, port = text.rpartition(":")
    return Endpoint(ip_address(host.strip("[]")).packed, int(port))


def connection(local: str, remote: str, inode: int = 7) -> TcpSocket:
    return TcpSocket(local=end(local), remote=end(remote), inode=inode)


def listener(local: str) -> TcpSocket:
    return TcpSocket(local=end(local), remote=end("0.0.0.0:0"), inode=8, listening=True)


def node(*words: str) -> NodeAddresses:
    return NodeAddresses.of(INTERFACES, words)


@pytest.mark.parametrize(
    ("local", "remote", "chosen"),
    [
        ("10.1.0.2:50000", "10.1.0.3:41000", True),
        ("10.1.0.2:41000", "10.1.0.3:50000", True),
        ("[fd00::2]:50000", "[fd00::3]:41000", True),
        ("10.0.0.2:50000", "10.0.0.3:29500", False),
        ("10.0.0.2:29500", "10.0.0.3:50000", False),
        ("10.0.0.2:42000", "10.0.0.3:50000", False),
        ("10.0.0.2:42001", "10.0.0.3:50000", False),
        ("10.1.0.2:50000", "10.1.0.2:41000", False),
        ("10.1.0.2:50000", "10.0.0.2:41000", False),
        ("127.0.0.1:50000", "127.0.0.1:41000", False),
        ("[::1]:50000", "[::1]:41000", False),
    ],
    ids=[
        *("to a rank", "from a rank", "IPv6", "to the store", "from a client of the store", "from a client of HTTP"),
        *("the same, IPv6", "to this node", "to this node's other address", "loopback", "loopback, IPv6"),
    ],
)
def test_data_sockets_lead_to_other_nodes_and_to_no_server(local: str, remote: str, chosen: bool) -> None:
    listeners = [listener(f"10.1.0.2:{GLOO}"), listener(f"0.0.0.0:{HTTP}"), listener(f"[::]:{HTTP + 1}")]
    sockets = [*listeners, connection(local, remote), connection(local, remote, inode=0)]
    found = [*to_other_nodes(sockets, node().interfaces, {STORE}, public_ports(sockets))]
    assert found == ([connection(local, remote)] if chosen else [])


@pytest.mark.parametrize(
    ("words", "promised", "others"),
    [
        ((), (), ()),
        (("=net1",), ("net1",), ("eth0", "docker0", "")),
        (("net",), ("net1",), ("eth0", "docker0", "")),
        (("^docker,lo",), ("eth0", "net1"), ("docker0", "")),
        (("=net1", "eth"), ("net1", "eth0"), ("docker0", "")),
        (("=net7",), ("net7",), ("eth0", "net1", "docker0", "")),
    ],
)
def test_interfaces_that_a_run_names(
    words: tuple[str, ...], promised: tuple[str, ...], others: tuple[str, ...]
) -> None:
    addresses = node(*words)
    assert addresses.promised == promised
    sockets = [connection(f"{host}:5", "10.9.9.9:6") for host in ("10.0.0.2", "10.1.0.2", "172.17.0.1", "10.7.7.7")]
    assert [addresses.interface(each) for each in sockets] == ["eth0", "net1", "docker0", ""]
    assert tuple(addresses.interface(each) for each in sockets if addresses.is_other(each)) == others


def test_loopback_is_no_interface_to_other_nodes() -> None:
    assert {*node("lo").interfaces.values()} == {"eth0", "net1", "docker0"}
    assert end("127.0.0.1:1").address not in node().interfaces


def test_ends_of_a_connection_as_text() -> None:
    ends = ends_of(RankSocket(3, connection("[fd00::2]:5", "[fd00::3]:6")), node())
    assert (ends.rank, ends.interface, ends.local, ends.remote) == (3, "net1", "[fd00::2]:5", "[fd00::3]:6")


def test_both_ends_of_many_connections_are_in_the_samples_of_both_nodes() -> None:
    here = [RankSocket(0, connection(f"10.1.0.2:{port}", "10.1.0.3:41000", port)) for port in range(2000, 6000)]
    there = [RankSocket(1, connection(str(each.remote), str(each.local))) for _, each in here]
    ours, theirs = (
        {(each.local, each.remote) for each in sample(one, node(), MAX_CONNECTIONS)} for one in (here, there)
    )
    assert len(ours) == MAX_CONNECTIONS
    assert {(remote, local) for local, remote in theirs} == ours


def test_connections_over_other_interfaces_come_first() -> None:
    fine = [RankSocket(0, connection(f"10.1.0.2:{port}", "10.1.0.3:41000", port)) for port in range(2000, 6000)]
    wrong = RankSocket(0, connection("10.0.0.2:50000", "10.0.0.3:41000"))
    assert sample([*fine, wrong], node("=net1"), 4)[0].interface == "eth0"
    assert "eth0" not in {each.interface for each in sample([*fine, wrong], node(), 4)}


def test_connections_to_storage_over_another_interface_leave_half_of_the_places() -> None:
    fine = [RankSocket(0, connection(f"10.1.0.2:{port}", "10.1.0.3:41000", port)) for port in range(2000, 2020)]
    storage = [RankSocket(0, connection(f"10.0.0.2:{port}", "52.216.1.2:443", port)) for port in range(3000, 3006)]
    wrong = RankSocket(0, connection("10.0.0.2:50000", "10.0.0.3:41000"))
    found = sample([*fine, *storage, wrong], node("=net1"), 4)
    assert [each.interface for each in found] == ["eth0", "eth0", "net1", "net1"]
    assert found[0].remote == "10.0.0.3:41000"
    assert len(sample([*fine[:1], *storage], node("=net1"), 4)) == 4


def test_reports_of_many_nodes_are_shorter() -> None:
    assert [report_limit(nodes) for nodes in (1, 2, 64, 256, 16_384)] == [64, 64, 64, 16, 4]
