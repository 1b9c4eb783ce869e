"""Owns the classes of failure that a diagnosis can name, and who can mend each; refuses to own how one is recognised.

The values are the labels under which incidents are collected and scored: more may come, none is ever renamed.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from holdfast.findings import Fault


class Class(StrEnum):
    """What kind of thing went wrong."""

    ACS_IOMMU = "acs/iommu"
    COLLECTIVE_MISMATCH = "collective mismatch (desync)"
    DRIVER = "driver/peermem"
    FIREWALL = "firewall/networkpolicy"
    GDR_MISSING = "gdr-missing"
    GPU_XID = "gpu-xid"
    HANG_UNKNOWN = "hang-unknown"
    MEMLOCK = "memlock/ulimit"
    NAN_DATA = "nan/data"
    NETWORK_LOSS = "mtu/pfc/roce-loss"
    OOM_GPU = "oom-gpu"
    OOM_HOST = "oom-host"
    RANK_COUNT = "rank-count mismatch"
    RDMA_DEVICE_MISSING = "rdma-device-missing"
    RENDEZVOUS = "rendezvous/dns"
    SHM_TOO_SMALL = "shm-too-small"
    STRAGGLER = "straggler"
    TCP_FALLBACK = "tcp-fallback"
    VERSION_MISMATCH = "version-mismatch"
    WRONG_INTERFACE = "wrong-interface"
    OTHER = "other"
    # What the collections file under `other`, and a person acts on in different ways.
    PROGRAM_ERROR = "program-error"
    USAGE = "usage-error"
    UNREACHABLE = "data/hub-unreachable"
    STORAGE = "storage"
    PREEMPTED = "preempted"
    KILLED = "killed"
    NODE_LOST = "node-lost"
    NOT_STARTED = "not-started"
    # No class, but an answer: what was read does not decide.
    UNKNOWN = "unknown"

    @property
    def means(self) -> str:
        """What it is, in words for a headline."""
        return MEANINGS[self].words

    @property
    def fault(self) -> Fault:
        """Who can mend it."""
        return MEANINGS[self].fault

    @property
    def label(self) -> Class:
        """The class under which collected incidents file it."""
        return Class.OTHER if self in _FILED_AS_OTHER else self


_FILED_AS_OTHER = frozenset(
    {
        *(Class.PROGRAM_ERROR, Class.USAGE, Class.UNREACHABLE, Class.STORAGE),
        *(Class.PREEMPTED, Class.KILLED, Class.NODE_LOST, Class.NOT_STARTED),
    }
)


@dataclass(frozen=True)
class Meaning:
    """A class in words, and who can mend it."""

    words: str
    fault: Fault


MEANINGS: dict[Class, Meaning] = {
    Class.ACS_IOMMU: Meaning("PCIe access control (ACS) or the IOMMU stands between GPU and GPU or NIC", Fault.CLUSTER),
    Class.COLLECTIVE_MISMATCH: Meaning("ranks did not make the same collective calls", Fault.USER),
    Class.DRIVER: Meaning("the GPU driver, Fabric Manager, IMEX or nvidia_peermem is not as it must be", Fault.CLUSTER),
    Class.FIREWALL: Meaning("something between the nodes closes or drops connections", Fault.CLUSTER),
    Class.GDR_MISSING: Meaning("the network cannot reach GPU memory directly (no GPUDirect RDMA)", Fault.CLUSTER),
    Class.GPU_XID: Meaning("a GPU or its links failed", Fault.CLUSTER),
    Class.HANG_UNKNOWN: Meaning("ranks stopped making progress", Fault.USER),
    Class.MEMLOCK: Meaning("a limit of the process is too low: locked memory or open files", Fault.CLUSTER),
    Class.NAN_DATA: Meaning("the data or the numbers are bad: NaN, or an index out of range", Fault.USER),
    Class.NETWORK_LOSS: Meaning("the RDMA network loses or refuses traffic: MTU, GID, PFC, link", Fault.CLUSTER),
    Class.OOM_GPU: Meaning("GPU memory ran out", Fault.USER),
    Class.OOM_HOST: Meaning("host memory ran out", Fault.USER),
    Class.RANK_COUNT: Meaning("the ranks do not agree on how many they are, or who is who", Fault.USER),
    Class.RDMA_DEVICE_MISSING: Meaning("no RDMA device, or fewer than there should be", Fault.CLUSTER),
    Class.RENDEZVOUS: Meaning("the ranks did not find one another", Fault.CLUSTER),
    Class.SHM_TOO_SMALL: Meaning("/dev/shm is too small", Fault.USER),
    Class.STRAGGLER: Meaning("one rank was far behind the others", Fault.USER),
    Class.TCP_FALLBACK: Meaning("the ranks speak over plain TCP instead of the fast network", Fault.CLUSTER),
    Class.VERSION_MISMATCH: Meaning("versions do not fit together", Fault.USER),
    Class.WRONG_INTERFACE: Meaning("the wrong network interface was chosen", Fault.USER),
    Class.OTHER: Meaning("a known fault with no class of its own", Fault.CLUSTER),
    Class.PROGRAM_ERROR: Meaning("the program itself failed", Fault.USER),
    Class.USAGE: Meaning("the program or its launcher refused its command line or configuration", Fault.USER),
    Class.UNREACHABLE: Meaning("data, a model hub or another service could not be reached", Fault.CLUSTER),
    Class.STORAGE: Meaning("a disk or file system failed", Fault.CLUSTER),
    Class.PREEMPTED: Meaning("the job was told to leave: preemption, time limit or cancellation", Fault.CLUSTER),
    Class.KILLED: Meaning("a process was ended from outside", Fault.CLUSTER),
    Class.NODE_LOST: Meaning("a node was lost", Fault.CLUSTER),
    Class.NOT_STARTED: Meaning("the job never got to run", Fault.CLUSTER),
    Class.UNKNOWN: Meaning("what was read does not decide", Fault.USER),
}
