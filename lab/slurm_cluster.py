"""A real Slurm cluster on this machine: one controller and several slurmd, each of them a node."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.host.processes import all_pids, by_env, kill_all
from lab.ports import claim_block
from lab.slurm_accounting import SlurmAccounting
from lab.slurm_conf import SlurmNode, SlurmRelease, write_conf
from lab.slurm_machines import CONTROL, ChrootMachines, Machines, SharedMachine
from lab.slurm_root import slurm_root

START_TIMEOUT_S = 30.0


@dataclass
class SlurmCluster:
    """A running cluster; commands find it by `environ`."""

    folder: Path
    names: tuple[str, ...]
    _machines: Machines
    _accounting: SlurmAccounting | None
    _daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict[str, "subprocess.Popen[bytes]"])
    """By what they are: `slurmctld`, or the node of a slurmd."""

    @property
    def address(self) -> str:
        """Where nodes reach this machine."""
        return self._machines.address

    @property
    def has_accounting(self) -> bool:
        return self._accounting is not None

    @property
    def environ(self) -> Mapping[str, str]:
        """The variables by which Slurm's commands find the cluster."""
        return {**self._machines.environ(), "SLURM_CONF": str(self._conf)}

    @property
    def _conf(self) -> Path:
        return self.folder / "slurm.conf"

    def command(self, *argv: str) -> str:
        """The output of one of Slurm's commands."""
        environ = {**os.environ, **self.environ}
        # `env` looks a command up in the given PATH, which subprocess does not.
        return subprocess.run(("env", *argv), env=environ, capture_output=True, text=True, check=True).stdout

    def kill_processes(self, name: str) -> None:
        """Kill the processes of jobs on a node; its slurmd stays."""
        here = {"SLURMD_NODENAME": name, "SLURM_CONF": str(self._conf)}
        kill_all(lambda: by_env(all_pids(), **here), within_s=10.0)

    def kill_node(self, name: str) -> None:
        """End all processes of a node together, as a power failure does."""
        self._daemons[name].kill()
        self._daemons.pop(name).wait()
        self.kill_processes(name)

    def start_node(self, name: str) -> None:
        """Start a node's slurmd."""
        self._spawn(name, name, "slurmd", "-D", "-f", str(self._conf), "-N", name)

    def start(self) -> None:
        """Start all daemons, and wait until every node is idle."""
        munge = self.folder / "munge"
        munge.mkdir(mode=0o755)
        key = munge / "key"
        key.write_bytes(os.urandom(64))
        key.chmod(0o400)
        files = {name: munge / name for name in ("socket", "pid-file", "log-file", "seed-file")}
        options = [f"--{name}={path}" for name, path in files.items()]
        self._spawn("munged", CONTROL, "munged", "--foreground", f"--key-file={key}", "--force", *options)
        self._wait_for(files["socket"].exists, "munged")
        if self._accounting is not None:
            self._accounting.start(self._spawn_accounting, self._wait_for)
        (self.folder / "state").mkdir()
        self._spawn("slurmctld", CONTROL, "slurmctld", "-D", "-f", str(self._conf))
        for name in self.names:
            (self.folder / "spool" / name).mkdir(parents=True)
            self.start_node(name)
        self.wait_until_idle()

    def wait_until_idle(self) -> None:
        """Wait until no node has a job, nor remains of one."""
        self._wait_for(self._is_idle, "slurmd")

    def stop(self) -> None:
        """End all daemons and jobs."""
        for daemon in reversed(self._daemons.values()):
            daemon.kill()
        kill_all(lambda: by_env(all_pids(), SLURM_CONF=str(self._conf)), within_s=10.0)
        for daemon in self._daemons.values():
            daemon.wait()

    def _spawn(self, what: str, node: str, *argv: str, **environ: str) -> None:
        log = self.folder / "daemons.log"
        given = {"SLURM_CONF": str(self._conf), **environ}
        self._daemons[what] = self._machines.spawn(node, *argv, environ=given, log=log)

    def _spawn_accounting(self, *argv: str, **environ: str) -> None:
        self._spawn(argv[0], CONTROL, *argv, **environ)

    def _is_idle(self) -> bool:
        with contextlib.suppress(subprocess.CalledProcessError):
            return self.command("sinfo", "-h", "-N", "-p", "main", "-o", "%T").split() == ["idle"] * len(self.names)
        return False

    def _wait_for(self, ready: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not ready():
            if time.monotonic() > deadline:
                raise RuntimeError(f"{what} did not start: {(self.folder / 'daemons.log').read_text()[-2000:]}")
            time.sleep(0.1)


@contextlib.contextmanager
def slurm_cluster(folder: Path, *names: str, release: SlurmRelease = SlurmRelease.INSTALLED) -> Generator[SlurmCluster]:
    """A cluster of nodes with these names, whose files are in a folder; needs root.

    `SlurmRelease.INSTALLED` needs Slurm and munge; `slurm_impossible_reason` says what another needs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    claim, base = claim_block(2 + len(names))
    munge = folder / "munge" / "socket"
    machines: Machines = SharedMachine()
    accounting = None
    if release.in_chroot:
        root = slurm_root(release) / "root"
        machines = ChrootMachines.create(root, folder, names)
        accounting = SlurmAccounting(folder, root, base + 1, munge)
    cluster = SlurmCluster(folder, names, machines, accounting)
    try:
        write_conf(
            folder,
            release,
            tuple(_node(machines, name, base + 2 + number) for number, name in enumerate(names)),
            control=machines.host_of(CONTROL),
            address=machines.address,
            port=base,
            dbd_port=base + 1,
            munge=munge,
        )
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        machines.remove()
        os.close(claim)


def _node(machines: Machines, name: str, port: int) -> SlurmNode:
    return SlurmNode(name=name, host=machines.host_of(name), address=machines.address_of(name), port=port)
