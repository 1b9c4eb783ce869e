"""Runs that reserve the same hosts; tests/runs/test_host_runs.py has real ones."""

from __future__ import annotations

from holdfast.launch.hosts.host_messages import HostReady, ReserveHost, ToHost
from holdfast.launch.hosts.host_reservation import HostReservation


class Host:
    """Is kept for one run at a time, as hosts are."""

    def __init__(self) -> None:
        self.holder = ""


class HostLink:
    """A run's connection to a host, which answers once the test lets it."""

    def __init__(self, run: str, host: Host) -> None:
        self._run, self._host = run, host
        self.ready: HostReady | None = HostReady(hostname="", address="", cpus=1, gpus=0, nodes=())
        self.problem = ""
        self.answers = list[bool]()

    def send(self, message: ToHost) -> None:
        if isinstance(message, ReserveHost):
            self._host.holder = self._host.holder or self._run
            self.answers.append(self._host.holder == self._run)
        elif self._host.holder == self._run:
            self._host.holder = ""

    def close(self) -> None:
        self.ready = None


class Run:
    """A run that wants two nodes."""

    def __init__(self, name: str, hosts: dict[str, Host]) -> None:
        self.links = {host: HostLink(name, each) for host, each in hosts.items()}
        self.reservation = HostReservation(self.links)

    def request(self, *free: str) -> bool:
        return self.reservation.request(free, least=2, most=2)

    def receive(self) -> None:
        """Take the answers that have come."""
        for host, link in self.links.items():
            while link.answers:
                self.reservation.answer(host, kept=link.answers.pop())


def holders(hosts: dict[str, Host]) -> str:
    return " ".join(f"{name}:{host.holder}" for name, host in hosts.items())


def test_run_gets_its_hosts_once_all_have_answered_and_asks_no_more_than_it_needs() -> None:
    hosts = {name: Host() for name in "abc"}
    run = Run("first", hosts)
    assert run.request("a", "b", "c")
    run.links["a"].answers.clear()
    assert run.reservation.answer("a", kept=True)
    assert run.reservation.kept() == []
    assert run.request("c"), "both are still asked"
    run.receive()
    assert run.reservation.kept() == ["a", "b"]
    assert holders(hosts) == "a:first b:first c:"
    assert not run.reservation.release(used=("a",))
    assert holders(hosts) == "a:first b: c:"


def test_run_that_gets_some_of_its_hosts_keeps_none_and_leaves_them_to_the_other() -> None:
    hosts = {name: Host() for name in "ab"}
    first, second = Run("first", hosts), Run("second", hosts)
    hosts["b"].holder = "second"
    assert first.request("a", "b")
    first.receive()
    assert not first.request(), "b was refused, and no other is free"
    assert first.reservation.release(), "one was refused, so it is worth another try"
    assert holders(hosts) == "a: b:second"
    assert second.request("a", "b")
    second.receive()
    assert second.reservation.kept() == ["a", "b"]


def test_refused_host_is_replaced_by_another_that_is_free() -> None:
    hosts = {name: Host() for name in "abc"}
    run = Run("first", hosts)
    hosts["a"].holder = "second"
    assert run.request("a", "b")
    run.receive()
    assert run.request("c")
    run.receive()
    assert run.reservation.kept() == ["b", "c"]


def test_too_few_hosts_are_not_asked() -> None:
    hosts = {name: Host() for name in "ab"}
    run = Run("first", hosts)
    assert not run.request("a")
    assert not run.reservation.release(), "none was refused"
    assert holders(hosts) == "a: b:"


def test_answer_after_the_run_has_given_up_is_undone() -> None:
    hosts = {name: Host() for name in "ab"}
    run = Run("first", hosts)
    assert run.request("a", "b")
    run.reservation.release()
    assert holders(hosts) == "a:first b:first", "they have not answered"
    assert not run.reservation.answer("a", kept=True)
    assert not run.reservation.answer("b", kept=False)
    assert holders(hosts) == "a: b:first"


def test_host_that_is_disconnected_no_longer_counts() -> None:
    run = Run("first", {name: Host() for name in "ab"})
    assert run.request("a", "b")
    run.receive()
    run.links["a"].close()
    assert not run.request()
