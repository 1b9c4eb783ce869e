"""Checks of the interfaces that a job names, and of the host name."""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import ip_address

import pytest
from tests.preflight.conftest import MakeNode, codes

from holdfast.findings import Severity
from holdfast.preflight.checks import network
from holdfast.preflight.interfaces import Interface, chosen_by_nccl, system_interfaces
from holdfast.preflight.node_view import NotLookedAt


def interface(name: str, *addresses: str, running: bool = True) -> Interface:
    return Interface(name=name, running=running, addresses=tuple(map(ip_address, addresses)))


NODE = (
    interface("lo", "127.0.0.1", "::1"),
    interface("ens32", "10.0.0.4", "fe80::8ff:1aff:fe02:3"),
    interface("ens65", "169.254.7.1"),
    interface("ens129", running=False),
    interface("docker0", "172.17.0.1", running=False),
)
# ip addr of a pod on EKS: the address of eth0 is a /32 with a route by 169.254.1.1
POD = (interface("lo", "127.0.0.1"), interface("eth0", "192.168.61.22", "fe80::2cf4:1ff:fe4a:6b3e"))


def node_interfaces() -> Sequence[Interface]:
    return NODE


def pod_interfaces() -> Sequence[Interface]:
    return POD


def no_interfaces() -> Sequence[Interface]:
    raise NotLookedAt("getifaddrs: Cannot allocate memory")


def test_interfaces_of_this_machine_have_their_addresses() -> None:
    loopback = next(each for each in system_interfaces() if each.name == "lo")
    assert loopback.running
    assert ip_address("127.0.0.1") in loopback.addresses


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("ens", "ens32 ens65 ens129"),
        ("ens3,docker", "ens32 docker0"),
        ("=ens3", ""),
        ("=ens32,lo", "lo ens32"),
        ("^ens,lo", "docker0"),
        ("^=ens3,lo", "ens32 ens65 ens129 docker0"),
        ("ens32:5000", "ens32"),
    ],
)
def test_nccl_chooses_interfaces_by_prefix_name_and_exclusion(words: str, names: str) -> None:
    [(_, found)] = chosen_by_nccl(words, NODE)
    assert " ".join(each.name for each in found) == names


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, []),
        ({"NCCL_SOCKET_IFNAME": "ens"}, []),  # one of three is good
        ({"NCCL_SOCKET_IFNAME": "^lo,docker"}, []),
        ({"NCCL_SOCKET_IFNAME": "eth0"}, ["interface-missing"]),
        ({"NCCL_SOCKET_IFNAME": "ens129"}, ["interface-down"]),
        ({"NCCL_SOCKET_IFNAME": "ens65"}, ["interface-without-address"]),
        ({"GLOO_SOCKET_IFNAME": "ens32,eth0"}, ["interface-missing"]),  # Gloo needs each, by its whole name
        ({"GLOO_SOCKET_IFNAME": "ens"}, ["interface-missing"]),
        ({"TP_SOCKET_IFNAME": "ens32"}, []),
    ],
)
def test_interface_that_the_job_names_is_usable(node: MakeNode, env: dict[str, str], expected: list[str]) -> None:
    found = [*network.interface_exists(node(env=env, gpus=8), node_interfaces, settle_s=0.0)]
    assert codes(found) == expected
    assert all(each.severity is Severity.ERROR for each in found)


def test_the_variable_of_the_job_beats_that_of_the_environment(node: MakeNode) -> None:
    view = node(environ={"NCCL_SOCKET_IFNAME": "eth9"}, env={"NCCL_SOCKET_IFNAME": "eth0"}, gpus=8)
    assert codes([*network.interface_exists(view, pod_interfaces, settle_s=0.0)]) == []


@pytest.mark.parametrize(
    ("variable", "gpus", "severity"),
    [
        ("NCCL_SOCKET_IFNAME", 8, Severity.ERROR),
        ("NCCL_SOCKET_IFNAME", 0, Severity.WARNING),
        ("GLOO_SOCKET_IFNAME", 8, Severity.WARNING),
        ("GLOO_SOCKET_IFNAME", 0, Severity.ERROR),
        ("TP_SOCKET_IFNAME", 0, Severity.WARNING),
    ],
)
def test_a_library_that_the_job_may_not_use_is_a_warning(
    node: MakeNode, variable: str, gpus: int, severity: Severity
) -> None:
    [finding] = network.interface_exists(node(environ={variable: "eth9"}, gpus=gpus), pod_interfaces, settle_s=0.0)
    assert finding.severity is severity
    assert finding.evidence == (
        "lo: running, 127.0.0.1",
        "eth0: running, 192.168.61.22 fe80::2cf4:1ff:fe4a:6b3e",
    )


def test_interfaces_that_cannot_be_listed_are_no_pass(node: MakeNode) -> None:
    with pytest.raises(NotLookedAt, match="getifaddrs"):
        [*network.interface_exists(node(env={"NCCL_SOCKET_IFNAME": "eth0"}), no_interfaces, settle_s=0.0)]


# A pod's file as kubelet writes it, from kubernetes/kubernetes#43632.
POD_HOSTS = """# Kubernetes-managed hosts file.
127.0.0.1\tlocalhost
::1\tlocalhost ip6-localhost ip6-loopback
fe00::0\tip6-localnet
192.168.61.22\tpod-name
"""
# Of a machine that Debian's installer has set up, with its nsswitch.conf.
DEBIAN_HOSTS = "127.0.0.1\tlocalhost\n127.0.1.1\tpod-name.example.org\tpod-name\n"
DEBIAN_SOURCES = "passwd:         files systemd\nhosts:          files mdns4_minimal [NOTFOUND=return] dns\n"
HOST = {"proc/sys/kernel/hostname": "pod-name\n"}


