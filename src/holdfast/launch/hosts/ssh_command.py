"""The command lines of OpenSSH, what the program on a host reads first, and what failures of ssh mean."""

from __future__ import annotations

import base64
import getpass
import json
import re
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

HOST_PROCESS = "holdfast.launch.hosts.host_process"
PORTS = range(20000, 32768)
"""Ports on a host's loopback of which one is forwarded: below those that the kernel gives to programs."""
CONNECT_TIMEOUT_S = 10
ALIVE_INTERVAL_S, ALIVE_COUNT = 3, 3
"""A connection whose other end does not answer ends after their product."""
_OWN_CONNECTION = {"ControlPath": "none"}
"""One for each host and run, which ends with it."""
_OPTIONS = {
    "BatchMode": "yes",  # there is no terminal for a question
    "ConnectTimeout": str(CONNECT_TIMEOUT_S),
    "ServerAliveInterval": str(ALIVE_INTERVAL_S),
    "ServerAliveCountMax": str(ALIVE_COUNT),
    "ExitOnForwardFailure": "yes",
    "ControlMaster": "no",
    "ForwardAgent": "no",
    "ForwardX11": "no",
    "ClearAllForwardings": "no",
    "RequestTTY": "no",
}
_REASONS: tuple[tuple[str, str, str], ...] = (
    (
        "Host key verification failed",
        "its host key is unknown or has changed",
        "Compare its fingerprint, then connect once by hand: `ssh {host}`.",
    ),
    (
        "Permission denied",
        "it does not accept this user's keys",
        "Add the key to the host's authorized_keys, or load it: `ssh-add`.",
    ),
    (
        "Could not resolve hostname",
        "its name is unknown",
        "Correct `hosts` in the target, or name it in the configuration of ssh.",
    ),
    ("remote port forwarding failed", "it forwards no port to this machine", "Set `AllowTcpForwarding yes` in sshd."),
    (
        "not found",
        "there is no Python of that name",
        "Set `ssh.python` in the target to the Python of the job's environment.",
    ),
    (
        "No such file or directory",
        "there is no Python of that name",
        "Set `ssh.python` in the target to the Python of the job's environment.",
    ),
    ("Connection refused", "nothing listens on its ssh port", "Start sshd there, or correct the port."),
    ("timed out", "it does not answer", "Check that it runs and that the network reaches it: `ssh {host}`."),
    ("No route to host", "the network does not reach it", "Check that it runs and that the network reaches it."),
)
"""What a line of ssh's output contains, what it means, and what to do."""


class SshOptions(Protocol):
    """What the commands take from the `ssh` of a target (job/targets.py)."""

    @property
    def python(self) -> str: ...
    @property
    def folder(self) -> str | None: ...
    @property
    def config(self) -> str | None: ...
    @property
    def shared_connection(self) -> bool: ...


def ssh_argv(host: str, ssh: SshOptions, base: Path, *, forward: tuple[int, int] | None = None) -> list[str]:
    """The command that starts host_boot.py on a host; `forward` is a port there and the one here it leads to."""
    chosen = _OPTIONS if ssh.shared_connection else _OPTIONS | _OWN_CONNECTION
    options = [word for name, value in chosen.items() for word in ("-o", f"{name}={value}")]
    ports = _forwarding(forward) if forward else []
    return ["ssh", *_config(ssh, base), *options, *ports, "--", host, _remote_command(ssh.python)]


def start_ssh(argv: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start ssh with pipes for its standard streams; raises OSError if that is impossible."""
    return subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0)


def tunnel_argv(host: str, ssh: SshOptions, base: Path, there: int, here: int) -> list[str]:
    """The command by which this machine reaches a port of a host's loopback, and the host one of this machine's.

    Each has the same number on both.
    """
    from holdfast.launch.monarch.mesh_tunnel import REMOTE_COMMAND  # only Monarch needs its imports

    options = [word for name, value in (_OPTIONS | _OWN_CONNECTION).items() for word in ("-o", f"{name}={value}")]
    ports = ["-L", f"127.0.0.1:{there}:127.0.0.1:{there}", *_forwarding((here, here))]
    return ["ssh", *_config(ssh, base), *options, *ports, "--", host, REMOTE_COMMAND]


def unforward_argv(host: str, ssh: SshOptions, base: Path, forward: tuple[int, int]) -> list[str]:
    """The command that ends a forwarding on a shared connection, which would keep it."""
    return ["ssh", *_config(ssh, base), "-O", "cancel", *_forwarding(forward), "--", host]


def _config(ssh: SshOptions, base: Path) -> list[str]:
    return ["-F", str(base / ssh.config)] if ssh.config else []


def _forwarding(forward: tuple[int, int]) -> list[str]:
    return ["-R", f"127.0.0.1:{forward[0]}:127.0.0.1:{forward[1]}"]


def _remote_command(python: str) -> str:
    """A single line, so that any shell of a user passes it on."""
    source = base64.b64encode(Path(__file__).with_name("host_boot.py").read_bytes()).decode()
    return f"exec {shlex.quote(python)} -uc \"import base64;exec(base64.b64decode('{source}'))\""


def boot_request(ssh: SshOptions, module: str) -> bytes:
    """What host_boot.py reads first: the module that it is to become, and the packages that this needs."""
    from holdfast.launch.hosts import host_packages  # takes longer than to start ssh

    wanted = {
        "folder": host_folder(ssh),
        "packages": dict(host_packages.packages()),
        "own": host_packages.OWN,
        "run": [module],
    }
    return json.dumps(wanted).encode() + b"\n"


def host_folder(ssh: SshOptions) -> str:
    """The folder for holdfast's files on every host."""
    return ssh.folder or default_folder()


def default_folder() -> str:
    """The folder for holdfast's files on another machine: the same for all machines of a run."""
    return f"/var/tmp/holdfast-{re.sub(r'[^A-Za-z0-9_.-]', '_', getpass.getuser())}"


def explain_ssh(host: str, output: str) -> tuple[str, str]:
    """What failed, by ssh's output, and what to do about it."""
    for part, what, remedy in _REASONS:
        if part in output:
            return what, remedy.format(host=host)
    last = next((line for line in reversed(output.splitlines()) if line.strip()), "ssh said nothing")
    return last.strip()[:300], f"Connect by hand to see more: `ssh {host}`."
