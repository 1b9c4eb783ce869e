"""Networks of namespaces, with real nodes and real sockets; all traffic stays on addresses made here.

Run as root, or inside a user namespace (test_netns_rootless.py runs this file there).
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import select
import signal
import socket
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from ipaddress import IPv4Network
from pathlib import Path

import pytest

from holdfast.errors import HoldfastError
from holdfast.launch.local import netns
from holdfast.launch.local.netns import NetnsInterface, NetnsNetwork, NetnsNode, ip_command, namespace, subnet

GREET = """
import socket, sys
server = socket.create_server((sys.argv[1], 0))
print(server.getsockname()[1], flush=True)
while True:
    connection, _ = server.accept()
    connection.sendall(b"hello")
    connection.close()
"""

CONNECT = """
import socket, sys
host, port, timeout_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
with socket.create_connection((host, port), timeout_s) as connection:
    print(connection.recv(5).decode())
"""

ECHO = """
import socket
server = socket.create_server(("", 0))
print(server.getsockname()[1], flush=True)
connection, _ = server.accept()
while received := connection.recv(100):
    connection.sendall(received)
"""

TALK = """
import socket, sys
connection = socket.create_connection((sys.argv[1], int(sys.argv[2])), 10)
connection.settimeout(None)
for line in sys.stdin:
    connection.sendall(line.encode())
    print(connection.recv(100).decode(), end="", flush=True)
"""

SWALLOW = """
import socket
server = socket.create_server(("", 0))
print(server.getsockname()[1], flush=True)
while True:
    connection, _ = server.accept()
    while connection.recv(1 << 20):
        pass
    connection.sendall(b"done")
    connection.close()
"""

SEND = """
import socket, sys, time
begin = time.monotonic()
with socket.create_connection((sys.argv[1], int(sys.argv[2])), 60) as connection:
    connection.sendall(bytes(4 << 20))
    connection.shutdown(socket.SHUT_WR)
    assert connection.recv(4) == b"done"
print(time.monotonic() - begin)
"""

RESOLVE = """
import socket, sys
for line in sys.stdin:
    print(socket.gethostbyname(line.strip()), flush=True)
"""

DAEMONISE = "setsid sleep 600 </dev/null >/dev/null 2>&1 & echo started"

OWN_AND_DIE = """
import os, signal, subprocess, sys
from holdfast.launch.local.netns import NetnsNetwork
network = NetnsNetwork.create(sys.argv[1])
node0, node1 = network.add_node("node0"), network.add_node("node1")
sleeper = subprocess.Popen([*node0.prefix, "sh", "-c", "echo; exec sleep 600"], stdout=subprocess.PIPE)
sleeper.stdout.readline()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(scope="module", autouse=True)
def able() -> None:
    if reason := netns.unavailable():
        pytest.skip(f"needs network namespaces: {reason}")
    if not namespace.privileged():
        pytest.skip("needs root here; as an ordinary user test_netns_rootless.py runs this file")


@pytest.fixture
def tag() -> Iterator[str]:
    """A tag that is unused at this time; everything made with it is removed."""
    tag = f"t{os.getpid()}"
    yield tag
    netns.remove(tag)
    assert netns.leftovers(tag) == []