@pytest.mark.parametrize(
    ("files", "commands", "expected"),
    [
        ({"etc/hosts": POD_HOSTS}, {}, []),
        ({"etc/hosts": DEBIAN_HOSTS, "etc/nsswitch.conf": DEBIAN_SOURCES}, {}, ["host-name-loopback"]),
        ({}, {"getent ahosts pod-name": "192.168.61.22   STREAM pod-name\n192.168.61.22   DGRAM\n"}, []),
        ({}, {"getent ahosts pod-name": ""}, ["host-name-unresolved"]),
        ({}, {"getent ahosts pod-name": TimeoutError("no answer")}, ["host-name-unresolved"]),
        ({}, {"getent ahosts pod-name": "10.1.2.3   STREAM pod-name\n"}, ["host-name-elsewhere"]),
        ({"etc/nsswitch.conf": "hosts: mymachines resolve [!UNAVAIL=return] files myhostname dns"}, {}, []),
    ],
)
def test_host_name_resolves_to_an_address_of_the_node(
    node: MakeNode, files: dict[str, str], commands: dict[str, str | Exception], expected: list[str]
) -> None:
    found = [*network.host_name(node({**HOST, **files}, commands, address="192.168.61.22"), pod_interfaces)]
    assert codes(found) == expected
    assert all(each.severity is Severity.WARNING for each in found)


@pytest.mark.parametrize(
    ("address", "env"), [("127.0.0.1", {}), ("localhost", {}), ("192.168.61.22", {"GLOO_SOCKET_IFNAME": "eth0"})]
)
def test_host_name_does_not_matter_on_one_machine_or_with_an_interface_named(
    node: MakeNode, address: str, env: dict[str, str]
) -> None:
    view = node({**HOST, "etc/hosts": DEBIAN_HOSTS}, address=address, env=env)
    assert codes([*network.host_name(view, pod_interfaces)]) == []


@pytest.mark.parametrize(
    ("files", "address", "reason"),
    [({}, "", "address"), ({}, "10.0.0.4", "hostname"), (HOST, "10.0.0.4", "getent")],
)
def test_host_name_that_cannot_be_looked_up_is_no_pass(
    node: MakeNode, files: dict[str, str], address: str, reason: str
) -> None:
    with pytest.raises(NotLookedAt, match=reason):
        [*network.host_name(node(files, address=address), node_interfaces)]


def sysfs(name: str, speed: str, duplex: str = "full") -> dict[str, str]:
    folder = f"sys/class/net/{name}"
    return {f"{folder}/speed": speed, f"{folder}/duplex": duplex, f"{folder}/mtu": "9001"}


@pytest.mark.parametrize(
    ("speed", "duplex", "network_name", "expected"),
    [
        ("100000", "full", "Socket", []),
        ("10000", "full", "Socket", []),  # that of every veth of a pod
        ("1000", "full", "Socket", ["interface-slow"]),
        ("10000", "half", "Socket", ["interface-slow"]),
        ("1000", "full", "IB", []),  # a DGX bootstraps over its 1 Gbit/s port
    ],
)
def test_interface_of_gpus_is_fast(
    node: MakeNode, speed: str, duplex: str, network_name: str, expected: list[str]
) -> None:
    view = node(sysfs("ens32", speed, duplex), address="10.0.0.4", gpus=8, network=network_name)
    assert codes([*network.interface_speed(view, node_interfaces)]) == expected


def test_the_named_interface_carries_the_data(node: MakeNode) -> None:
    files = {**sysfs("ens32", "1000"), **sysfs("eth0", "100000")}
    view = node(files, env={"NCCL_SOCKET_IFNAME": "=eth0"}, address="10.0.0.4", gpus=8)
    both = (*NODE, *POD)
    assert codes([*network.interface_speed(view, lambda: both)]) == []
    assert network.network_facts(view, lambda: both) == {
        "MTU of the socket interface": "9001",
        "speed of the socket interface": "100,000 Mbit/s",
    }


def test_an_unused_port_that_the_prefix_admits_carries_no_data(node: MakeNode) -> None:
    files = {**sysfs("ens32", "100000"), **sysfs("ens129", "1000"), **sysfs("ens65", "1000")}
    view = node(files, env={"NCCL_SOCKET_IFNAME": "ens"}, address="10.0.0.4", gpus=8)
    assert codes([*network.interface_speed(view, node_interfaces)]) == []


def test_a_virtual_interface_without_a_speed_is_no_pass(node: MakeNode) -> None:
    view = node(sysfs("ens32", "-1"), address="10.0.0.4", gpus=8)
    with pytest.raises(NotLookedAt, match="ens32"):
        [*network.interface_speed(view, node_interfaces)]
    assert network.network_facts(view, node_interfaces) == {"MTU of the socket interface": "9001"}
    assert network.network_facts(view, no_interfaces) == {}


def test_interface_that_has_just_been_attached_gets_time_to_run(node: MakeNode) -> None:
    looks = iter((False, False, True))

    def settling() -> tuple[Interface, ...]:
        return (Interface(name="net1", running=next(looks), addresses=(ip_address("10.0.0.2"),)),)

    assert [*network.interface_exists(node(env={"NCCL_SOCKET_IFNAME": "net1"}, gpus=8), settling)] == []
