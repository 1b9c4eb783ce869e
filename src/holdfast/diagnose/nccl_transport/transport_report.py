"""The frozen report: processes, communicators, and the connections between their ranks."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from itertools import pairwise

import msgspec

from holdfast.findings import Finding


class TransportKind(StrEnum):
    """The kind of transport between two ranks."""

    P2P = "P2P"
    SHM = "SHM"
    NET = "NET"
    COLLNET = "CollNet"


class Direction(StrEnum):
    """Which end of a connection logged it; for transports within a node only the sender does."""

    SEND = "send"
    RECEIVE = "receive"


class LogLine(msgspec.Struct, frozen=True, gc=False):
    """A line that was read: its location, and its text."""

    source: str
    line: int
    text: str

    def __str__(self) -> str:
        """`file:line: text`, as findings quote it."""
        return f"{self.source}:{self.line}: {self.text}"


# Python 3.11 takes ten times as long for a member by its class as for a name, and there are millions of links.
NET, COLLNET, P2P, SHM = TransportKind.NET, TransportKind.COLLNET, TransportKind.P2P, TransportKind.SHM
RECEIVE = Direction.RECEIVE


class LinkType(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """The text after NCCL's `via`: how one end of a connection sends or receives."""

    kind: TransportKind
    name: str
    """The network's own name (`IB`, `AWS Libfabric`, `Socket`), or the method within a node (`CUMEM`, `IPC`, …)."""
    direction: Direction = Direction.SEND
    nic: int | None = None
    """The index of the network device that this end uses."""
    proxy: int | None = None
    """The rank through whose NIC it goes (PXN)."""
    gdr: bool = False
    """Whether the NIC reads and writes GPU memory itself."""
    options: str = ""
    """The remaining parts: `/read`, `/CE`, `(PCI)`, `/Shared`."""
    route: str
    """Kind, name and whether GPU memory is reached directly, as NCCL writes it: `NET/IB/GDRDMA`, `P2P/CUMEM`."""


class Link(msgspec.Struct, gc=False):
    """One end's record of how two ranks are connected, over one or more channels; those are added while its lines are
    read.

    There are millions, so it is created once.
    """

    sender: int
    receiver: int
    """-1 for the switch of a CollNet."""
    channels: int
    """A bit for each channel: 0b101 is channels 0 and 2."""
    link_type: LinkType
    reported_by: int
    """The rank that logged it."""


class NcclProcess(msgspec.Struct, frozen=True, kw_only=True):
    """What a process logged of itself and of its node; empty where it logged nothing."""

    node: str
    host: str
    pid: int
    replica: int | None = None
    """Its replica, where its log's path or HOLDFAST_REPLICA in the log gives it."""
    nccl: str = ""
    cuda: str = ""
    driver: str = ""
    network: str = ""
    """The name in `Using network …`."""
    plugin: str = ""
    """The network plugin and its version, such as `aws-ofi-nccl 1.7.4-aws`."""
    hcas: tuple[str, ...] = ()
    """`device:port/link layer`, as the verbs transport listed them."""
    interfaces: tuple[str, ...] = ()
    """The interfaces of the socket transport."""
    bootstrap: str = ""
    """Interface and address of the bootstrap."""
    path: str = ""
    """Kind of path between the GPUs of the node, from the graph search: NVL, PIX, PXB, PHB, SYS."""
    nics: int | None = None
    """Network devices that the plugin found."""
    env: Mapping[str, str] = {}
    evidence: Mapping[str, LogLine] = {}
    """The first line of each kind of fact, by the fact's name."""


class CommRank(msgspec.Struct, frozen=True, kw_only=True):
    """A rank of a communicator, with its process and device."""

    rank: int
    process: int
    """Index into `Transport.processes`."""
    pointer: str
    device: int
    bus: str
    nvml: int | None = None
    complete: bool = False
    """Whether its set-up finished; a rank that only began is where a set-up hangs."""
    evidence: LogLine


class Communicator(msgspec.Struct, frozen=True, kw_only=True):
    """A set of ranks that communicate, joined over the logs of all of them."""

    name: str
    """Its set of ranks, by their numbers in the largest communicator: `all 16 ranks`, `ranks 0-7`."""
    id: str
    """NCCL's id of it, where NCCL logs one."""
    size: int
    """Its number of ranks as NCCL logs it; 0 where no line gives it."""
    members: tuple[CommRank, ...]
    """The ranks in the logs, by rank."""
    nodes: int | None = None
    """The number of nodes as NCCL logs it."""
    links: tuple[Link, ...]
    inferred: int = 0
    """Connection lines that could have been another communicator's too."""
    failures: Mapping[int, tuple[str, ...]] = {}
    """Why ranks cannot be connected, by rank: the causes warned of before any ring or tree was complete."""
    connected: tuple[str, ...] = ()
    """What all ranks in the logs have connected (`all rings`, `all trees`); empty unless that is all of their links."""

    @property
    def missing(self) -> tuple[range, ...]:
        """The ranks missing from the logs, as the gaps between those found."""
        bounds = [-1, *(member.rank for member in self.members), self.size]
        return tuple(range(low + 1, high) for low, high in pairwise(bounds) if high - low > 1) if self.size else ()


class FabricOutcome(StrEnum):
    """What the logs prove of the fabric."""

    VERIFIED = "fabric-verified"
    DEGRADED = "fabric-degraded"
    TCP_FALLBACK = "tcp-fallback"
    FAILED = "fabric-failed"
    """NCCL cannot connect nodes; only while a run lasts, since later the rank's own error counts."""
    UNKNOWN = "unknown"


class FabricVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """One sentence on the fabric, with the lines that prove it; or the fact that would decide."""

    outcome: FabricOutcome
    what: str
    cause: str = ""
    """The code of the finding that degraded it; `one-node` where no network was needed."""
    expected: str = ""
    """What was expected, and why."""
    missing: str = ""
    """For `unknown`: which evidence would decide, and how to get it."""
    evidence: tuple[LogLine, ...] = ()
    remedy: str = ""


class TransportReport(msgspec.Struct, frozen=True, kw_only=True):
    """What the fabric did, by the logs."""

    processes: tuple[NcclProcess, ...]
    communicators: tuple[Communicator, ...]
    """The largest first."""
    versions: Mapping[str, LogLine] = {}
    """Each NCCL version logged, `2.27.3+cuda12.8`, with its first line."""
    findings: tuple[Finding, ...] = ()
    verdict: FabricVerdict
    info_lines: int
    """How many lines at level INFO NCCL wrote."""
    truncated_lines: int = 0
    """Connection lines that were torn, and therefore count for nothing."""
    unassigned_links: int = 0
    """Connection lines of processes without any communicator in the logs."""
    left_out: int = 0
    """Lines over the limit of one reading."""
