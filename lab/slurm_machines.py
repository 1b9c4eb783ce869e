"""Where the daemons of a Slurm cluster run: as processes of this machine, or in namespaces for each node."""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from holdfast.launch.local.netns import NetnsNetwork

CONTROL = "controller"
"""Where the cluster's own daemons are."""
COMMANDS = ("sacct", "sacctmgr", "salloc", "sbatch", "scancel", "scontrol", "sinfo", "squeue", "srun")
_SYSTEM = (
    *("bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "libx32", "lost+found"),
    *("proc", "run", "sbin", "sys", "usr", "var"),
)
"""Folders of `/` that belong to an operating system; nodes have those of Debian 13, and all others of this machine."""

# Every path is at its place before the chroot, except the commands for users of the cluster: in a node, those are
# Slurm's own. The shell reaps what daemons leave behind, as process 1.
_ENTER = """\
set -e
root=$1 hosts=$2 commands=$3; shift 3
mount --bind "$root" "$root"
mount -o remount,bind,ro "$root"
while [ "$1" != -- ]; do mount --rbind "$1" "$root$1"; shift; done
shift
mount --bind "$hosts" "$root/etc/hosts"
mount --bind "$root/usr/bin" "$root$commands"
mount -t proc proc "$root/proc"
mount -t tmpfs tmpfs "$root/run"
exec chroot "$root" sh -c '"$@" & wait' sh "$@"
"""
_COMMAND = """\
#!/bin/sh
exec nsenter --target={pid} --mount --uts -- chroot {root} sh -c 'cd "$0" && exec "$@"' "$PWD" {program} "$@"
"""


class Machines(Protocol):
    """The machines of a cluster."""

    @property
    def address(self) -> str:
        """Where nodes reach this machine."""
        ...

    def host_of(self, node: str) -> str:
        """The host name of a node, or of CONTROL."""
        ...

    def address_of(self, node: str) -> str:
        """Where other nodes reach a node."""
        ...

    def spawn(self, node: str, *argv: str, environ: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
        """Start a daemon on a node, or on CONTROL."""
        ...

    def environ(self) -> Mapping[str, str]:
        """What commands find the cluster by, besides SLURM_CONF; complete once a daemon runs on CONTROL."""
        ...

    def remove(self) -> None:
        """Remove the network of the nodes, whose daemons have ended."""
        ...


class SharedMachine:
    """All nodes are this machine."""

    address = "127.0.0.1"

    def host_of(self, node: str) -> str:
        return socket.gethostname()

    def address_of(self, node: str) -> str:
        return self.address

    def spawn(self, node: str, *argv: str, environ: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
        return _popen(argv, environ, log)

    def environ(self) -> Mapping[str, str]:
        return {}

    def remove(self) -> None:
        pass


@dataclass
class ChrootMachines:
    """Each node has its own network, host name, processes and mounts, in a root file system of another Debian.

    A daemon that is killed takes everything that it has started on its node with it, as a power failure does.
    """

    root: Path
    folder: Path
    network: NetnsNetwork
    _entered: dict[str, int] = field(default_factory=dict[str, int])

    @classmethod
    def create(cls, root: Path, folder: Path, names: tuple[str, ...]) -> ChrootMachines:
        made = cls(root, folder, NetnsNetwork.create(secrets.token_hex(3)))
        try:
            (folder / "bin").mkdir()
            for path in (Path("/etc/hosts"), *made._shared()):
                _mount_point(path, root)
            for name in names:
                made.network.add_node(name)
            addresses = {CONTROL: made.address, **{name: made.address_of(name) for name in names}}
            lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in addresses.items())]
            made._hosts.write_text("".join(f"{line}\n" for line in lines))
        except BaseException:
            made.remove()
            raise
        return made

    @property
    def address(self) -> str:
        return self.network.address

    def host_of(self, node: str) -> str:
        return node

    def address_of(self, node: str) -> str:
        return self.network.nodes[node].address

    def spawn(self, node: str, *argv: str, environ: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
        """Start a daemon in new namespaces, whose processes end with it."""
        if node == CONTROL:
            own = ("unshare", "--mount", "--uts", "--propagation=private", "--")
        else:
            own = self.network.nodes[node].prefix
        script = f"hostname {node}\n{_ENTER}"
        inside = ("unshare", "--pid", "--fork", "--kill-child", "--", "sh", "-c", script, "sh")
        where = map(str, (self.root, self._hosts, self.folder / "bin", *self._shared(), "--"))
        started = _popen((*own, *inside, *where, *argv), environ, log)
        if node == CONTROL:
            self._write_commands(started.pid)
        return started

    def environ(self) -> Mapping[str, str]:
        return {"PATH": os.pathsep.join((str(self.folder / "bin"), os.environ["PATH"]))}

    def remove(self) -> None:
        self.network.remove()

    @property
    def _hosts(self) -> Path:
        return self.folder / "hosts"

    def _write_commands(self, pid: int) -> None:
        """Slurm's commands for this machine, which lacks that release of them."""
        for name in COMMANDS:
            path = self.folder / "bin" / name
            path.write_text(_COMMAND.format(pid=pid, root=shlex.quote(str(self.root)), program=f"/usr/bin/{name}"))
            path.chmod(0o755)

    def _shared(self) -> list[Path]:
        """What nodes have of this machine: all but its operating system, with the Python that runs this."""
        top = [Path("/", name) for name in sorted(os.listdir("/")) if name not in _SYSTEM]
        return [Path("/dev"), Path("/sys"), Path("/var/tmp"), *filter(Path.is_dir, top), *_python()]


def _python() -> Iterator[Path]:
    """The paths of this Python, if it is below /usr."""
    if not Path(sys.base_prefix).is_relative_to("/usr"):
        return
    if sys.base_prefix != "/usr":
        yield Path(sys.base_prefix)
        return
    link = Path(sys.executable)
    links = [link]
    while link.is_symlink():
        link = link.parent / link.readlink()
        links.append(link)
    yield from (each for each in links if each.is_relative_to("/usr"))
    yield Path(sysconfig.get_path("stdlib"))


def _mount_point(path: Path, root: Path) -> None:
    inside = root / path.relative_to("/")
    with contextlib.suppress(FileExistsError):
        if path.is_dir():
            inside.mkdir(parents=True)
        else:
            inside.touch()


def _popen(argv: tuple[str, ...], environ: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as output:
        return subprocess.Popen(
            argv,
            env={**os.environ, **environ},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
