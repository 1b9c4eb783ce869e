"""The way of mpirun's command to another node: it arrives once, and only from who knows the key."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from tests.launch.test_rank_env import launched

from holdfast.launch import rsh_agent
from holdfast.launch.rank_env import NodeResources

WITHIN_S = 60.0


class Node(threading.Thread):
    """A node that waits for its command."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        # Held, as the agent holds it: else somebody's outgoing connection may have it meanwhile.
        self._held = socket.socket()
        self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._held.bind(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._held.getsockname()[1]}"
        self.command: str | None = None

    def run(self) -> None:
        self.command = rsh_agent.await_command(self.endpoint, "right", WITHIN_S)

    def meet(self) -> socket.socket:
        """A connection to it, once it listens."""
        return rsh_agent._connect(rsh_agent._address(self.endpoint), time.monotonic() + WITHIN_S)

    def told(self, command: str, key: str = "right", within_s: float = WITHIN_S) -> str | None:
        return rsh_agent.send_command(
            "node1", command, {rsh_agent.NODES: f"node1={self.endpoint}", rsh_agent.KEY: key}, within_s
        )


def nonce_from(peer: socket.socket) -> bytes:
    return rsh_agent._read(peer, rsh_agent.NONCE_BYTES, time.monotonic() + WITHIN_S)


@pytest.fixture
def node() -> Iterator[Node]:
    waiting = Node()
    waiting.start()
    yield waiting
    waiting.told("end", within_s=0.0)  # unless it was told before
    waiting.join(WITHIN_S)
    assert not waiting.is_alive()


def test_command_arrives_as_it_is(node: Node) -> None:
    command = 'orted -mca x "$HOME; é \udcff"'
    assert node.told(command) is None
    node.join(WITHIN_S)
    assert node.command == command


def test_command_of_somebody_without_the_key_is_refused_and_the_node_waits_on(node: Node) -> None:
    assert "refused" in (node.told("rm -rf /", key="wrong") or "")
    assert node.told("orted") is None
    node.join(WITHIN_S)
    assert node.command == "orted"


@pytest.mark.parametrize(
    "said",
    [
        lambda nonce: b"",
        lambda nonce: b"x" * 31,
        lambda nonce: nonce * 99,
        lambda nonce: rsh_agent._mac("right", nonce, b""),
    ],
)
def test_garbage_is_passed_over(node: Node, said: Callable[[bytes], bytes]) -> None:
    with node.meet() as peer:
        peer.sendall(said(nonce_from(peer)))
        peer.shutdown(socket.SHUT_WR)
        assert peer.recv(5) == b""
    assert node.told("orted") is None


def test_answer_for_one_connection_opens_no_other(node: Node) -> None:
    with node.meet() as peer:
        seen = rsh_agent._mac("right", nonce_from(peer), b"command") + b"command"
    with node.meet() as peer:
        nonce_from(peer)
        peer.sendall(seen)
        peer.shutdown(socket.SHUT_WR)
        assert peer.recv(5) == b""


@pytest.mark.parametrize("others", [1, 3 * rsh_agent.MAX_PEERS])
def test_peers_that_say_nothing_hold_nobody_up(node: Node, others: int) -> None:
    with contextlib.ExitStack() as silent:
        for _ in range(others):
            nonce_from(silent.enter_context(node.meet()))
        assert node.told("orted") is None
        node.join(WITHIN_S)
        assert node.command == "orted"


def test_second_command_is_not_taken(node: Node) -> None:
    with node.meet() as first, node.meet() as second:
        said = [(peer, rsh_agent._mac("right", nonce_from(peer), b"orted") + b"orted") for peer in (first, second)]
        answers: set[bytes] = set()
        for peer, command in said:
            peer.sendall(command)
            peer.shutdown(socket.SHUT_WR)
            answers.add(rsh_agent._read(peer, 5, time.monotonic() + WITHIN_S))
    assert answers == {b"taken", b""}


def test_node_that_nobody_calls_gives_up() -> None:
    assert rsh_agent.await_command("127.0.0.1:0", "right", 0.05) is None


def test_node_that_is_not_there_or_not_of_the_attempt_named() -> None:
    environ = {rsh_agent.NODES: "node1=127.0.0.1:1", rsh_agent.KEY: "right"}
    assert "mpirun's command cannot be sent to node1 at 127.0.0.1:1" in (
        rsh_agent.send_command("node1", "x", environ, 0.0) or ""
    )
    assert "`other`, which is no node" in (rsh_agent.send_command("other", "x", environ, 0.0) or "")


def test_other_nodes_wait_at_a_door_of_their_own() -> None:
    (launch,) = launched(launch="mpi", command="mpirun train", ranks_per_node=2)
    assert launch.argv == ("/py", "-P", "-m", "holdfast.launch.rsh_agent")
    assert (launch.env[rsh_agent.LISTEN], launch.env[rsh_agent.KEY]) == ("b:2", "k")
    assert rsh_agent.NODES not in launch.env


def test_first_node_runs_the_command_as_it_was_typed() -> None:
    (launch,) = launched(node=0, launch="mpi", command="mpirun -x 'A B' train", ranks_per_node=2)
    assert launch.argv[-4:] == ("mpirun", "-x", "A B", "train")
    assert launch.env[rsh_agent.NODES] == "node1=b:2"
    assert launch.env["OMPI_MCA_orte_default_dash_host"] == "localhost:2,node1:2"
    assert launch.env["OMPI_MCA_plm_rsh_agent"] == "/py -P -m holdfast.launch.rsh_agent"


def test_nodes_on_one_machine_keep_off_each_others_shared_memory_and_on_loopback() -> None:
    def defaults(share: NodeResources, master_addr: str) -> dict[str, str]:
        (launch,) = launched(share, node=0, master_addr=master_addr, launch="mpi", command="mpirun train")
        return {name: value for name, value in launch.env_defaults.items() if "btl" in name}

    apart, together = NodeResources(python="/py", cpus=8), NodeResources(python="/py", cpus=8, shares_machine=True)
    assert defaults(apart, "10.0.0.1") == {}
    assert defaults(together, "10.0.0.1") == {"OMPI_MCA_btl": "tcp,self"}
    assert defaults(apart, "127.0.0.1") == {"OMPI_MCA_btl_tcp_if_include": "127.0.0.0/8"}
