"""Checks of free ports and of mesh proxies."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.preflight.conftest import MakeNode, codes

from holdfast.findings import Severity
from holdfast.preflight.checks import ports
from holdfast.preflight.node_view import NotLookedAt

DATA = Path(__file__).resolve().parents[1] / "data"
# Of a pod with Istio's sidecar, quoted in TcpTableParserTest.java of neo9's scaler.
ISTIO_TCP = (DATA / "proc-net-tcp-istio.txt").read_text()
PLAIN_TCP = "".join(line for line in ISTIO_TCP.splitlines(keepends=True) if "  1337  " not in line)
POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}

TCP6_HEADER = "  sl  local_address                         remote_address                        st tx_queue ...\n"


def tcp6(*listening: int) -> str:
    lines = (f"   0: {'0' * 32}:{port:04X} {'0' * 32}:0000 0A 00000000:00000000 00:0 0 0\n" for port in listening)
    return TCP6_HEADER + "".join(lines)


def port_files(port_range: str, reserved: str = "", tcp: str = PLAIN_TCP) -> dict[str, str]:
    folder = "proc/sys/net/ipv4"
    files = {f"{folder}/ip_local_port_range": port_range, f"{folder}/ip_local_reserved_ports": reserved}
    sockets = "sockets: used 333\nTCP: inuse 11 orphan 0 tw 14 alloc 104 mem 2\nUDP: inuse 3 mem 0\n"
    return {**files, "proc/net/tcp": tcp, "proc/net/sockstat": sockets}


@pytest.mark.parametrize(
    ("files", "expected", "severity"),
    [
        (port_files("32768\t60999\n"), [], None),
        (port_files("1024\t65535\n", "30000-32767,8080\n"), [], None),
        (port_files("60000\t61000\n"), ["few-free-ports"], Severity.WARNING),
        (port_files("32768\t60999\n", "32768-60000\n"), ["few-free-ports"], Severity.WARNING),
        (port_files("60993\t60999\n"), ["few-free-ports"], Severity.ERROR),
    ],
)
def test_ranks_find_free_ports(
    node: MakeNode, files: dict[str, str], expected: list[str], severity: Severity | None
) -> None:
    found = [*ports.rendezvous_ports(node(files, processes=8))]
    assert codes(found) == expected
    assert all(each.severity is severity for each in found)


def test_listening_sockets_take_ports(node: MakeNode) -> None:
    files = {"proc/net/tcp6": tcp6(40001, 40002, 40003, 40004, 40005), "proc/net/sockstat6": "TCP6: inuse 5\n"}
    view = node({**port_files("40000\t40259\n"), **files})
    [finding] = ports.rendezvous_ports(view)
    assert finding.what == "255 ephemeral ports are free, and the ranks of this node open some 256"


def test_ports_that_cannot_be_read_are_no_pass(node: MakeNode) -> None:
    with pytest.raises(NotLookedAt, match="ip_local_port_range"):
        [*ports.rendezvous_ports(node())]
    with pytest.raises(NotLookedAt, match="/proc/net/sockstat"):
        [*ports.rendezvous_ports(node({"proc/sys/net/ipv4/ip_local_port_range": "32768\t60999\n"}))]
    with pytest.raises(NotLookedAt, match="/proc/net/tcp"):
        [*ports.sidecar(node(environ=POD))]


# `netstat -a` of a pod in Istio's ambient mode (istio/istio#54781): 15001, 15006 and 15008, all of IPv6
AMBIENT_PORTS = (15001, 15006, 15008)


@pytest.mark.parametrize(
    ("files", "environ", "expected"),
    [
        ({"proc/net/tcp": PLAIN_TCP}, POD, []),
        ({"proc/net/tcp": PLAIN_TCP, "proc/net/tcp6": tcp6(15001)}, POD, []),  # one port may be anyone's
        ({"proc/net/tcp": ISTIO_TCP}, POD, ["mesh-proxy-in-pod"]),
        ({"proc/net/tcp": PLAIN_TCP, "proc/net/tcp6": tcp6(*AMBIENT_PORTS)}, POD, ["mesh-proxy-in-pod"]),
        ({"proc/net/tcp": PLAIN_TCP, "proc/net/tcp6": tcp6(4140, 4143, 4191)}, POD, ["mesh-proxy-in-pod"]),
        ({"proc/net/tcp": PLAIN_TCP, "proc/17/comm": "linkerd2-proxy\n"}, POD, ["mesh-proxy-in-pod"]),
        ({"proc/net/tcp": PLAIN_TCP}, {**POD, "ISTIO_META_MESH_ID": "m"}, ["mesh-proxy-in-pod"]),
        ({"proc/17/comm": "envoy\n"}, {}, []),  # a machine whose pods have proxies of their own
    ],
)
def test_mesh_proxy_in_the_pod(
    node: MakeNode, files: dict[str, str], environ: dict[str, str], expected: list[str]
) -> None:
    found = [*ports.sidecar(node(files, environ=environ))]
    assert codes(found) == expected
    assert all(each.severity is Severity.WARNING for each in found)


def test_mesh_proxy_is_named_with_what_disables_it(node: MakeNode) -> None:
    [istio] = ports.sidecar(node({"proc/net/tcp": ISTIO_TCP}, environ=POD))
    assert istio.evidence == ("listening on port 15001", "listening on port 15006")
    assert 'sidecar.istio.io/inject: "false"' in istio.remedy
