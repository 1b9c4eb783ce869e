"""Hosts with a real sshd on this machine: each has its own network, host name, address, host key and /var/tmp."""

from __future__ import annotations

import contextlib
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.launch.local.netns import NetnsNetwork, NetnsNode

SSHD = "/usr/sbin/sshd"
START_TIMEOUT_S = 20.0

_SSHD_CONFIG = """\
ListenAddress {address}:22
HostKey {folder}/host_key
PidFile none
AuthorizedKeysFile {keys}
StrictModes no
UsePAM no
PasswordAuthentication no
PermitRootLogin yes
PrintMotd no
LogLevel ERROR
"""

_SSH_CONFIG = """\
Host {name}
  HostName {address}
  User root
  IdentityFile {key}
  IdentitiesOnly yes
  UserKnownHostsFile {known}
  GlobalKnownHostsFile /dev/null
  StrictHostKeyChecking yes
"""


@dataclass
class SshHosts:
    """Some hosts, by name; `config` is a configuration file for ssh that reaches them."""

    folder: Path
    network: NetnsNetwork
    _daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict[str, "subprocess.Popen[bytes]"])

    @property
    def config(self) -> Path:
        return self.folder / "ssh_config"

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._daemons)

    def node(self, name: str) -> NetnsNode:
        """The network of a host."""
        return self.network.nodes[name]

    def add(self, name: str) -> None:
        """Create a host and start its sshd."""
        node = self.network.add_node(name)
        own = self.folder / name
        own.mkdir()
        _make_key(own / "host_key")
        keys = self.folder / "client_key.pub"
        (own / "sshd_config").write_text(_SSHD_CONFIG.format(address=node.address, folder=own, keys=keys))
        known = self.folder / "known_hosts"
        public = (own / "host_key.pub").read_text()
        with known.open("a") as file:
            file.write(f"{node.address} {public}")
        with self.config.open("a") as file:
            text = _SSH_CONFIG.format(name=name, address=node.address, key=self.folder / "client_key", known=known)
            file.write(text)
        self.start(name)

    def start(self, name: str) -> None:
        """Start a host's sshd, as after a boot: its /var/tmp is a new, empty one."""
        node = self.node(name)
        script = f"mount -t tmpfs none /var/tmp && exec {SSHD} -D -e -f {self.folder / name / 'sshd_config'}"
        with (self.folder / name / "sshd.log").open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                [*node.prefix, "unshare", "--mount", "--propagation", "private", "sh", "-c", script],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection((node.address, 22), 1.0) as connection:
                if connection.recv(3) == b"SSH":
                    return
            if time.monotonic() > deadline or self._daemons[name].poll() is not None:
                raise RuntimeError((self.folder / name / "sshd.log").read_text())
            time.sleep(0.02)

    def kill(self, name: str) -> None:
        """End all processes of a host together, as a power failure does."""
        self.network.kill(name)
        self._daemons[name].wait()


@contextlib.contextmanager
def ssh_hosts(folder: Path, *names: str) -> Generator[SshHosts]:
    """Hosts of these names, whose files are in a folder; needs root."""
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    _make_key(folder / "client_key")
    (folder / "ssh_config").touch()
    network = NetnsNetwork.create(secrets.token_hex(3))
    hosts = SshHosts(folder, network)
    try:
        for name in names:
            hosts.add(name)
        yield hosts
    finally:
        for name, daemon in hosts._daemons.items():
            with contextlib.suppress(Exception):
                network.kill(name)
            daemon.send_signal(signal.SIGKILL)
            daemon.wait()
        network.remove()


def _make_key(path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)
