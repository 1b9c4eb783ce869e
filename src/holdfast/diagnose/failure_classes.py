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
    def layer(self) -> int:
        """Its depth among causes: a deeper class, of a lower number, explains those above it."""
        return FAILURE_CLASS_INFO[self].layer

    @property
    def label(self) -> FailureClass:
        """The class under which collected incidents file it."""
        return FAILURE_CLASS_INFO[self].label or self


@dataclass(frozen=True)
class FailureClassInfo:
    """A class in words, who can fix it, and its place among causes."""

    description: str
    owner: Owner
    layer: int
    label: FailureClass | None = None
    """The class under which collected incidents file it, if another one."""


FAILURE_CLASS_INFO: dict[FailureClass, FailureClassInfo] = {
    FailureClass.ACS_IOMMU: FailureClassInfo(
        "PCIe access control (ACS) or the IOMMU blocks traffic between GPU and GPU or NIC", Owner.CLUSTER, 3
    ),
    FailureClass.COLLECTIVE_MISMATCH: FailureClassInfo("ranks made different collective calls", Owner.USER, 5),
    FailureClass.DRIVER: FailureClassInfo(
        "the GPU driver, Fabric Manager, IMEX or nvidia_peermem is broken or misconfigured", Owner.CLUSTER, 1
    ),
    FailureClass.FIREWALL: FailureClassInfo(
        "something between the nodes closes or drops connections", Owner.CLUSTER, 3
    ),
    FailureClass.GDR_MISSING: FailureClassInfo(
        "the network cannot reach GPU memory directly (no GPUDirect RDMA)", Owner.CLUSTER, 3
    ),
    FailureClass.GPU_XID: FailureClassInfo("a GPU or its links failed", Owner.CLUSTER, 0),
    FailureClass.HANG_UNKNOWN: FailureClassInfo("ranks stopped making progress", Owner.USER, 5),
    FailureClass.MEMLOCK: FailureClassInfo(
        "a limit of the process is too low: locked memory or open files", Owner.CLUSTER, 1
    ),
    FailureClass.NAN_DATA: FailureClassInfo(
        "the data or the numbers are bad: NaN, or an index out of range", Owner.USER, 2
    ),
    FailureClass.NETWORK_LOSS: FailureClassInfo(
        "the RDMA network loses or refuses traffic: MTU, GID, PFC, link", Owner.CLUSTER, 3
    ),
    FailureClass.OOM_GPU: FailureClassInfo("GPU memory ran out", Owner.USER, 1),
    FailureClass.OOM_HOST: FailureClassInfo("host memory ran out", Owner.USER, 0),
    FailureClass.RANK_COUNT: FailureClassInfo("the ranks disagree on the world size or on rank numbers", Owner.USER, 2),
    FailureClass.RDMA_DEVICE_MISSING: FailureClassInfo(
        "no RDMA device, or fewer than there should be", Owner.CLUSTER, 2
    ),
    FailureClass.RENDEZVOUS: FailureClassInfo("the ranks could not complete the rendezvous", Owner.CLUSTER, 3),
    FailureClass.SHM_TOO_SMALL: FailureClassInfo("/dev/shm is too small", Owner.USER, 1),
    FailureClass.STRAGGLER: FailureClassInfo("one rank was far behind the others", Owner.USER, 5),
    FailureClass.TCP_FALLBACK: FailureClassInfo(
        "the ranks use plain TCP instead of the fast network", Owner.CLUSTER, 3
    ),
    FailureClass.VERSION_MISMATCH: FailureClassInfo("versions are incompatible", Owner.USER, 1),
    FailureClass.WRONG_INTERFACE: FailureClassInfo("the wrong network interface was chosen", Owner.USER, 2),
    FailureClass.OTHER: FailureClassInfo("a known fault that has no separate class", Owner.CLUSTER, 4),
    FailureClass.PROGRAM_ERROR: FailureClassInfo("the program itself failed", Owner.USER, 4, FailureClass.OTHER),
    FailureClass.USAGE: FailureClassInfo(
        "the program or its launcher rejected its command line or configuration", Owner.USER, 4, FailureClass.OTHER
    ),
    FailureClass.UNREACHABLE: FailureClassInfo(
        "data, a model hub or another service could not be reached", Owner.CLUSTER, 4, FailureClass.OTHER
    ),
    FailureClass.STORAGE: FailureClassInfo("a disk or file system failed", Owner.CLUSTER, 1, FailureClass.OTHER),
    FailureClass.PREEMPTED: FailureClassInfo(
        "the job was stopped: preemption, time limit or cancellation", Owner.CLUSTER, 4, FailureClass.OTHER
    ),
    FailureClass.KILLED: FailureClassInfo("a process was ended from outside", Owner.CLUSTER, 4, FailureClass.OTHER),
    FailureClass.NODE_LOST: FailureClassInfo("a node was lost", Owner.CLUSTER, 0, FailureClass.OTHER),
    FailureClass.NOT_STARTED: FailureClassInfo("the job never started to run", Owner.CLUSTER, 2, FailureClass.OTHER),
    FailureClass.UNKNOWN: FailureClassInfo("the input does not decide", Owner.USER, 6),
}

HANG_FAILURE_CLASSES = frozenset(each for each in FailureClass if each.layer == 5)