@pytest.fixture
def network(tag: str) -> NetnsNetwork:
    """Two nodes, node0 and node1."""
    network = NetnsNetwork.create(tag)
    network.add_node("node0")
    network.add_node("node1")
    return network


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts Python in a node; it is killed when the test ends."""
    started: list[subprocess.Popen[str]] = []

    def start(node: NetnsNode, script: str, *arguments: str) -> subprocess.Popen[str]:
        argv = (*node.prefix, sys.executable, "-c", script, *arguments)
        process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


Start = Callable[..., subprocess.Popen[str]]


def line(process: subprocess.Popen[str], deadline_s: float = 20) -> str:
    """The next line a process prints."""
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], deadline_s)
    assert ready, f"not a word in {deadline_s} s"
    return process.stdout.readline().strip()


def ask(process: subprocess.Popen[str], question: str) -> str:
    """Its answer to a line of input."""
    assert process.stdin is not None
    print(question, file=process.stdin)
    return line(process)


def output(node: NetnsNode, *argv: str) -> str:
    """What a command says in a node."""
    done = subprocess.run((*node.prefix, *argv), capture_output=True, text=True, check=True, timeout=200)
    return done.stdout.strip()


def greeted(node: NetnsNode, host: str, port: str, timeout_s: float = 10) -> bool:
    """Whether the greeting server there is reached from the node."""
    argv = (*node.prefix, sys.executable, "-c", CONNECT, host, port, str(timeout_s))
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=200)
    return done.stdout.strip() == "hello"


def competitors(tag: str) -> list[str]:
    """Four tags whose search for a free subnet starts at the same one of 512."""
    tags = [f"{tag}{number}" for number in range(9999)]
    start = zlib.crc32(tags[0].encode()) % 512
    return [one for one in tags if zlib.crc32(one.encode()) % 512 == start][:4]


def code(error: pytest.ExceptionInfo[HoldfastError]) -> str:
    return error.value.findings[0].code


def test_nodes_reach_each_other_by_name(network: NetnsNetwork, start: Start) -> None:
    node0, node1 = network.nodes.values()
    for server, client in ((node0, node1), (node1, node0)):
        port = line(start(server, GREET, ""))
        assert greeted(client, server.name, port)


def test_hostname_of_a_node_resolves_to_its_own_address(network: NetnsNetwork) -> None:
    script = "import socket; print(socket.gethostname(), socket.gethostbyname(socket.gethostname()))"
    for node in network.nodes.values():
        assert output(node, sys.executable, "-c", script) == f"{node.name} {node.address}"


def test_owner_is_reached_as_controller(network: NetnsNetwork) -> None:
    with socket.create_server((network.address, 0)) as server, ThreadPoolExecutor(1) as pool:
        server.settimeout(20)
        reached = pool.submit(greeted, network.nodes["node1"], "controller", str(server.getsockname()[1]))
        connection, peer = server.accept()
        connection.sendall(b"hello")
        connection.close()
        assert peer[0] == network.nodes["node1"].address
        assert reached.result()


def test_server_on_loopback_is_reached_in_its_own_node_only(network: NetnsNetwork, start: Start) -> None:
    node0, node1 = network.nodes.values()
    port = line(start(node1, GREET, "127.0.0.1"))
    assert greeted(node1, "localhost", port)
    assert not greeted(node0, "node1", port)
    assert not greeted(node0, "localhost", port)


def test_node_sees_its_own_interfaces_only(tag: str) -> None:
    node = NetnsNetwork.create(tag, interfaces=(NetnsInterface(), NetnsInterface(name="net1"))).add_node("node0")
    script = (
        "import os, socket; print(*sorted(name for _, name in socket.if_nameindex()), *os.listdir('/sys/class/net'))"
    )
    names = output(node, sys.executable, "-c", script).split()
    assert names[:3] == ["eth0", "lo", "net1"]
    assert sorted(names[3:]) == names[:3]


def test_control_groups_are_seen_in_a_node(network: NetnsNetwork) -> None:
    here = Path("/sys/fs/cgroup")
    listed = output(network.nodes["node0"], "ls", str(here)).split()
    assert sorted(listed) == sorted(path.name for path in here.iterdir())


def test_command_is_the_process_that_was_started(network: NetnsNetwork) -> None:
    async def run() -> tuple[int, str]:
        process = await asyncio.create_subprocess_exec(
            *network.nodes["node0"].prefix, "sh", "-c", "echo $$; uname -n", stdout=-1
        )
        said, _ = await process.communicate()
        return process.pid, said.decode()

    pid, said = asyncio.run(run())
    assert said.split() == [str(pid), "node0"]


def test_environment_of_a_command_is_what_was_given(network: NetnsNetwork) -> None:
    argv = (*network.nodes["node0"].prefix, "/usr/bin/env")
    given = {"PATH": os.environ["PATH"], "WORD": "two words"}
    done = subprocess.run(argv, env=given, capture_output=True, text=True, check=True)
    seen = dict(one.split("=", 1) for one in done.stdout.splitlines())
    shells_own = {"PWD", "OLDPWD", "SHLVL", "_"}
    assert {name: value for name, value in seen.items() if name not in shells_own} == given


def test_partition_cuts_and_heal_restores(network: NetnsNetwork, start: Start) -> None:
    node0, node1 = network.nodes.values()
    port = line(start(node1, GREET, ""))
    network.partition("node1")
    assert not greeted(node0, "node1", port, timeout_s=0.5)
    assert greeted(node1, node1.address, port), "a node that is cut off still reaches itself"
    network.heal("node1")
    assert greeted(node0, "node1", port)


def test_connection_survives_a_partition(network: NetnsNetwork, start: Start) -> None:
    node0, node1 = network.nodes.values()
    client = start(node0, TALK, "node1", line(start(node1, ECHO)))
    assert ask(client, "before") == "before"
    network.partition("node0")
    assert client.stdin is not None
    print("during", file=client.stdin)
    assert client.stdout is not None
    assert select.select([client.stdout], [], [], 0.5)[0] == []
    network.heal("node0")
    assert line(client) == "during"


def test_node_added_later_is_known_to_running_processes(network: NetnsNetwork, start: Start) -> None:
    resolver = start(network.nodes["node0"], RESOLVE)
    assert ask(resolver, "node1") == network.nodes["node1"].address
    node2 = network.add_node("node2", aliases=("worker.demo.svc",))
    assert ask(resolver, "node2") == ask(resolver, "worker.demo.svc") == node2.address


def test_replaced_node_has_another_address_and_the_same_name(network: NetnsNetwork, start: Start) -> None:
    old = network.nodes["node1"]
    start(old, GREET, "")
    network.remove_node("node1")
    assert list(network.nodes) == ["node0"]
    new = network.add_node("node1")
    assert new.address != old.address
    port = line(start(new, GREET, ""))
    assert greeted(network.nodes["node0"], "node1", port)
    assert not greeted(network.nodes["node0"], old.address, port, timeout_s=0.5)


def test_kill_ends_daemons_and_leaves_the_node_and_others(network: NetnsNetwork, start: Start) -> None:
    port = line(start(network.nodes["node0"], GREET, ""))
    output(network.nodes["node1"], "sh", "-c", DAEMONISE)
    assert len(network.processes("node1")) == 1
    network.kill("node1")
    assert network.processes("node1") == []
    assert greeted(network.nodes["node1"], "node0", port)


@pytest.mark.slow
def test_second_interface_is_faster_than_the_limited_first(tag: str, start: Start) -> None:
    if reason := netns.rates_unavailable():
        pytest.skip(f"needs rates: {reason}")
    network = NetnsNetwork.create(tag, interfaces=(NetnsInterface(name="eth0", mbit=20), NetnsInterface(name="net1")))
    sender, receiver = network.add_node("node0"), network.add_node("node1")
    port = line(start(receiver, SWALLOW))

    def seconds(host: str) -> float:
        return float(output(sender, sys.executable, "-c", SEND, host, port))

    # A limit slows every try; what else the machine does, only some.
    assert seconds("node1") >= 3 * min(seconds("node1-net1") for _ in range(3))


def test_networks_made_at_once_are_apart(tag: str, start: Start) -> None:
    tags = competitors(tag)
    try:
        with ThreadPoolExecutor(len(tags)) as pool:
            networks = list(pool.map(NetnsNetwork.create, tags))
        subnets = {IPv4Network(f"{network.address}/24", strict=False) for network in networks}
        assert len(subnets) == len(tags)
        first, second = networks[0].add_node("node0"), networks[1].add_node("node0")
        port = line(start(second, GREET, ""))
        assert greeted(second, "node0", port)
        assert not greeted(first, second.address, port, timeout_s=0.5)
        networks[0].remove()
        assert greeted(second, "node0", port)
    finally:
        for one in tags:
            netns.remove(one)


def test_subnets_in_use_are_not_chosen(tag: str) -> None:
    chosen = IPv4Network(f"{NetnsNetwork.create(tag).address}/24", strict=False)
    netns.remove(tag)
    other = f"{tag}x"
    ip_command.ip(
        f"link add name {other} type bridge", f"address add {chosen[9]}/24 dev {other}", f"link set {other} up"
    )
    try:
        assert not IPv4Network(f"{NetnsNetwork.create(tag).address}/24", strict=False).overlaps(chosen)
    finally:
        ip_command.ip(f"link delete dev {other}")


def test_remove_leaves_nothing(network: NetnsNetwork, start: Start) -> None:
    server = start(network.nodes["node0"], GREET, "")
    line(server)
    output(network.nodes["node1"], "sh", "-c", DAEMONISE)
    network.remove()
    assert server.wait(timeout=200) == -signal.SIGKILL
    assert netns.leftovers(network.tag) == []
    assert network.tag not in Path("/proc/self/mountinfo").read_text()
    network.remove()


def test_network_of_a_dead_owner_is_taken_over(tag: str, start: Start) -> None:
    subprocess.run((sys.executable, "-c", OWN_AND_DIE, tag), stdout=subprocess.DEVNULL, check=False, timeout=200)
    network = NetnsNetwork.open(tag)
    assert list(network.nodes) == ["node0", "node1"]
    assert len(network.processes("node0")) == 1
    node2 = network.add_node("node2")
    assert greeted(network.nodes["node1"], "node2", line(start(node2, GREET, "")))


def test_remains_of_a_dead_owner_are_found_and_removed_by_tag(tag: str) -> None:
    subprocess.run((sys.executable, "-c", OWN_AND_DIE, tag), stdout=subprocess.DEVNULL, check=False, timeout=200)
    kinds = {one.split()[0] for one in netns.leftovers(tag)}
    assert kinds == {"process", "namespaces", "folder", "interface"}
    netns.remove(tag)
    assert netns.leftovers(tag) == []
    netns.remove(tag)


def test_tag_in_use_is_refused(network: NetnsNetwork) -> None:
    with pytest.raises(HoldfastError) as error:
        NetnsNetwork.create(network.tag)
    assert code(error) == "netns-exists"
    assert list(network.nodes) == ["node0", "node1"]


def test_tag_that_makes_no_interface_name_is_refused() -> None:
    for tag in ("", "Upper", "a-b", "a" * 14):
        with pytest.raises(ValueError, match="tag"):
            NetnsNetwork.create(tag)


def test_node_that_is_not_there_is_an_error(network: NetnsNetwork) -> None:
    with pytest.raises(HoldfastError) as error:
        network.partition("node7")
    assert code(error) == "netns-not-found"


def test_node_that_is_there_already_is_refused(network: NetnsNetwork) -> None:
    with pytest.raises(ValueError, match="node1"):
        network.add_node("node1")


def test_node_that_cannot_be_made_leaves_nothing(network: NetnsNetwork) -> None:
    name = "n" * 65
    with pytest.raises(OSError, match=r"too long|Invalid"):
        network.add_node(name)
    assert list(network.nodes) == ["node0", "node1"]
    assert len(netns.leftovers(network.tag)) == len(("node0", "node1", "hub", "folder", "interface"))


def test_interface_name_the_kernel_refuses_is_an_error(tag: str) -> None:
    network = NetnsNetwork.create(tag, interfaces=(NetnsInterface(name="a/b"),))
    with pytest.raises(HoldfastError) as error:
        network.add_node("node0")
    assert code(error) == "netns-command-failed"
    assert network.nodes == {}


def test_network_that_is_not_there_is_an_error(tag: str) -> None:
    with pytest.raises(HoldfastError) as error:
        NetnsNetwork.open(tag)
    assert code(error) == "netns-not-found"


def test_failed_command_is_quoted() -> None:
    with pytest.raises(HoldfastError) as error:
        ip_command.ip("link set dev nosuchthing up")
    assert code(error) == "netns-command-failed"
    assert any("nosuchthing" in one for one in error.value.findings[0].evidence)


def test_lock_on_subnets_that_somebody_holds_for_ever_is_waited_for_only_so_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(subnet, "LOCK_TIMEOUT_S", 0.05)
    with open("/proc/self/ns/net") as held:  # every user of the machine can do this
        fcntl.flock(held, fcntl.LOCK_EX)
        with subnet.subnet_lock():
            pass
