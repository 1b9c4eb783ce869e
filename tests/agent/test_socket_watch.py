"""The sockets of ranks are found by their descriptors, reported when they change, and measured step by step."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from ipaddress import ip_address

import pytest
from msgspec.structs import replace

from holdfast.agent import socket_watch
from holdfast.agent.link_speed import MIN_FIRST_SAMPLES, WINDOW
from holdfast.agent.socket_watch import MAX_FAILURES, MAX_NODES, MAX_REPORTS, SocketWatch, spans_nodes
from holdfast.clock import Clock
from holdfast.events import LinkSlowed, LinksMeasured, SocketsObserved, TrafficStopped
from holdfast.host.tcp_sockets import Endpoint, TcpSocket
from holdfast.preflight.interfaces import Interface
from holdfast.protocol.orders import StartRanks
from holdfast.watch.quiet_traffic import QUIET_S

DEADLINE_S = 20.0
HERE, THERE = ip_address("10.1.0.2"), ip_address("10.1.0.3")
INTERFACES = (
    Interface(name="eth0", addresses=(ip_address("10.0.0.2"),)),
    Interface(name="net1", addresses=(HERE,)),
)
MB = 1_000_000


def order(**changed: str) -> StartRanks:
    env = {"GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.2", "MASTER_PORT": "29500", **changed}
    return StartRanks(replica=0, attempt=3, ranks=(), env=env, fabric="tcp", interfaces=("=net1",))


class Kernel:
    """The sockets as the kernel shows them, from one look to the next; some inodes are real ones of this process."""

    def __init__(self) -> None:
        self.open = ExitStack()
        self.sockets: dict[int, TcpSocket] = {}

    def connect(self, interface: str = "net1", inode: int | None = None, far: str = str(THERE)) -> int:
        if inode is None:
            inode = os.fstat(self.open.enter_context(socket.socket()).fileno()).st_ino
        number = 5000 + len(self.sockets)
        local = ip_address("10.0.0.2" if interface == "eth0" else HERE).packed
        ends = Endpoint(local, number), Endpoint(ip_address(far).packed, 41000)
        self.sockets[inode] = TcpSocket(local=ends[0], remote=ends[1], inode=inode)
        return inode

    def pass_data(self, inode: int, sent: int, busy_s: float) -> None:
        now = self.sockets[inode].counters
        counters = replace(
            now, acked_bytes=now.acked_bytes + sent, busy_us=now.busy_us + int(busy_s * 1e6), segments=now.segments + 10
        )
        self.sockets[inode] = replace(self.sockets[inode], counters=counters)


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    kernel = Kernel()
    with kernel.open:
        yield kernel


class Watched:
    """A watch that looks when the test requests it."""

    def __init__(self, kernel: Kernel, **environ: str) -> None:
        self.sent: list[SocketsObserved | LinksMeasured | LinkSlowed | TrafficStopped] = []
        self.steps, self.now = 0, 1000.0
        self.watch = SocketWatch(
            order(GROUP_WORLD_SIZE=str(MAX_NODES + 1)) if environ else order(),
            node=1,
            clock=Clock(),
            pids=lambda: {4: os.getpid()},
            environ={"GLOO_SOCKET_IFNAME": "net1", "PATH": "/bin", **environ},
            send=self.sent.append,
            steps=lambda: self.steps,
            sockets=lambda: [*kernel.sockets.values()],
            interfaces=lambda: INTERFACES,
            monotonic=lambda: self.now,
        )

    def look(self, times: int = 1) -> None:
        for _ in range(times):
            self.watch.look()

    def reports(self) -> list[SocketsObserved]:
        return [each for each in self.sent if isinstance(each, SocketsObserved)]


def test_first_connections_are_reported_at_once_and_later_ones_when_they_have_settled(kernel: Kernel) -> None:
    watched = Watched(kernel)
    watched.look(3)
    assert watched.sent == []
    kernel.connect()
    watched.look(3)
    (first,) = watched.reports()
    assert (first.node, first.attempt, first.count, first.promised) == (1, 3, 1, ("net1",))
    assert first.addresses == {"10.0.0.2": "eth0", "10.1.0.2": "net1"}
    assert first.variables == {"GLOO_SOCKET_IFNAME": "net1"}
    assert (first.other_interfaces, first.host_name) == ((), "")
    for _ in range(5):
        kernel.connect()
        watched.look()
    assert len(watched.reports()) == 1
    watched.look(3)
    assert [each.count for each in watched.reports()] == [1, 6]
    for _ in range(2 * MAX_REPORTS):
        kernel.connect()
        watched.look(3)
    assert len(watched.reports()) == MAX_REPORTS


def test_first_nodes_of_a_very_large_run_report_a_few_connections_each(kernel: Kernel) -> None:
    for _ in range(9):
        kernel.connect()
    first, later = Watched(kernel, GROUP_RANK=str(MAX_NODES - 1)), Watched(kernel, GROUP_RANK=str(MAX_NODES))
    for watched in (first, later):
        watched.look(3)
    assert [(each.count, len(each.connections)) for each in first.reports()] == [(9, 4)]
    assert later.sent == []


def test_other_interface_is_reported_with_what_the_host_name_resolves_to(kernel: Kernel) -> None:
    watched = Watched(kernel)
    kernel.connect("eth0")
    watched.look()
    (found,) = watched.reports()
    assert found.other_interfaces == ("eth0",)
    assert [each.interface for each in found.connections] == ["eth0"]
    assert found.host_name.startswith(f"{socket.gethostname()} (")


def test_ranks_that_exchange_nothing_for_ten_minutes_are_reported_once(kernel: Kernel) -> None:
    watched, inode = Watched(kernel), kernel.connect()

    def reports_after(sent: int, seconds: float) -> int:
        kernel.pass_data(inode, sent, 0.1)
        watched.now += seconds
        watched.look()
        return sum(isinstance(each, TrafficStopped) for each in watched.sent)

    assert reports_after(0, 2 * QUIET_S) == 0, "they have exchanged nothing yet"
    assert reports_after(50 * MB, 1.0) == 0
    assert reports_after(0, QUIET_S - 1.0) == 0
    assert reports_after(1000, 2.0) == 1
    assert reports_after(0, 2 * QUIET_S) == 1


def test_sockets_of_other_programs_are_none_of_the_ranks(kernel: Kernel) -> None:
    watched = Watched(kernel)
    kernel.connect(inode=1)
    watched.look(10)
    assert watched.sent == []


def test_socket_of_a_rank_s_child_is_the_rank_s(kernel: Kernel) -> None:
    script = "import os, socket; s = socket.socket(); print(os.fstat(s.fileno()).st_ino, flush=True); input()"
    child = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with child:
        assert child.stdout is not None
        kernel.connect(inode=int(child.stdout.readline()))
        watched = Watched(kernel)
        watched.look()
        child.kill()
    assert [each.rank for each in watched.reports()[0].connections] == [4]


def test_bytes_per_step_are_those_of_the_steps_between_two_looks(kernel: Kernel) -> None:
    watched = Watched(kernel)
    inode = kernel.connect()
    kernel.pass_data(inode, 99 * MB, 1.0)  # before the first step: parameters, perhaps
    watched.look()
    watched.steps = 10
    watched.look()
    assert watched.watch.step_metrics() == {}
    kernel.pass_data(inode, 30 * MB, 0.1)
    watched.look()
    watched.steps = 15
    kernel.pass_data(inode, 20 * MB, 0.1)
    watched.look()
    assert watched.watch.step_metrics() == {"tcp_sent_bytes@net1": 10 * MB, "tcp_retransmits@net1": 0.0}
    assert watched.watch.step_metrics() == {}


def test_rates_of_the_first_steps_are_reported_once_slowest_first(kernel: Kernel) -> None:
    watched = Watched(kernel)
    slow, fast, idle, small = (kernel.connect(far=f"10.1.0.{host}") for host in (3, 4, 5, 6))
    second = kernel.connect(far="10.1.0.4")
    for _ in range(4 * MIN_FIRST_SAMPLES):
        watched.look()
        kernel.pass_data(slow, 3 * MB, 0.1)
        kernel.pass_data(fast, 5 * MB, 0.1)
        kernel.pass_data(second, 5 * MB, 0.1)
        kernel.pass_data(small, 2 * MB, 0.1)
        counters = replace(kernel.sockets[small].counters, app_limited=True)
        kernel.sockets[small] = replace(kernel.sockets[small], counters=counters)
    (found,) = (each for each in watched.sent if isinstance(each, LinksMeasured))
    assert [(each.ends.local, each.bytes_s) for each in found.links] == [
        (str(kernel.sockets[slow].local), 30 * MB),
        (str(kernel.sockets[fast].local), 100 * MB),
    ]
    assert kernel.sockets[idle].counters.busy_us == 0


def test_slow_connection_is_reported_once_with_the_rates_of_others(kernel: Kernel) -> None:
    watched = Watched(kernel)
    slow, other = kernel.connect(), kernel.connect()
    for number in range(MIN_FIRST_SAMPLES + 2 * WINDOW + 1):
        watched.look()
        kernel.pass_data(slow, 10 * MB if number <= MIN_FIRST_SAMPLES else 2 * MB, 0.1)
        kernel.pass_data(other, 12 * MB, 0.1)
    (found,) = (each for each in watched.sent if isinstance(each, LinkSlowed))
    assert (found.node, found.ends.rank, found.ends.interface) == (1, 4, "net1")
    assert found.ends.local == str(kernel.sockets[slow].local)
    assert (found.before_bytes_s, found.now_bytes_s) == (100 * MB, 20 * MB)
    assert found.segments == 10 * WINDOW
    assert found.others_bytes_s == {str(kernel.sockets[other].remote): 120 * MB}


def test_connections_that_carry_data_over_another_interface_are_reported_again(kernel: Kernel) -> None:
    watched = Watched(kernel)
    wrong, fine = kernel.connect("eth0"), kernel.connect()
    watched.look(3)
    kernel.pass_data(fine, 99 * MB, 0.1)
    watched.look(3)
    assert len(watched.reports()) == 1
    for sent in (2 * MB, MB, 1000 * MB, 1000 * MB):
        kernel.pass_data(wrong, sent, 0.1)
        watched.look(3)
    assert [each.promised_bytes for each in watched.reports()] == [0, 99 * MB, 99 * MB]
    carried = [{each.interface: each.carried_bytes for each in one.connections} for one in watched.reports()]
    assert [each["eth0"] for each in carried] == [0, 2 * MB, 1003 * MB]


def test_port_of_a_server_that_has_ended_is_none_of_the_ranks(kernel: Kernel) -> None:
    watched = Watched(kernel)
    inode = kernel.connect()
    local = kernel.sockets[inode].local
    any_address = Endpoint(bytes(4), local.port)
    kernel.sockets[-1] = TcpSocket(local=any_address, remote=any_address, inode=1, listening=True)
    watched.look()
    del kernel.sockets[-1]
    watched.look(3)
    assert watched.sent == []


def test_slow_storage_takes_no_place_of_the_ranks(kernel: Kernel) -> None:
    watched = Watched(kernel)
    storage = [kernel.connect(far=f"52.216.1.{host}") for host in range(socket_watch.MAX_SLOW_LINKS + 2)]
    rank = kernel.connect()
    for number in range(MIN_FIRST_SAMPLES + 3 * WINDOW):
        watched.look()
        for inode in storage:
            kernel.pass_data(inode, 10 * MB if number <= MIN_FIRST_SAMPLES else 2 * MB, 0.1)
        kernel.pass_data(rank, 10 * MB if number <= MIN_FIRST_SAMPLES + WINDOW else 2 * MB, 0.1)
    slow = [each.ends.local for each in watched.sent if isinstance(each, LinkSlowed)]
    assert len(slow) == socket_watch.MAX_SLOW_LINKS + 1
    assert slow[-1] == str(kernel.sockets[rank].local)


def test_host_name_that_is_no_name_is_reported_all_the_same(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "a" * 64)
    watched = Watched(kernel)
    kernel.connect("eth0")
    watched.look()
    assert watched.reports()[0].host_name == f"{'a' * 64} (no address)"


@pytest.mark.parametrize(
    ("changed", "watched"),
    [
        ({}, True),
        ({"MASTER_ADDR": "node0.demo.svc"}, True),
        ({"GROUP_WORLD_SIZE": "1"}, False),
        ({"MASTER_ADDR": "127.0.0.1"}, False),
        ({"MASTER_ADDR": "localhost"}, False),
    ],
)
def test_only_runs_of_several_machines_are_watched(changed: dict[str, str], watched: bool) -> None:
    assert spans_nodes(order(**changed)) is watched


def test_kernel_that_does_not_tell_ends_the_watch(kernel: Kernel, caplog: pytest.LogCaptureFixture) -> None:
    def refuse() -> list[TcpSocket]:
        raise PermissionError(1, "Operation not permitted", "sock_diag")

    async def go() -> None:
        watch = SocketWatch(
            order(), node=0, clock=Clock(), pids=dict, environ={}, send=print, steps=int, sockets=refuse
        )
        async with asyncio.timeout(DEADLINE_S):
            await watch.run()

    asyncio.run(go())
    assert "are not watched: [Errno 1] Operation not permitted" in caplog.text


def test_look_that_fails_once_does_not_end_the_watch_and_a_fault_of_ours_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(socket_watch, "START_POLL_S", 0.01)
    answers = iter(([], OSError("ENOBUFS"), [], *[OSError("again")] * (MAX_FAILURES - 1), [], KeyError("ours")))

    def answer() -> list[TcpSocket]:
        if isinstance(found := next(answers), Exception):
            raise found
        return found

    async def go() -> None:
        watch = SocketWatch(
            order(), node=0, clock=Clock(), pids=dict, environ={}, send=print, steps=int, sockets=answer
        )
        watch.start()
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.wait(asyncio.all_tasks() - {asyncio.current_task()})

    asyncio.run(go())
    assert [each.getMessage() for each in caplog.records] == [
        "the sockets of the ranks are no longer watched: KeyError('ours')"
    ]


def test_watch_polls_until_it_is_stopped(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket_watch, "START_POLL_S", 0.01)
    sent = asyncio.Queue[SocketsObserved | LinksMeasured | LinkSlowed]()
    kernel.connect()

    async def go() -> None:
        watch = SocketWatch(
            order(),
            node=1,
            clock=Clock(),
            pids=lambda: {4: os.getpid()},
            environ={},
            send=sent.put_nowait,
            steps=int,
            sockets=lambda: [*kernel.sockets.values()],
            interfaces=lambda: INTERFACES,
        )
        watch.start()
        async with asyncio.timeout(DEADLINE_S):
            await sent.get()
        watch.stop()

    asyncio.run(go())
