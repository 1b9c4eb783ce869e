"""A real Slurm cluster on this machine: one controller, and several slurmd, each of them a node."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.host.processes import all_pids, by_env, kill_all

START_TIMEOUT_S = 30.0
_CONF = """\
ClusterName=lab
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
MpiDefault=none
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=10
KillWait=5
MinJobAge=60
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0
NodeName={nodes} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports} CPUs=2 RealMemory=1000 State=UNKNOWN
TopologyPlugin=topology/tree
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@dataclass
class SlurmCluster:
    """A running cluster; commands find it by SLURM_CONF."""

    folder: Path
    names: tuple[str, ...]
    _daemons: list[subprocess.Popen[bytes]] = field(default_factory=list["subprocess.Popen[bytes]"])

    @property
    def conf(self) -> Path:
        return self.folder / "slurm.conf"

    def command(self, *argv: str) -> str:
        """The output of one of Slurm's commands."""
        env = {**os.environ, "SLURM_CONF": str(self.conf)}
        return subprocess.run(argv, env=env, capture_output=True, text=True, check=True).stdout

    def kill_processes(self, name: str) -> None:
        """Kill what runs on a node of an allocation, as when the node fails; its slurmd stays."""
        here = {"SLURMD_NODENAME": name, "SLURM_CONF": str(self.conf)}
        kill_all(lambda: by_env(all_pids(), **here), within_s=10.0)

    def _spawn(self, *argv: str) -> None:
        env = {**os.environ, "SLURM_CONF": str(self.conf)}
        with (self.folder / "daemons.log").open("ab") as log:
            self._daemons.append(
                subprocess.Popen(
                    argv, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
                )
            )

    def start(self) -> None:
        """Start all daemons, and wait until every node is idle."""
        munge = self.folder / "munge"
        munge.mkdir(mode=0o755)
        key = munge / "key"
        key.write_bytes(os.urandom(64))
        key.chmod(0o400)
        files = {name: munge / name for name in ("socket", "pid-file", "log-file", "seed-file")}
        options = [f"--{name}={path}" for name, path in files.items()]
        self._spawn("munged", "--foreground", f"--key-file={key}", "--num-threads=2", "--force", *options)
        self._await(files["socket"].exists, "munged")
        (self.folder / "state").mkdir()
        self._spawn("slurmctld", "-D", "-f", str(self.conf))
        for name in self.names:
            (self.folder / "spool" / name).mkdir(parents=True)
            self._spawn("slurmd", "-D", "-f", str(self.conf), "-N", name)
        self.wait_until_idle()

    def wait_until_idle(self) -> None:
        """Wait until no node has a job, nor remains of one."""
        self._await(self._is_idle, "slurmd")

    def _is_idle(self) -> bool:
        with contextlib.suppress(subprocess.CalledProcessError):
            return self.command("sinfo", "-h", "-N", "-o", "%T").split() == ["idle"] * len(self.names)
        return False

    def _await(self, ready: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not ready():
            if time.monotonic() > deadline:
                raise RuntimeError(f"{what} did not start: {(self.folder / 'daemons.log').read_text()[-2000:]}")
            time.sleep(0.1)

    def stop(self) -> None:
        """End all daemons and jobs."""
        kill_all(lambda: by_env(all_pids(), SLURM_CONF=str(self.conf)), within_s=10.0)
        for daemon in reversed(self._daemons):
            daemon.wait()


@contextlib.contextmanager
def slurm_cluster(folder: Path, *names: str) -> Generator[SlurmCluster]:
    """A cluster of nodes with these names, whose files are in a folder; needs root, Slurm and munge.

    Every other node is below another switch.
    """
    folder.mkdir(parents=True, exist_ok=True)
    base = random.randrange(20000, 32000, 64)  # below the ports that the kernel gives to programs
    ports = range(base, base + len(names) + 1)
    cluster = SlurmCluster(folder, names)
    text = _CONF.format(
        host=socket.gethostname(),
        port=ports[0],
        user="root",
        folder=folder,
        nodes=",".join(names),
        ports=",".join(map(str, ports[1:])),
    )
    cluster.conf.write_text(text)
    near, far = names[::2], names[1::2]
    cluster.conf.with_name("topology.conf").write_text(
        f"SwitchName=leaf0 Nodes={','.join(near)}\nSwitchName=leaf1 Nodes={','.join(far)}\n"
        "SwitchName=spine Switches=leaf[0-1]\n"
    )
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
