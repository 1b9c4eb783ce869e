"""Connections to hosts that begin before their run is known: ssh and Python there take as long as the imports here.

A controller that waits for its run opens them (waiting_hosts_controller.py), and its links take them over
(host_link.py). A connection that no link takes is ended.
"""

from __future__ import annotations

import contextlib
import random
import subprocess
import time
from pathlib import Path

from msgspec import Struct

from holdfast.launch.hosts.ssh_command import HOST_PROCESS, PORTS, SshOptions, boot_request, ssh_argv, start_ssh

MAX_HOSTS = 32
"""A target of more hosts is not connected early: that takes longer than the imports anyway."""
END_TIMEOUT_S = 1.0
"""Time for all of ssh's processes together to end, with the commands by which they connect (`ProxyCommand`)."""


class PrestartedLink(Struct, frozen=True):
    """A connection that has begun, the port there that leads to the controller, and what was sent."""

    process: subprocess.Popen[bytes]
    remote_port: int
    request: bytes


_links: dict[str, PrestartedLink] = {}
"""By host."""


def open_links(hosts: tuple[str, ...], ssh: SshOptions, base: Path, port: int) -> None:
    """Begin to connect hosts, for a controller that will listen at this port of its loopback."""
    if ssh.shared_connection or len(hosts) > MAX_HOSTS:
        return
    begun: dict[str, tuple[subprocess.Popen[bytes], int]] = {}
    for host in hosts:
        remote_port = random.choice(PORTS)
        with contextlib.suppress(OSError):  # the link will report it
            begun[host] = start_ssh(ssh_argv(host, ssh, base, forward=(remote_port, port))), remote_port
    request = boot_request(ssh, HOST_PROCESS) if begun else b""  # takes longer than to start ssh
    for host, (process, remote_port) in begun.items():
        _links[host] = PrestartedLink(process, remote_port, request)
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.write(request)


def take(host: str, ssh: SshOptions, base: Path, port: int) -> PrestartedLink | None:
    """The connection to a host, if it began with the command and the request that these settings give."""
    found = _links.get(host)
    if found is None or found.request != boot_request(ssh, HOST_PROCESS):
        return None
    if found.process.args != ssh_argv(host, ssh, base, forward=(found.remote_port, port)):
        return None
    return _links.pop(host)


def end() -> None:
    """End the connections that nothing has taken."""
    ended = [link.process for link in _links.values()]
    _links.clear()
    for process in ended:
        process.terminate()  # ssh then ends its ProxyCommand too
        for pipe in (process.stdin, process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()
    deadline = time.monotonic() + END_TIMEOUT_S
    for process in ended:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
