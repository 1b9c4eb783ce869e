"""Connections to hosts that begin before their run is known: ssh and Python there take as long as the imports here.

A controller that waits for its run opens them (hosts_controller.py), and its links take them over
(host_link.py). What no link takes ends.
"""

from __future__ import annotations

import contextlib
import random
import subprocess
from dataclasses import dataclass
from pathlib import Path

from holdfast.launch.hosts.ssh_command import HOST_PROCESS, PORTS, SshOptions, boot_request, ssh_argv, start_ssh

MAX_HOSTS = 32
"""Most hosts that are connected early: more take longer than the imports anyway."""


@dataclass(frozen=True)
class PrestartedLink:
    """A connection that has begun, and the port there that leads to the controller."""

    process: subprocess.Popen[bytes]
    remote_port: int


_links: dict[str, PrestartedLink] = {}
"""By host."""


def open_links(hosts: tuple[str, ...], ssh: SshOptions, base: Path, port: int) -> None:
    """Begin to connect hosts, for a controller that will listen at this port of its loopback."""
    if ssh.shared_connection or len(hosts) > MAX_HOSTS:
        return
    for host in hosts:
        remote_port = random.choice(PORTS)
        with contextlib.suppress(OSError):  # the link will report it
            process = start_ssh(ssh_argv(host, ssh, base, forward=(remote_port, port)))
            _links[host] = PrestartedLink(process, remote_port)
    request = boot_request(ssh, HOST_PROCESS) if _links else b""
    for link in _links.values():
        assert link.process.stdin is not None
        with contextlib.suppress(OSError):
            link.process.stdin.write(request)


def take(host: str, ssh: SshOptions, base: Path, port: int) -> PrestartedLink | None:
    """The connection to a host that was begun with the command that these give; None if there is none."""
    found = _links.get(host)
    if found is None or found.process.args != ssh_argv(host, ssh, base, forward=(found.remote_port, port)):
        return None
    return _links.pop(host)


def end() -> None:
    """End the connections that nothing has taken."""
    while _links:
        _, link = _links.popitem()
        link.process.kill()
        link.process.communicate()
