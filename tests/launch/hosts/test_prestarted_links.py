"""Connections that begin before their run is known, by an ssh that stays here; test_host_runs.py has real ones."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.waiting import until

from holdfast.host.processes import children, identify
from holdfast.job.targets import SshSettings
from holdfast.launch import prestarted_supervisor
from holdfast.launch.hosts import prestarted_links, waiting_hosts_controller
from holdfast.launch.hosts.host_link import HostSettings, HostUnusable, connected
from holdfast.launch.hosts.prestarted_links import MAX_HOSTS, open_links, take
from holdfast.launch.waiting_controller import ExpectedTarget

SSH = """#!/bin/sh
for word; do last=$word; done
case "$*" in
*broken*) echo 'Permission denied (publickey).' >&2; exit 255 ;;
*stubborn*) trap 'kill $!; exit' TERM; sleep 600 & wait ;;
esac
exec sh -c "$last"
"""
PORT = 23456


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SshSettings]:
    """Runs the command for any host on this machine; `broken` refuses, and `stubborn` ends only when told to."""
    program = tmp_path / "bin" / "ssh"
    program.parent.mkdir()
    program.write_text(SSH)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    yield SshSettings(python=sys.executable, folder=str(tmp_path / "folder"))
    prestarted_links.end()


def test_connection_is_taken_once_with_the_module_that_it_was_asked_for(ssh: SshSettings, tmp_path: Path) -> None:
    async def line_of(host: str) -> bytes:
        begun = take(host, ssh, tmp_path, PORT)
        assert begun is not None
        settings = HostSettings(ssh=ssh, base=tmp_path, port=PORT)
        async with connected(host, settings, begun.remote_port, begun=begun) as (output, input_):
            assert begun.process.poll() is None
            input_.write(b"no setup\n")
            return await output.read()

    open_links(("alpha", "beta"), ssh, tmp_path, PORT)
    with pytest.raises(HostUnusable, match=r"Malformed|JSON"):  # host_process.py's own words
        asyncio.run(line_of("alpha"))
    assert take("alpha", ssh, tmp_path, PORT) is None
    assert prestarted_links._links.keys() == {"beta"}


def test_refusal_is_reported_by_the_link_that_takes_the_connection(ssh: SshSettings, tmp_path: Path) -> None:
    open_links(("broken",), ssh, tmp_path, PORT)
    begun = take("broken", ssh, tmp_path, PORT)
    assert begun is not None
    begun.process.wait()

    async def connect() -> None:
        settings = HostSettings(ssh=ssh, base=tmp_path, port=PORT)
        async with connected("broken", settings, begun.remote_port, begun=begun):
            raise AssertionError("connected")

    with pytest.raises(HostUnusable, match="does not accept this user's keys"):
        asyncio.run(connect())


def test_connection_with_another_command_is_not_taken_and_ends(ssh: SshSettings, tmp_path: Path) -> None:
    open_links(("alpha",), ssh, tmp_path, PORT)
    process = prestarted_links._links["alpha"].process
    assert take("alpha", ssh, tmp_path, PORT + 1) is None
    for other in ({"config": "other"}, {"folder": "/elsewhere"}, {"python": "python4"}):
        assert take("alpha", ssh.model_copy(update=other), tmp_path, PORT) is None
    assert take("gamma", ssh, tmp_path, PORT) is None
    assert process.poll() is None
    prestarted_links.end()
    assert process.poll() is not None


def test_ssh_that_does_not_end_with_its_input_ends_with_what_it_has_started(ssh: SshSettings, tmp_path: Path) -> None:
    open_links(("stubborn", "alpha"), ssh, tmp_path, PORT)
    process = prestarted_links._links["stubborn"].process
    until(lambda: children(process.pid))
    (started,) = map(identify, children(process.pid))
    prestarted_links.end()
    assert process.poll() is not None
    assert started is not None
    until(lambda: not started.alive)


@pytest.mark.parametrize(
    "text",
    [
        "kind: hosts\n",
        "kind: hosts\nhosts: node1\n",
        "kind: hosts\nhosts: [alpha, '-oProxyCommand=x']\n",
        "kind: hosts\nhosts: [1]\n",
        "kind: hosts\nhosts: [alpha]\nssh: {folder: data}\n",
        "kind: hosts\nhosts: [alpha]\nssh: {python: 3.11}\n",
        "kind: hosts\nhosts: [alpha]\nssh: [1]\n",
        "[",
        "",
    ],
)
def test_target_that_will_be_refused_connects_nothing_and_leaves_the_controller(
    ssh: SshSettings, tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "two.yaml"
    target.write_text(text)
    monkeypatch.setattr(sys, "argv", ["controller", str(target), str(tmp_path), str(PORT), "--wait", "3"])
    began = list[list[str]]()
    monkeypatch.setattr(waiting_hosts_controller, "CONTROLLER", "json")
    monkeypatch.setattr("json.main", lambda: began.append(sys.argv[1:]), raising=False)
    waiting_hosts_controller.main()
    assert began == [["--wait", "3"]]
    assert prestarted_links._links == {}


def test_hosts_are_not_connected_early_where_it_would_save_nothing(ssh: SshSettings, tmp_path: Path) -> None:
    open_links(("alpha",), ssh.model_copy(update={"shared_connection": True}), tmp_path, PORT)
    open_links(tuple(f"host{number}" for number in range(MAX_HOSTS + 1)), ssh, tmp_path, PORT)
    assert prestarted_links._links == {}


def test_connections_end_with_a_command_that_starts_no_run(ssh: SshSettings, tmp_path: Path) -> None:
    target = tmp_path / "two.yaml"
    target.write_text(
        f"kind: hosts\nhosts: [alpha, beta]\nssh: {{python: {ssh.python}, folder: {ssh.folder}}}\n", encoding="utf-8"
    )
    prestarted_supervisor._prestarted.process = None  # what another test of this process has left
    prestarted_supervisor.prestart(ExpectedTarget(target=target, base=tmp_path))
    supervisor = prestarted_supervisor._prestarted.process
    prestarted_supervisor._prestarted.process = None
    assert supervisor is not None
    assert supervisor.stdin is not None
    until(lambda: children(supervisor.pid))
    (controller,) = children(supervisor.pid)
    until(lambda: len(children(controller)) == 2)
    links = list(map(identify, children(controller)))
    supervisor.stdin.close()
    assert supervisor.wait(60) == 0
    until(lambda: not any(link is not None and link.alive for link in links))
