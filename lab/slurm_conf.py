"""The configuration of a Slurm cluster of the lab, for each release."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


class SlurmRelease(StrEnum):
    """The Slurm that a cluster runs."""

    INSTALLED = "installed"
    """What this machine has, 22.05 on Debian 12; all nodes are this machine, and nothing is accounted."""
    V24_11 = "24.11"
    """Debian 13's, in a chroot, each node with its own network and processes; jobs are accounted."""
    V26_05 = "26.05"
    """The same with the packages of Debian's next release, which change."""

    @property
    def in_chroot(self) -> bool:
        """Whether nodes have a separate root file system (slurm_root.py)."""
        return self is not SlurmRelease.INSTALLED


_COMMON = """\
ClusterName=lab
SlurmctldHost={control}({address})
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={munge},cred_expire=5
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
MpiDefault=none
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=10
KillWait=5
MinJobAge=60
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
TopologyPlugin=topology/tree
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP GraceTime=30
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2
"""
_OWN_INSTALLED = "SwitchType=switch/none\n"
_OWN_IN_CHROOT = """\
CommunicationParameters=NoCtldInAddrAny
GresTypes=gpu
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={dbd_port}
AccountingStoragePass={munge}
AccountingStorageTRES=gres/gpu
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=5
"""
_NODE = (
    "NodeName={name} NodeHostname={host} NodeAddr={address} Port={port} CPUs=2 RealMemory=1000{gres} State=UNKNOWN\n"
)


@dataclass(frozen=True, kw_only=True)
class SlurmNode:
    """A node of a cluster."""

    name: str
    host: str
    """Its host name."""
    address: str
    port: int


def write_conf(
    folder: Path,
    release: SlurmRelease,
    nodes: tuple[SlurmNode, ...],
    *,
    control: str,
    address: str,
    port: int,
    dbd_port: int,
    munge: Path,
) -> None:
    """Write a cluster's configuration; every other node is below another switch."""
    text = _COMMON + (_OWN_IN_CHROOT if release.in_chroot else _OWN_INSTALLED)
    values = {"control": control, "address": address, "port": port, "dbd_port": dbd_port, "munge": munge}
    gres = " Gres=gpu:1" if release.in_chroot else ""
    lines = [
        _NODE.format(name=node.name, host=node.host, address=node.address, port=node.port, gres=gres) for node in nodes
    ]
    (folder / "slurm.conf").write_text(text.format(folder=folder, **values) + "".join(lines))
    names = [node.name for node in nodes]
    (folder / "topology.conf").write_text(
        f"SwitchName=leaf0 Nodes={','.join(names[::2])}\nSwitchName=leaf1 Nodes={','.join(names[1::2])}\n"
        "SwitchName=spine Switches=leaf[0-1]\n"
    )
    if release.in_chroot:
        (folder / "cgroup.conf").write_text("CgroupPlugin=disabled\n")
        device = folder / "gpu0"
        os.mknod(device, 0o600 | 0o020000, os.makedev(1, 3))  # Slurm counts devices only: this is another /dev/null
        (folder / "gres.conf").write_text(f"Name=gpu File={device}\n")
