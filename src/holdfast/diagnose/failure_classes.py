"""The failure classes that a diagnosis can name, its confidence, and who can fix each.

The values are the labels under which incidents are collected and scored: more may come, none is ever renamed.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from holdfast.findings import Owner


class Confidence(StrEnum):
    """The confidence of a diagnosis."""

    CERTAIN = "certain"
    """The line has one cause, and no evidence contradicts it."""
    LIKELY = "likely"
    """The usual cause; another one is possible and is named."""
    UNSURE = "unsure"
    """Several causes write this line; deciding needs other evidence."""


class FailureClass(StrEnum):
    """The kind of a failure."""

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
    # These have the label `other` in the incident collections, and need different remedies.
    PROGRAM_ERROR = "program-error"
    USAGE = "usage-error"
    UNREACHABLE = "data/hub-unreachable"
    STORAGE = "storage"
    PREEMPTED = "preempted"
    KILLED = "killed"
    NODE_LOST = "node-lost"
    NOT_STARTED = "not-started"
    # Not a class, but a verdict: the input does not decide.
    UNKNOWN = "unknown"

    @property
    def description(self) -> str:
        """A description for a headline."""
        return FAILURE_CLASS_INFO[self].description

    @property
    def owner(self) -> Owner:
        """Who can fix it."""
        return FAILURE_CLASS_INFO[self].owner

    @property
    def label(self) -> FailureClass:
        """The class under which collected incidents file it."""
        return FailureClass.OTHER if self in _LABELLED_OTHER else self


_LABELLED_OTHER = frozenset(
    {
        *(FailureClass.PROGRAM_ERROR, FailureClass.USAGE, FailureClass.UNREACHABLE, FailureClass.STORAGE),
        *(FailureClass.PREEMPTED, FailureClass.KILLED, FailureClass.NODE_LOST, FailureClass.NOT_STARTED),
    }
)


@dataclass(frozen=True)
class FailureClassInfo:
    """A class in words, and who can fix it."""

    description: str
    owner: Owner


FAILURE_CLASS_INFO: dict[FailureClass, FailureClassInfo] = {
    FailureClass.ACS_IOMMU: FailureClassInfo(
        "PCIe access control (ACS) or the IOMMU blocks traffic between GPU and GPU or NIC", Owner.CLUSTER
    ),
    FailureClass.COLLECTIVE_MISMATCH: FailureClassInfo("ranks made different collective calls", Owner.USER),
    FailureClass.DRIVER: FailureClassInfo(
        "the GPU driver, Fabric Manager, IMEX or nvidia_peermem is broken or misconfigured", Owner.CLUSTER
    ),
    FailureClass.FIREWALL: FailureClassInfo("something between the nodes closes or drops connections", Owner.CLUSTER),
    FailureClass.GDR_MISSING: FailureClassInfo(
        "the network cannot reach GPU memory directly (no GPUDirect RDMA)", Owner.CLUSTER
    ),
    FailureClass.GPU_XID: FailureClassInfo("a GPU or its links failed", Owner.CLUSTER),
    FailureClass.HANG_UNKNOWN: FailureClassInfo("ranks stopped making progress", Owner.USER),
    FailureClass.MEMLOCK: FailureClassInfo(
        "a limit of the process is too low: locked memory or open files", Owner.CLUSTER
    ),
    FailureClass.NAN_DATA: FailureClassInfo(
        "the data or the numbers are bad: NaN, or an index out of range", Owner.USER
    ),
    FailureClass.NETWORK_LOSS: FailureClassInfo(
        "the RDMA network loses or refuses traffic: MTU, GID, PFC, link", Owner.CLUSTER
    ),
    FailureClass.OOM_GPU: FailureClassInfo("GPU memory ran out", Owner.USER),
    FailureClass.OOM_HOST: FailureClassInfo("host memory ran out", Owner.USER),
    FailureClass.RANK_COUNT: FailureClassInfo("the ranks disagree on the world size or on rank numbers", Owner.USER),
    FailureClass.RDMA_DEVICE_MISSING: FailureClassInfo("no RDMA device, or fewer than there should be", Owner.CLUSTER),
    FailureClass.RENDEZVOUS: FailureClassInfo("the ranks could not complete the rendezvous", Owner.CLUSTER),
    FailureClass.SHM_TOO_SMALL: FailureClassInfo("/dev/shm is too small", Owner.USER),
    FailureClass.STRAGGLER: FailureClassInfo("one rank was far behind the others", Owner.USER),
    FailureClass.TCP_FALLBACK: FailureClassInfo("the ranks use plain TCP instead of the fast network", Owner.CLUSTER),
    FailureClass.VERSION_MISMATCH: FailureClassInfo("versions are incompatible", Owner.USER),
    FailureClass.WRONG_INTERFACE: FailureClassInfo("the wrong network interface was chosen", Owner.USER),
    FailureClass.OTHER: FailureClassInfo("a known fault that has no separate class", Owner.CLUSTER),
    FailureClass.PROGRAM_ERROR: FailureClassInfo("the program itself failed", Owner.USER),
    FailureClass.USAGE: FailureClassInfo(
        "the program or its launcher rejected its command line or configuration", Owner.USER
    ),
    FailureClass.UNREACHABLE: FailureClassInfo(
        "data, a model hub or another service could not be reached", Owner.CLUSTER
    ),
    FailureClass.STORAGE: FailureClassInfo("a disk or file system failed", Owner.CLUSTER),
    FailureClass.PREEMPTED: FailureClassInfo(
        "the job was stopped: preemption, time limit or cancellation", Owner.CLUSTER
    ),
    FailureClass.KILLED: FailureClassInfo("a process was ended from outside", Owner.CLUSTER),
    FailureClass.NODE_LOST: FailureClassInfo("a node was lost", Owner.CLUSTER),
    FailureClass.NOT_STARTED: FailureClassInfo("the job never started to run", Owner.CLUSTER),
    FailureClass.UNKNOWN: FailureClassInfo("the input does not decide", Owner.USER),
}
